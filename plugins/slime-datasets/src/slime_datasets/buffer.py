"""The data source ``buffered``: groups that were put back or written by another program, before new prompts."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_core import RunView
from slime_core.errors import CheckpointError
from slime_core.provisional import PromptScreen
from slime_core.types import PromptGroup, Sample
from slime_datasets.arrivals import Arrivals, screen_arrivals
from slime_datasets.numbered import requested
from slime_datasets.options import DatasetsOptions
from slime_datasets.prompt_files import PromptFiles, screen_prompts
from slime_datasets.trajectories import Fit

__all__ = ["FILTERS", "BufferedPrompts"]


class BufferedPrompts:
    """Returns requeued groups and those of --buffer-data first, in the order of --buffer-filter, then new prompts.

    Arguments:
        options: the sources to read and the filter of the buffer.
        run: the run, with its ``prompts``; see :class:`~slime_core.provisional.PromptRequest`.

    Raises:
        DataError: prompts or trajectories cannot be read.
    """

    def __init__(self, options: DatasetsOptions, run: RunView) -> None:
        self._options = options
        self._reward_key = run.reward_key
        self._prompts = PromptFiles(options, run)
        self._arrivals = Arrivals(options.buffer_data, requested(run), run)
        self._buffer: list[PromptGroup] = []

    @classmethod
    def screen(cls, options: DatasetsOptions, run: RunView, screen: PromptScreen) -> list[str]:
        """See :class:`~slime_core.DataSource`; also checks the trajectories that exist already.

        Raises:
            DataError: a prompt or a trajectory is invalid; names file and line.
        """
        request = requested(run)
        if options.buffer_data is not None and not request.skips_bad:
            screen_arrivals(options.buffer_data, Fit.of(request, run))
        return screen_prompts(options, request, screen)

    def __len__(self) -> int:
        return len(self._prompts)

    def get_samples(self, n: int) -> list[PromptGroup]:
        """slime's name for :meth:`next_groups`."""
        return self.next_groups(n)

    def add_samples(self, groups: Sequence[PromptGroup]) -> None:
        """slime's name for :meth:`put_back`."""
        self.put_back(groups)

    def buffer_filter(self, buffer: Sequence[PromptGroup], n: int) -> list[PromptGroup]:
        """Return the next groups of ``buffer``, at most ``n``; a subclass may override the choice."""
        return FILTERS[self._options.buffer_filter](buffer, n, self._order)

    def next_groups(self, n: int) -> list[PromptGroup]:
        """Return the next ``n`` groups."""
        self._buffer += self._arrivals.take()
        chosen = self.buffer_filter(list(self._buffer), n)
        returned = set(map(id, chosen))
        self._buffer = [group for group in self._buffer if id(group) not in returned]
        return [*chosen, *self._prompts.next_groups(n - len(chosen))]

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Add copies of ``groups`` to the buffer."""
        self._buffer += [copy.deepcopy(group) for group in groups]

    def state(self) -> dict[str, Any]:
        """Return the position in the prompts, the buffer, and the names of the trajectory files read so far."""
        buffer = [[sample.to_dict() for sample in group] for group in self._buffer]
        return {"prompts": self._prompts.state(), "buffer": copy.deepcopy(buffer), "read": self._arrivals.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``.

        Raises:
            CheckpointError: the state belongs to another data source, or the prompts have changed.
        """
        if "buffer" not in state:
            raise CheckpointError(
                "the checkpoint's place in the data has no buffer, so another data source wrote it; resume with the "
                "--data-source of that run"
            )
        self._prompts.restore(state["prompts"])
        self._buffer = [[Sample.from_dict(sample) for sample in group] for group in state["buffer"]]
        self._arrivals.restore(state["read"])

    def _order(self, group: PromptGroup) -> tuple[float, str]:
        """Return the mean reward of the group (-inf: no reward) and its value of ``buffer_key``."""
        rewards = [sample.reward_value(self._reward_key) for sample in group if sample.reward is not None]
        mean = statistics.fmean(rewards) if rewards else float("-inf")
        return mean, str(group[0].metadata.get(self._options.buffer_key or ""))


Order = Callable[[PromptGroup], tuple[float, str]]


def _oldest(buffer: Sequence[PromptGroup], n: int, order: Order) -> list[PromptGroup]:
    """Return the groups that have waited longest."""
    del order
    return list(buffer[:n])


def _newest(buffer: Sequence[PromptGroup], n: int, order: Order) -> list[PromptGroup]:
    """Return the latest groups, the newest first."""
    del order
    return list(reversed(buffer))[:n]


def _prioritised(buffer: Sequence[PromptGroup], n: int, order: Order) -> list[PromptGroup]:
    """Return the groups with the highest mean reward, at equal rewards older ones first; no reward comes last."""
    return sorted(buffer, key=lambda group: -order(group)[0])[:n]


def _stratified(buffer: Sequence[PromptGroup], n: int, order: Order) -> list[PromptGroup]:
    """Return one group of each value of ``buffer_key`` in turn, oldest first."""
    strata: dict[str, list[PromptGroup]] = {}
    for group in buffer:
        strata.setdefault(order(group)[1], []).append(group)
    rounds = max(map(len, strata.values()), default=0)
    return [groups[turn] for turn in range(rounds) for groups in strata.values() if turn < len(groups)][:n]


FILTERS = {"oldest": _oldest, "newest": _newest, "prioritised": _prioritised, "stratified": _stratified}
"""``buffer_filter`` -> function that selects the next groups."""
