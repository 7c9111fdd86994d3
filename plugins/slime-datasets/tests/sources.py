"""A plugin with a data source of its own, and the same class for ``--data-source-path``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slime_core import Component, PromptGroup, RunView, Sample, hookimpl
from slime_core.types import JsonValue


@hookimpl
def slime_register_data_sources() -> Iterator[Component]:
    yield Component("endless", target=f"{__name__}:Endless")


class Endless:
    def __init__(self, options: object, run: RunView) -> None: ...

    def next_groups(self, n: int) -> list[PromptGroup]:
        return [[Sample(prompt="1+1")] for _ in range(n)]

    def put_back(self, groups: Sequence[PromptGroup]) -> None: ...

    def state(self) -> Mapping[str, JsonValue]:
        return {}

    def restore(self, state: Mapping[str, JsonValue]) -> None: ...
