"""``data_source_path`` and ``buffer_filter_path``: classes and functions with slime's signatures as data sources.

BufferedDataSource    prompts and a buffer of added groups; base class for slime's users
BufferedSource        the same, with the function of ``buffer_filter_path``
PathSource            a class of ``data_source_path``
SourceView            the run's data source with slime's methods, for functions that get one
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from slime_compat.calling import PathFunction
from slime_compat.check import unbuffered
from slime_compat.paths import PathOptions
from slime_compat.views import as_in_slime, originals, render, restore
from slime_core import DataSource, RunView
from slime_core.errors import PluginError
from slime_core.generation import Encoder
from slime_core.provisional import PromptRequest, PromptScreen
from slime_core.types import Prompt, PromptGroup, Sample
from slime_datasets.numbered import InMemory, NumberedPrompts, requested
from slime_datasets.screen import screen_paths

__all__ = [
    "BufferedDataSource",
    "BufferedSource",
    "PathSource",
    "PromptSamples",
    "RolloutDataSource",
    "SourceView",
    "pop_first",
]


class PromptSamples(list[Sample]):
    """The prompts, one sample each, in file order, with a method that samples from them."""

    def __init__(self, samples: Sequence[Sample], *, seed: int) -> None:
        super().__init__(samples)
        self._random = random.Random(seed)

    def sample(self, n: int) -> list[Sample]:
        """Return copies of ``n`` prompts, sampled with replacement; the same in every run with this seed."""
        return [copy.deepcopy(sample) for sample in self._random.choices(self, k=n)]


def pop_first(args: Any, rollout_id: int | None, buffer: list[PromptGroup], num_samples: int) -> list[PromptGroup]:
    """Remove the oldest groups from the buffer and return them."""
    chosen = buffer[:num_samples]
    del buffer[: len(chosen)]
    return chosen


Choose = Callable[[Any, list[PromptGroup], int], list[PromptGroup]]
CHOOSE = "_choose_from_buffer"
"""Attribute of ``args``: calls the function of ``buffer_filter_path``."""


def _chooser(options: PathOptions) -> Choose:
    """Return a call of the function of ``buffer_filter_path`` that checks what it returns.

    Raises:
        PluginError: the function cannot be imported or called.
    """
    function = options.function("buffer_filter_path")

    def choose(args: Any, buffer: list[PromptGroup], n: int) -> list[PromptGroup]:
        shown = [sample for group in buffer for sample in group]
        with as_in_slime(shown, options.encoder):
            chosen = function(args, None, buffer, n)
        groups = list(chosen) if isinstance(chosen, list | tuple) else None
        if groups is None or len(groups) > n or not all(_is_group(group) for group in groups):
            raise function.refused(chosen, f"a list of at most {n} groups of the buffer")
        return groups

    return choose


class BufferedDataSource:
    """Returns added groups first, then new prompts; override ``buffer_filter`` to select among the added groups.

    Example, the group with the highest priority first::

        class ByPriority(BufferedDataSource):
            def buffer_filter(self, args, buffer, n):
                buffer.sort(key=lambda group: -group[0].metadata["priority"])
                return buffer[:n]

    Arguments:
        arguments: ``(args)`` or ``(dataset, args)``: ``args`` has every setting, and ``args.prompt_request`` describes
            the prompts; ``dataset`` is the prompts.
    """

    def __init__(self, *arguments: Any) -> None:
        args = arguments[-1]
        self.args = args
        self.dataset = arguments[0] if len(arguments) > 1 else None
        self.prompts = NumberedPrompts(InMemory(args.prompt_request), args.prompt_request)
        self.buffer: list[PromptGroup] = []

    def buffer_filter(self, args: Any, buffer: list[PromptGroup], n: int) -> list[PromptGroup]:
        """Return the next groups of the buffer, at most ``n``: those that ``--buffer-filter-path`` selects, else the
        oldest."""
        choose: Choose | None = getattr(args, CHOOSE, None)
        return buffer[:n] if choose is None else choose(args, buffer, n)

    def get_samples(self, num_samples: int) -> list[PromptGroup]:
        """Return the next groups."""
        chosen = list(self.buffer_filter(self.args, self.buffer, num_samples)) if self.buffer else []
        returned = set(map(id, chosen))
        # slime's functions delete the groups that they return from the buffer; others leave them.
        self.buffer = [group for group in self.buffer if id(group) not in returned]
        return [*chosen, *self.prompts.next_groups(num_samples - len(chosen))]

    def add_samples(self, samples: Sequence[PromptGroup]) -> None:
        """Add groups to the buffer."""
        self.buffer.extend(samples)

    def state(self) -> dict[str, Any]:
        """Return the position in the prompts, and the buffer."""
        return {
            "prompts": self.prompts.state(),
            "buffer": [[sample.to_dict() for sample in group] for group in self.buffer],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        self.prompts.restore(state["prompts"])
        self.buffer = [[Sample.from_dict(sample) for sample in group] for group in state["buffer"]]

    def __len__(self) -> int:
        return len(self.prompts)


class RolloutDataSource(BufferedDataSource):
    """A buffered source without a filter: groups are returned in the order in which they were added."""

    def buffer_filter(self, args: Any, buffer: list[PromptGroup], n: int) -> list[PromptGroup]:
        """Return the oldest groups of the buffer, at most ``n``."""
        return buffer[:n]


class BufferedSource(BufferedDataSource):
    """Prompts and a buffer of requeued groups, from which the function of --buffer-filter-path chooses.

    The function is ``(args, rollout_id, buffer, num_samples)``; ``rollout_id`` is None, as in slime.

    Raises:
        PluginError: the function cannot be imported or called.
    """

    def __init__(self, options: PathOptions, run: RunView) -> None:
        arguments = _arguments(options, requested(run))
        setattr(arguments, CHOOSE, _chooser(options))
        super().__init__(arguments)

    @classmethod
    def screen(cls, options: PathOptions, run: RunView, screen: PromptScreen) -> list[str]:
        """See :class:`~slime_core.DataSource`."""
        del options
        request = requested(run)
        return screen_paths([request.path], request, screen) if screen.setting else []

    def next_groups(self, n: int) -> list[PromptGroup]:
        """Return the next ``n`` groups."""
        return self.get_samples(n)

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Add groups to the buffer."""
        self.add_samples(groups)


