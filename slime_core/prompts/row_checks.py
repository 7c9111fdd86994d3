"""What a row asks for is looked at where it is read, so that ``on_bad_data`` decides about it, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from slime_core.config.schema import RunConfig
from slime_core.errors import DataError
from slime_core.plugins import hooks
from slime_core.plugins.activation import Registry
from slime_core.plugins.boundary import boundary
from slime_core.plugins.construction import run_plan
from slime_core.prompts.named import Offered, offered_to_rows, refuse_unknown
from slime_core.prompts.row_sampling import Drawn, drawn, refuse_unusable
from slime_core.types import JsonValue

__all__ = ["RowCheck", "RowMistakes", "check_of", "mistakes_of_plugins", "row_check"]

RowCheck = Callable[[Mapping[str, JsonValue], str], None]
"""Called with a row's metadata and where it stands; raises a DataError where the run cannot do what it asks for."""

RowMistakes = Callable[[Mapping[str, JsonValue]], Iterator[str]]
"""What is wrong with a row's metadata."""


def row_check(offered: Offered, drawn: Drawn | None, mistakes: RowMistakes | None = None) -> RowCheck:
    """The check of rows that may name what is ``offered``, and change nothing of what is ``drawn``.

    Arguments:
        mistakes: what else is wrong with a row; None: nothing is.
    """

    def check(metadata: Mapping[str, JsonValue], where: str) -> None:
        refuse_unknown(metadata, offered, where=where)
        refuse_unusable(metadata, drawn=drawn, where=where)
        if mistakes is not None and (found := next(mistakes(metadata), None)) is not None:
            raise DataError(f"{where}: {found}")

    return check


def check_of(
    config: RunConfig, registry: Registry, *, trains: bool, options: Mapping[str, object] | None = None
) -> RowCheck:
    """The check of the rows of a run.

    Arguments:
        trains: False: they are only measured.
        options: plugin name -> its options object; of a plugin that is not there, the defaults.
    """
    offered = offered_to_rows(config, registry, options)
    return row_check(offered, drawn(config) if trains else None, mistakes_of_plugins(config, registry, options))


def mistakes_of_plugins(
    config: RunConfig, registry: Registry, options: Mapping[str, object] | None = None
) -> RowMistakes | None:
    """What the plugins of a run say of its rows (``slime_check_row``); None: none of them says anything."""
    asked = registry.declarations.get(hooks.CHECK_ROW, ())
    if not asked:
        return None
    plan = run_plan(config, options)

    def mistakes(metadata: Mapping[str, JsonValue]) -> Iterator[str]:
        for one in asked:
            given = {"metadata": metadata, "plan": plan, "options": registry.options_of(one.plugin.name, options)}
            with boundary(one.plugin, f"calling {hooks.CHECK_ROW}", locate=True):
                found = list(one.function(**{name: given[name] for name in one.wants}) or ())
            yield from found

    return mistakes
