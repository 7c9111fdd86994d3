"""A plugin with a data source, and the same class for ``--data-source-path``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime_core import PromptGroup, Registration, Sample, hookimpl
from slime_core.types import JsonValue


@hookimpl
def slime_register(add: Registration) -> None:
    add.data_source("endless", Endless)


class Endless:
    def next_groups(self, n: int) -> list[PromptGroup]:
        return [[Sample(prompt="1+1")] for _ in range(n)]

    def put_back(self, groups: Sequence[PromptGroup]) -> None: ...

    def state(self) -> Mapping[str, JsonValue]:
        return {}

    def restore(self, state: Mapping[str, JsonValue]) -> None: ...
