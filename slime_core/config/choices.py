"""The components and prompt formats that the settings name: each may activate the plugin that offers it.

``rm_type``: the name of one reward model, or a weighted sum of several, such as ``0.7*math + 0.3*dapo:acc``.

A file may give the sum as a table, which is read into the same text::

    [rollout.rm_type]
    math = 0.7
    "dapo:acc" = 0.3
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from slime_core.config.options import KIND_NAMED_BY
from slime_core.config.prompt_paths import PromptPath
from slime_core.config.section import Name, rejected
from slime_core.errors import DataError

_TERM = re.compile(r"([+-]?)\s*(\d+(?:\.\d*)?|\.\d+)\s*\*\s*([A-Za-z0-9][A-Za-z0-9._+-]*?)(?::([^\s:*]+?))?\s*")
_BETWEEN = re.compile(r"(?<=[^\s+-])\s*(?=[+-]\s*[\d.]+\s*\*)")


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One part of a sum.

    Example: ``0.3*dapo:acc`` is ``RewardTerm(0.3, "dapo", "acc")``.

    Arguments:
        weight: what the part's reward is multiplied with.
        name: of the reward model.
        key: which of its named numbers counts; None: its reward is a plain number.
    """

    weight: float
    name: str
    key: str | None = None

    def __str__(self) -> str:
        return self.name if self.key is None else f"{self.name}:{self.key}"


def reward_terms(written: str) -> tuple[RewardTerm, ...] | None:
    """The parts of a sum, in order; None: ``written`` is the name of one reward model.

    Raises:
        ValueError: it is neither; the message says what is accepted.
    """
    if "*" not in written:
        return None
    found = [_TERM.fullmatch(part) for part in _BETWEEN.split(written.strip())]
    terms = [RewardTerm(float(one[1] + one[2]), one[3], one[4]) for one in found if one]
    if len(terms) < len(found):
        raise ValueError(
            f"{written!r} is no sum of reward models; accepted is WEIGHT*NAME+WEIGHT*NAME, such as '0.7*math+0.3*f1', "
            "or WEIGHT*NAME:KEY for one of several numbers, such as '0.3*dapo:acc'"
        )
    if len({str(term) for term in terms}) < len(terms):
        raise ValueError(f"{written!r} names a part twice; add up its weights")
    return tuple(terms)


def _written(found: Any) -> Any:
    """A table of weights as the text of the sum; any other value unchanged."""
    if not isinstance(found, Mapping):
        return found
    wrong = [f"{name} = {weight!r}" for name, weight in found.items() if not _is_weight(weight)]
    if wrong or not found:
        shown = ", ".join(wrong) or "an empty table"
        raise rejected(f"found {shown}; accepted: a table of reward models and their weights, such as math = 0.7")
    parts = [f"{Decimal(repr(weight)):+f}*{name}" for name, weight in found.items()]
    text = "".join(parts).removeprefix("+")
    try:
        read = reward_terms(text) or ()
    except ValueError:
        read = ()
    if [str(term) for term in read] != list(found):
        names = ", ".join(map(repr, found))
        raise rejected(f'found the parts {names}; accepted: NAME or "NAME:KEY", such as math = 0.7, "dapo:acc" = 0.3')
    return text


def _is_weight(found: object) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)


RewardSum = Annotated[Name, BeforeValidator(_written)]
"""The text of ``rm_type``, which a file may write as a table."""


def reward_names(written: str) -> tuple[str, ...]:
    """The reward models that ``rm_type`` names, each once; of what cannot be read, ``written`` itself."""
    try:
        terms = reward_terms(written)
    except ValueError:
        terms = None
    return (written,) if terms is None else tuple(dict.fromkeys(term.name for term in terms))


PROMPT_FORMAT = "prompt_format"


@dataclass(frozen=True, slots=True)
class Choice:
    """A name that the settings give.

    Example: ``--corrections tis`` is ``Choice("correction", "tis", "--corrections")``.

    Arguments:
        kind: of component, as :class:`~slime_core.plugins.component.Kind` spells it, or :data:`PROMPT_FORMAT`.
        name: of the component, ``plugin:component``, or the prompt format.
        where: what names it, for messages.
    """

    kind: str
    name: str
    where: str


@dataclass(frozen=True, slots=True)
class NamedCode:
    """A function that an option of a plugin names by path.

    Example: ``--custom-rm-path mine.py`` is ``NamedCode("compat", "custom_rm_path", "--custom-rm-path", "mine.py")``.
    """

    plugin: str
    option: str
    flag: str
    path: str


def choices(
    values: Mapping[str, Any], origins: Mapping[str, str], *, prompts: Collection[str] = ()
) -> Iterator[Choice]:
    """Every component and prompt format that ``values`` (setting -> value) name.

    Arguments:
        origins: setting -> where its value comes from, for messages.
        prompts: settings of plugins whose paths are prompt files.
    """
    for setting, kind in KIND_NAMED_BY.items():
        for name in _names(setting, values.get(setting)):
            yield Choice(kind, name, origins.get(setting, setting))
    for one in values.get("eval_datasets") or ():
        for setting in ("generate_function", "rm_type"):
            for name in _names(setting, getattr(one, setting)):
                yield Choice(KIND_NAMED_BY[setting], name, f"{setting} of evaluation set {one.name}")
    for setting, path in _prompt_paths(values, prompts):
        for name in prompt_formats(path):
            yield Choice(PROMPT_FORMAT, name, origins.get(setting, setting))


def prompt_formats(path: Path) -> list[str]:
    """The possible formats of the files that ``path`` names, each once; empty where it names none.

    Example: ``train.parquet@[:100]`` has the format ``parquet``.
    """
    try:
        return PromptPath.read(path).formats()
    except (DataError, OSError):
        return []


def _names(setting: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, tuple):
        return value
    return reward_names(value) if setting == "rm_type" else (value,)


def _prompt_paths(values: Mapping[str, Any], others: Collection[str]) -> Iterator[tuple[str, Path]]:
    if (path := values.get("prompt_data")) is not None:
        yield "prompt_data", path
    yield from ((setting, path) for setting in others for path in _paths_in(values.get(setting)))
    yield from (("eval_prompt_data", path) for _, path in values.get("eval_prompt_data") or ())
    yield from (("eval_datasets", one.path) for one in values.get("eval_datasets") or ())


def _paths_in(value: Any) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, tuple):
        yield from (path for one in value for path in _paths_in(one))
