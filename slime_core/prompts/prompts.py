"""Prompt groups of prompts that have numbers: what data sources that read files have in common."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast

from slime_core.errors import CheckpointError, RunError
from slime_core.plugins.contracts import PromptRequest, RunView
from slime_core.prompts.stream import Stream
from slime_core.types import JsonValue, PromptGroup, Sample

__all__ = ["NumberedPrompts", "requested"]


def requested(run: RunView) -> PromptRequest:
    """What a data source is asked for."""
    if run.prompts is None:
        raise ValueError("a data source was made with a RunView without prompts; give it a PromptRequest")
    return run.prompts


class NumberedPrompts:
    """A data source that hands out every prompt of a stream in the order of its numbers; numbers groups and samples
    through the whole run. Groups that are put back come again under their old numbers.

    Arguments:
        stream: prompts by their number.
        request: what the run asks its data source for.
    """

    def __init__(self, stream: Stream, request: PromptRequest) -> None:
        self._request, self._stream = request, stream
        size = request.n_samples_per_prompt
        self._order_comes_from = {**stream.identity(), "n_samples_per_prompt": size}
        self._next = 0
        self._returned: list[int] = []

    def __len__(self) -> int:
        return len(self._stream)

    def next_groups(self, n: int) -> list[PromptGroup]:
        """The next ``n`` groups: those that were put back first, then new ones."""
        again, self._returned = self._returned[:n], self._returned[n:]
        fresh = range(self._next, self._next + n - len(again))
        self._stream.prepare(fresh.stop)
        self._next = fresh.stop
        return [self._group(number) for number in [*again, *fresh]]

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Take unfinished groups back; they are handed out first, under their old numbers, as new samples.

        Raises:
            RunError: a group has no number, or no sample, so that nothing says which prompt it is of.
        """
        self._returned.extend([_number(group) for group in groups])

    def state(self) -> dict[str, JsonValue]:
        """The number of the next new group, the groups that were put back, and all that decides what a number means."""
        place = self._stream.state(self._returned)
        return {"next": self._next, "returned": list(self._returned), **self._order_comes_from, **place}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Continue where ``state()`` was taken.

        Raises:
            CheckpointError: prompts, seed, shuffling or group size are others than when the state was taken.
        """
        found = self._order_comes_from
        differ = [f"{key} was {state.get(key)}, is {value}" for key, value in found.items() if state.get(key) != value]
        if differ:
            raise CheckpointError(
                f"{self._request.path}: the checkpoint's place in the data would mean other prompts: "
                f"{'; '.join(differ)}. Resume with the prompts and the settings of that run."
            )
        self._stream.restore(state)
        self._next, self._returned = cast(int, state["next"]), list(cast(list[int], state["returned"]))

    def _group(self, number: int) -> PromptGroup:
        """Group ``number`` of the run; the number alone says which prompt, so that it can be made again."""
        row = self._stream.at(number)
        size = self._request.n_samples_per_prompt
        return [
            Sample(
                group_index=number,
                index=number * size + i,
                prompt=copy.deepcopy(row.prompt),
                label=row.label,
                metadata=copy.deepcopy(row.metadata),
                multimodal_inputs=copy.deepcopy(row.inputs),
            )
            for i in range(size)
        ]


def _number(group: PromptGroup) -> int:
    number = group[0].group_index if group else None
    if number is None:
        raise RunError(
            f"a prompt group was put back {'whose group_index is None' if group else 'that has no sample'}; the data "
            "source finds its prompt by that number. Put back groups of samples as next_groups handed them out, or "
            "use a data source with a buffer of its own for samples made elsewhere."
        )
    return number
