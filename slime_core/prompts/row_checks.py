"""What a row asks for is looked at where it is read, so that ``on_bad_data`` decides about it, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime_core.config.schema import RunConfig
from slime_core.plugins.registry import Registry
from slime_core.prompts.named import Offered, offered_to_rows, refuse_unknown
from slime_core.prompts.row_sampling import Drawn, drawn, refuse_unusable

__all__ = ["RowCheck", "check_of", "row_check"]

RowCheck = Callable[[Mapping[str, Any], str], None]
"""Called with a row's metadata and where it stands; raises a DataError where the run cannot do what it asks for."""


def row_check(offered: Offered, drawn: Drawn | None) -> RowCheck:
    """The check of rows that may name what is ``offered``, and change nothing of what is ``drawn``."""

    def check(metadata: Mapping[str, Any], where: str) -> None:
        refuse_unknown(metadata, offered, where=where)
        refuse_unusable(metadata, drawn=drawn, where=where)

    return check


def check_of(config: RunConfig, registry: Registry, *, trains: bool) -> RowCheck:
    """The check of the rows of a run; ``trains``: False: they are only measured."""
    return row_check(offered_to_rows(config, registry), drawn(config) if trains else None)
