"""What a row of a prompt file may name for itself: the generate function and the reward model of its samples.

``{"prompt": "2+2", "label": "4", "metadata": {"rm_type": "exact_match", "generate_function": "single_turn"}}``

A name is that of a component of a plugin that the run has named, and nothing else: it is never a path to code, so that
data cannot make a run execute what the run did not ask for. A row without a name, or with null or an empty text, takes
the components that the run's settings name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.config.reward_sum import reward_names
from slime_core.config.schema import RunConfig
from slime_core.errors import DataError
from slime_core.plugins.component import Kind
from slime_core.plugins.discovery import nearest
from slime_core.plugins.registry import Registry
from slime_core.types import Sample

__all__ = ["GENERATE_FUNCTION", "REWARD_MODEL", "Offered", "name_of", "offered_to_rows", "refuse_unknown"]

GENERATE_FUNCTION = "generate_function"
REWARD_MODEL = "rm_type"
"""Keys of a row's metadata."""

KINDS = {GENERATE_FUNCTION: Kind.GENERATE_FUNCTION, REWARD_MODEL: Kind.REWARD_MODEL}

Offered = Mapping[str, Sequence[str]]
"""Key of a row's metadata -> the names it may hold."""


def offered_to_rows(config: RunConfig, registry: Registry) -> dict[str, Sequence[str]]:
    """What rows may name; as in slime, they have no say in the reward where the run gives a function for it by path."""
    kinds = dict(KINDS)
    if config.custom.custom_rm_path is not None:
        del kinds[REWARD_MODEL]
    return {key: registry.names(kind) for key, kind in kinds.items()}


def name_of(sample: Sample, key: str, offered: Offered) -> str | None:
    """The component that the sample's row names under ``key``; None: the run's.

    ``Sample.generate_function_path``, slime's name for it, goes before the metadata.

    Raises:
        DataError: no active plugin offers it.
    """
    if key not in offered:
        return None
    own = sample.generate_function_path if key == GENERATE_FUNCTION else None
    name = own or sample.metadata.get(key)
    if not name:
        return None
    refuse_unknown({key: name}, offered, where=f"sample {sample.index} of group {sample.group_index}")
    return str(name)


def refuse_unknown(metadata: Mapping[str, Any], offered: Offered, *, where: str) -> None:
    """Returns if what ``metadata`` names can be had.

    Arguments:
        where: the row, for the message.

    Raises:
        DataError: no active plugin offers it; says which do exist.
    """
    for key, names in offered.items():
        name = metadata.get(key)
        if name and not _is_offered(name, KINDS[key], names):
            found = f"{where}: metadata {key} = {name!r} names no {KINDS[key].words} of the run's plugins"
            close = nearest(name, names) if isinstance(name, str) else ""
            raise DataError(
                f"{found}{close}. They offer: {', '.join(names)}.\nCorrect the row, or name the plugin that has it "
                "with --plugin NAME. Rows name components; a path to code is given as a flag."
            )


def _is_offered(name: Any, kind: Kind, names: Sequence[str]) -> bool:
    """A row may also name a weighted sum of reward models."""
    if kind is Kind.REWARD_MODEL and isinstance(name, str):
        return all(part in names for part in reward_names(name))
    return name in names
