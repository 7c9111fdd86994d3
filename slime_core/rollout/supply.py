"""The prompts of a run as the sampler takes them: what was begun before comes first, and everything is written down.

A group that was ended with a part of its responses is *held*, with its tokens, where the run resumes such responses
(``partial_rollout``); it is handed out again before the data source is asked. Any other group that is put back goes to
the data source. The journal says which groups left and which came back (:mod:`slime_core.track.ledger`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.plugins.contracts import DataSource
from slime_core.track.ledger import Journal
from slime_core.types import LogProbs, Mask, PromptGroup, Sample, Status, TokenIds

__all__ = ["Supply", "held_by", "ids_of"]

HELD, SOURCE = "held", "source"
ARRAYS = {"tokens": TokenIds, "rollout_log_probs": LogProbs, "loss_mask": Mask}
"""Fields of a sample that JSON carries as lists."""


class Supply(DataSource):
    """A data source before which groups are held.

    Arguments:
        source: of the prompts.
        journal: receives what is handed out and put back.
        holds: groups with a part of their responses are held; False: they go back to the source.
    """

    def __init__(self, source: DataSource, journal: Journal, *, holds: bool = False) -> None:
        self._source, self._journal, self._holds = source, journal, holds
        self._held: list[PromptGroup] = []

    @property
    def held(self) -> dict[int, list[int]]:
        """The groups that are held: number -> numbers of its samples."""
        return ids_of(self._held)

    def next_groups(self, n: int) -> list[PromptGroup]:
        """The next ``n`` groups: those that are held first, with the tokens that they have."""
        begun, self._held = self._held[:n], self._held[n:]
        fresh = self._source.next_groups(n - len(begun)) if n > len(begun) else []
        if fresh:
            self._journal.took(ids_of(fresh))
        return [*begun, *fresh]

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Hold groups that have begun and were ended, and hand the others back to the source."""
        begun = [group for group in groups if self._holds and _has_begun(group)]
        others = [group for group in groups if not any(group is one for one in begun)]
        self._held += begun
        if others:
            self._journal.gave_back(ids_of(others))
            self._source.put_back(others)

    def state(self) -> dict[str, Any]:
        """The source's own state; where groups are held, beside them, each as one text.

        A group that JSON cannot carry is there without its responses, so that its prompt comes again.
        """
        state = self._source.state()
        return {HELD: [_text(group) for group in self._held], SOURCE: state} if self._held else state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from where ``state()`` was taken."""
        self._held = [_read(text) for text in state[HELD]] if state.keys() == {HELD, SOURCE} else []
        self._source.restore(state[SOURCE] if self._held else state)

    def __len__(self) -> int:
        return len(self._source)


def ids_of(groups: Sequence[PromptGroup]) -> dict[int, list[int]]:
    """Number of a group -> the numbers of its samples; groups and samples without a number are left out."""
    found: dict[int, list[int]] = {}
    for sample in (sample for group in groups for sample in group):
        if sample.group_index is not None and sample.index is not None:
            found.setdefault(sample.group_index, []).append(sample.index)
    return found


def held_by(source: DataSource) -> dict[int, list[int]]:
    """The groups that ``source`` holds before another one."""
    return source.held if isinstance(source, Supply) else {}


def _has_begun(group: PromptGroup) -> bool:
    was_ended = any(sample.status is Status.ABORTED for sample in group)
    return was_ended and any(sample.response_length for sample in group)


def _text(group: PromptGroup) -> str:
    try:
        return json.dumps([sample.to_dict() for sample in group])
    except (TypeError, ValueError):
        given = [
            Sample(group_index=one.group_index, index=one.index, prompt=one.prompt, label=one.label) for one in group
        ]
        return json.dumps([{**new.to_dict(), "metadata": one.metadata} for new, one in zip(given, group, strict=True)])


def _read(text: str) -> PromptGroup:
    samples = [Sample.from_dict(values) for values in json.loads(text)]
    for sample in samples:
        for name, kind in ARRAYS.items():
            if getattr(sample, name) is not None:
                setattr(sample, name, kind(getattr(sample, name)))
    return samples