class PathSource:
    """The class of --data-source-path, created as C(args) or C(dataset, args).

    ``dataset`` is a list with one sample for each prompt, in file order. If the class has neither ``state`` and
    ``restore`` nor, in a run with ``args.save``, ``save`` and ``load``, a resumed run repeats all calls of the earlier
    run, and puts back the same groups, as new samples, in the same order.

    Raises:
        PluginError: the class cannot be imported, created or called, or returns something else than groups.
    """

    def __init__(self, options: PathOptions, run: RunView) -> None:
        self._class = options.function("data_source_path")
        self._request = requested(run)
        self._args = _arguments(options, self._request)
        passed = self._class.form.passed
        arguments = {"args": self._args, **({"dataset": self._dataset()} if "dataset" in passed else {})}
        if "buffer_filter_path" in options.sources:
            _refuse_unbuffered(self._class, options)
            setattr(self._args, CHOOSE, _chooser(options))
        with self._class.blamed("creating it"):
            self._source = self._class.function(*(arguments[name] for name in passed))
        self._start()

    def _start(self) -> None:
        self._requested: list[list[int]] = []
        self._returned: list[list[Any]] = []
        self._handed_out: set[int] = set()
        self._groups = 0

    def next_groups(self, n: int) -> list[PromptGroup]:
        """Return the next ``n`` groups."""
        entries = self._call("get_samples", n)
        groups = [self._group(entry) for entry in entries] if isinstance(entries, list | tuple) else []
        if len(groups) != n:
            shown = f"{len(groups)} groups" if groups else f"{entries!r:.80}"
            raise PluginError(
                f"{self._class}: get_samples({n}) returned {shown}; accepted: a list of {n} groups, each a "
                f"list of {self._request.n_samples_per_prompt} slime_core.Sample, or of {n} samples."
            )
        self._note(n)
        self._handed_out.update(group[0].group_index for group in groups if group[0].group_index is not None)
        return groups

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Put groups back."""
        if self._replays and groups:
            self._returned.append([_times(self._requested), [self._name(group) for group in groups]])
        self._call("add_samples", list(groups))

    def _name(self, group: PromptGroup) -> int | list[dict[str, Any]]:
        """Return the number of a group of this source, from which a replay gets it; else the group itself."""
        number = group[0].group_index
        return number if number in self._handed_out else [sample.to_dict() for sample in group]

    def state(self) -> dict[str, Any]:
        """Return the state of the class; without one, the calls so far and the groups put back after each call."""
        state: dict[str, Any] = {"asked": self._requested, "returned": self._returned, "groups": self._groups}
        state = copy.deepcopy(state)
        if self._has("state", "restore"):
            return {**state, "state": self._call("state")}
        if self._saves and self._requested:
            self._call("save", _times(self._requested) - 1)
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        if self._replays:
            self._replay(state["asked"], state.get("returned", []))
        elif self._has("state", "restore"):
            self._call("restore", state["state"])
        elif state["asked"]:
            self._call("load", _times(state["asked"]) - 1)
        self._requested, self._groups = [list(pair) for pair in state["asked"]], state["groups"]

    def _replay(self, requested: Sequence[Sequence[int]], returned: Sequence[Sequence[Any]]) -> None:
        self._start()
        numbers = {name for _, names in returned for name in names if isinstance(name, int)}
        groups: dict[int | None, PromptGroup] = {}
        sizes = [n for n, times in requested for _ in range(times)]
        for call, size in enumerate([*sizes, 0]):
            for names in (names for after, names in returned if after == call):
                self.put_back([self._again(name, groups) for name in names])
            fresh = self.next_groups(size) if size else []
            groups |= {group[0].group_index: group for group in fresh if group[0].group_index in numbers}

    def _again(self, name: int | Sequence[dict[str, Any]], groups: Mapping[int | None, PromptGroup]) -> PromptGroup:
        if not isinstance(name, int):
            return [Sample.from_dict(sample) for sample in name]
        if name not in groups:
            raise PluginError(
                f"{self._class}: called again with the same sizes, it did not return group {name}, which had "
                "been put back; accepted: the same groups in the same order. Give the class state() and restore(state)."
            )
        return groups[name]

    def __len__(self) -> int:
        return int(self._call("__len__")) if self._has("__len__") else len(self._dataset())

    @property
    def _replays(self) -> bool:
        return not self._has("state", "restore") and not self._saves

    @property
    def _saves(self) -> bool:
        return self._has("save", "load") and bool(self._args.save)

    def _has(self, *names: str) -> bool:
        return all(callable(getattr(self._source, name, None)) for name in names)

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._class.blamed(f"calling {name}"):
            return getattr(self._source, name)(*arguments)

    def _note(self, n: int) -> None:
        """Record a request for ``n`` groups, as pairs of a number and its repetitions."""
        if self._requested and self._requested[-1][0] == n:
            self._requested[-1][1] += 1
        else:
            self._requested.append([n, 1])

    def _dataset(self) -> PromptSamples:
        request = replace(self._request, n_samples_per_prompt=1, shuffle=False)
        prompts = NumberedPrompts(InMemory(request), request)
        # Without indices: indices belong to the groups of the run, and a prompt is used again in each epoch.
        groups = prompts.next_groups(len(prompts))
        samples = [replace(group[0], group_index=None, index=None) for group in groups]
        return PromptSamples(samples, seed=request.seed)

    def _group(self, entry: Any) -> PromptGroup:
        """Return a group, or ``size`` copies of one sample; sets the indices that the class left unset."""
        size = self._request.n_samples_per_prompt
        group = [copy.deepcopy(entry) for _ in range(size)] if isinstance(entry, Sample) else entry
        if not _is_group(group):
            raise PluginError(
                f"{self._class}: get_samples returned a list of {type(entry).__qualname__}; accepted: a list "
                "of groups, each a list of slime_core.Sample, or of samples."
            )
        number, self._groups = self._groups, self._groups + 1
        numbered = [sample.group_index for sample in group if sample.group_index is not None]
        alike = isinstance(entry, Sample)
        for place, sample in enumerate(group):
            sample.group_index = numbered[0] if numbered else number
            sample.index = number * size + place if sample.index is None or alike else sample.index
        return list(group)


def _refuse_unbuffered(path: PathFunction, options: PathOptions) -> None:
    """Raise PluginError if the class would never call the function of ``buffer_filter_path``."""
    inherits = issubclass(path.function, BufferedDataSource)
    if not inherits or path.function.buffer_filter is not BufferedDataSource.buffer_filter:
        why = "has a buffer_filter itself" if inherits else "has no buffer to choose from"
        chooser = options.sources["buffer_filter_path"][0]
        raise unbuffered(chooser, path.source, f"{path.function.__name__} {why}")


class SourceView:
    """The run's data source, with slime's methods. A context: samples that it returns are as in slime until it ends.

    Arguments:
        encoder: renders prompts; None leaves them unchanged.
    """

    def __init__(self, source: DataSource, encoder: Encoder | None = None) -> None:
        self._source = source
        self._encoder = encoder
        self._open = ExitStack()
        self._returned: list[Sample] = []
        self._prompts: dict[str, Prompt] = {}

    def __enter__(self) -> SourceView:
        return self

    def __exit__(self, *failure: object) -> None:
        self._open.close()

    def get_samples(self, num_samples: int) -> list[PromptGroup]:
        """Return the next groups."""
        groups = self._source.next_groups(num_samples)
        samples = [sample for group in groups for sample in group]
        render(samples, self._encoder)
        self._returned += samples
        self._prompts |= originals(samples)
        self._open.enter_context(as_in_slime(samples))
        return groups

    def add_samples(self, samples: Sequence[PromptGroup]) -> None:
        """Put groups back."""
        self.restore(samples)
        self._source.put_back(samples)

    def restore(self, groups: Sequence[PromptGroup]) -> None:
        """Give samples that were made from those that :meth:`get_samples` returned their prompts and labels back."""
        restore([sample for group in groups for sample in group], self._returned, self._prompts)

    def __len__(self) -> int:
        return len(cast(Sized, self._source))


def _arguments(options: PathOptions, request: PromptRequest) -> Any:
    """Return ``args`` with the path of the prompts and their request."""
    options.arguments.prompt_data, options.arguments.prompt_request = str(request.path), request
    return options.arguments


def _times(requested: Sequence[Sequence[int]]) -> int:
    return sum(times for _, times in requested)


def _is_group(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, Sample) for entry in value)
