"""An endless data source of sums of two digits that resumes exactly: the number of a group determines its sum."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from slime_core import PromptGroup, Registration, RunView, Sample, hookimpl
from slime_core.types import JsonValue


@hookimpl
def slime_register(add: Registration) -> None:
    add.data_source("endless_sums", EndlessSums)


class EndlessSums:
    """Sums of two digits without end; group n is the same in every run of one seed."""

    def __init__(self, run: RunView) -> None:
        self._seed, self._count = run.seed, run.n_samples_per_prompt
        self._next = 0
        self._returned: list[int] = []

    def next_groups(self, n: int) -> list[PromptGroup]:
        """Return the groups that were put back, then new ones."""
        again, self._returned = self._returned[:n], self._returned[n:]
        fresh = range(self._next, self._next + n - len(again))
        self._next = fresh.stop
        return [self._group(number) for number in [*again, *fresh]]

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Take groups back; they come first."""
        self._returned += [group[0].group_index for group in groups if group[0].group_index is not None]

    def state(self) -> dict[str, JsonValue]:
        """Return the next number, and those that were put back."""
        return {"next": self._next, "returned": list[JsonValue](self._returned)}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Continue from a state."""
        place, returned = state["next"], state["returned"]
        assert isinstance(place, int)
        assert isinstance(returned, list)
        self._next, self._returned = place, [number for number in returned if isinstance(number, int)]

    def _group(self, number: int) -> PromptGroup:
        random_source = random.Random(f"{self._seed} {number}")
        first, second = random_source.randrange(10), random_source.randrange(10)
        indices = range(number * self._count, (number + 1) * self._count)
        prompt, label = f"{first}+{second}", str(first + second)
        return [Sample(group_index=number, index=index, prompt=prompt, label=label) for index in indices]
