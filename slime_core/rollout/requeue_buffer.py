"""The prompts of a run as the sampler takes them: what was begun before comes first, and everything is written down.

A group that was ended with a part of its responses is *held*, with its tokens, where the run resumes such responses
(``partial_rollout``); it is handed out again before the data source is asked. Any other group that is put back goes to
the data source. The journal says which groups left and which came back (:mod:`slime_core.track.ledger`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from itertools import compress
from typing import Any, cast

from slime_core.plugins.contracts import DataSource
from slime_core.rollout.resumable_groups import dump_group, dump_prompts, load_group
from slime_core.track.ledger import Journal
from slime_core.types import PromptGroup, Status

__all__ = ["RequeueBuffer", "held_groups", "sample_ids_by_group"]

HELD, LEFT, SOURCE = "held", "left", "source"


class RequeueBuffer(DataSource):
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
        return sample_ids_by_group(self._held)

    def next_groups(self, n: int) -> list[PromptGroup]:
        """The next ``n`` groups: those that are held first, with the tokens that they have."""
        begun, self._held = self._held[:n], self._held[n:]
        fresh = self._source.next_groups(n - len(begun)) if n > len(begun) else []
        if fresh:
            self._journal.took(sample_ids_by_group(fresh))
        return [*begun, *fresh]

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Hold groups that have begun and were ended, and hand the others back to the source."""
        holds = [self._holds and _has_begun(group) for group in groups]
        self._held += compress(groups, holds)
        others = [group for group, is_held in zip(groups, holds, strict=True) if not is_held]
        if others:
            self._journal.gave_back(sample_ids_by_group(others))
            self._source.put_back(others)

    def state(self) -> dict[str, Any]:
        """The source's own state; where groups are held, beside them, each as one text.

        Of a group that JSON cannot carry, only what says which prompt it is of: that comes again.
        """
        state = self._source.state()
        if not self._held:
            return state
        texts = [dump_group(group, 0) for group in self._held]
        left = [dump_prompts(group, 0) for group, text in zip(self._held, texts, strict=True) if text is None]
        return {HELD: [text for text in texts if text is not None], LEFT: left, SOURCE: state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from where ``state()`` was taken."""
        if state.keys() != {HELD, LEFT, SOURCE}:
            self._held = []
            self._source.restore(state)
            return
        self._source.restore(state[SOURCE])
        self._held = [load_group(text)[1] for text in state[HELD]]
        again = [load_group(text)[1] for text in state[LEFT]]
        if again:
            self._journal.gave_back(sample_ids_by_group(again))
            self._source.put_back(again)

    def __len__(self) -> int:
        return len(cast(Sized, self._source))


def sample_ids_by_group(groups: Sequence[PromptGroup]) -> dict[int, list[int]]:
    """Number of a group -> the numbers of its samples; groups and samples without a number are left out."""
    found: dict[int, list[int]] = {}
    for sample in (sample for group in groups for sample in group):
        if sample.group_index is not None:
            found.setdefault(sample.group_index, []).extend([] if sample.index is None else [sample.index])
    return found


def held_groups(source: DataSource) -> dict[int, list[int]]:
    """The groups that ``source`` holds before another one."""
    return source.held if isinstance(source, RequeueBuffer) else {}


def _has_begun(group: PromptGroup) -> bool:
    was_ended = any(sample.status is Status.ABORTED for sample in group)
    return was_ended and any(sample.response_length for sample in group)
