"""The suite of lifecycle hooks: they are called, finish on every rank, keep samples consistent and restore state."""

from __future__ import annotations

import inspect
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from slime_core import DataSource, EvalSamples, Place
from slime_core.errors import PluginError
from slime_core.provisional import SamplerInfo, TrainSamples
from slime_core.types import PromptGroup, Sample, Status
from slime_testing.harness import PLACES, ActivePlugin, Hooks, Plugin, activate, run_info
from slime_testing.ranks import RankReport, run_ranks, state_mismatch
from slime_testing.subject import named_plugin, plugin_of_project
from slime_testing.suite import PropertyViolation, Suite, require

__all__ = ["LifecycleSuite"]


class LifecycleSuite(Suite):
    """For plugins with lifecycle hooks.

    Attributes:
        plugin: the plugin, as a word of ``--plugin``; None means the one plugin of the project around the test.
        options: the plugin's options; None means its defaults.
        limit_s: time limit of a hook on a learner rank, in seconds.
    """

    plugin: ClassVar[str | Plugin | None] = None
    options: ClassVar[Any] = None
    limit_s: ClassVar[float] = 30.0
    _report: ClassVar[RankReport]

    def test_the_plugin_implements_hooks_that_slime_calls(self) -> None:
        plugin = self._loaded()
        require(
            bool(plugin.lifecycle),
            f"{plugin.plugin} implements no lifecycle hook. Lifecycle hooks are {', '.join(PLACES)}.",
        )

    def test_the_hooks_of_the_driver_run(self) -> None:
        with _run_folder() as folder:
            hooks = self._hooks(Place.DRIVER, folder)
            run = run_info(folder)
            hooks.call("slime_run_start", run=run)
            hooks.call("slime_after_weight_sync", version=1)
            for error in (None, RuntimeError("the run failed")):
                hooks.call("slime_run_end", run=run, error=error)
        _require_none(hooks)

    def test_the_hooks_of_the_sampler_leave_samples_whole(self) -> None:
        with _run_folder() as folder:
            self._check_sampler(folder)

    def _check_sampler(self, folder: Path) -> None:
        hooks = self._hooks(Place.SAMPLER, folder)
        for rollout in range(2):
            groups, samples = _groups(rollout), _finished(rollout)
            names = [[_name(sample) for sample in group] for group in groups], [_name(sample) for sample in samples]
            hooks.call("slime_before_rollout", rollout=rollout, groups=groups)
            hooks.call("slime_after_rollout", rollout=rollout, samples=samples)
            after = [[_name(sample) for sample in group] for group in groups], [_name(sample) for sample in samples]
            require(
                after == names,
                f"the hooks turned the samples {names} into {after} (group, index); samples may be "
                "changed, but not added, removed or renumbered",
            )
            for sample in samples:
                _require_whole(sample)
            for sample in _finish(hooks, rollout, samples):
                _require_whole(sample)
        _require_none(hooks)

    def test_no_hook_hangs_on_two_ranks(self) -> None:
        hung = self._ranks().hung
        require(hung is None, str(hung))

    def test_no_hook_fails_on_two_ranks(self) -> None:
        failures = self._ranks().failures
        require(not failures, "\n".join(failures))

    def test_a_checkpoint_brings_the_state_back(self) -> None:
        for place, exercise in ((Place.DRIVER, _sync_weights), (Place.SAMPLER, _sample)):
            with _run_folder() as folder:
                hooks = self._hooks(place, folder)
                exercise(hooks, 0, folder)
                states = json.loads(json.dumps(hooks.states()))  # states() refuses values that JSON would change
                exercise(hooks, 1, folder)
                hooks.restore(json.loads(json.dumps(states)))
                again = hooks.states()
            require(again == states, state_mismatch(place, states, again))
        lost = self._ranks().lost
        require(not lost, "\n".join(lost))

    @classmethod
    def _loaded(cls) -> ActivePlugin:
        near = Path(inspect.getsourcefile(cls) or ".")
        plugin = plugin_of_project(near) if cls.plugin is None else named_plugin(cls.plugin, near=near)
        try:
            return activate(plugin)
        except PluginError as refused:  # such as a misspelt hook
            raise PropertyViolation(str(refused)) from None

    @classmethod
    def _options(cls, plugin: ActivePlugin) -> Any:
        return plugin.default_options() if cls.options is None else cls.options

    def _hooks(self, place: Place, folder: Path) -> Hooks:
        plugin = self._loaded()
        hooks = plugin.hooks(place, self._options(plugin))
        if place is Place.SAMPLER:
            hooks.call("slime_sampler_start", sampler=SamplerInfo("http://127.0.0.1:1", folder=folder))
        return hooks

    @classmethod
    def _ranks(cls) -> RankReport:
        """Run the hooks of two ranks, once; empty report if the plugin has no hooks there."""
        if "_report" not in vars(cls):
            plugin = cls._loaded()
            needed = any(Place.RANK in PLACES[hook] for hook in plugin.lifecycle)
            options = cls._options(plugin)
            cls._report = run_ranks(plugin, options, limit_s=cls.limit_s) if needed else RankReport()
        return cls._report


@contextmanager
def _run_folder() -> Iterator[Path]:
    """A temporary run folder, which is also the working directory, so that hooks write nothing elsewhere."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        yield Path(folder)


def _sync_weights(hooks: Hooks, rollout: int, folder: Path) -> None:
    """Call the hooks that a run's driver calls between start and end."""
    if rollout == 0:
        hooks.call("slime_run_start", run=run_info(folder))
    hooks.call("slime_after_weight_sync", version=rollout + 1)


def _sample(hooks: Hooks, rollout: int, _: Path) -> None:
    hooks.call("slime_before_rollout", rollout=rollout, groups=_groups(rollout))
    hooks.call("slime_after_rollout", rollout=rollout, samples=_finished(rollout))


def _finish(hooks: Hooks, rollout: int, samples: list[Sample]) -> Sequence[Sample]:
    """Call the hooks that a run's sampler calls after a rollout and in an evaluation; return the trained samples."""
    hooks.call("slime_after_collect", rollout=rollout, groups=[samples[:2], samples[2:]], prompts=_NoPrompts())
    replaced = hooks.call("slime_before_shards", rollout=rollout, samples=samples)
    if not isinstance(replaced, TrainSamples | None):
        raise PropertyViolation(f"slime_before_shards returned {replaced!r:.80}; return TrainSamples, or None")
    metrics = {"rollout/raw_reward": 0.5}
    hooks.call("slime_log_rollout", rollout=rollout, samples=samples, metrics=metrics, seconds=1.0)
    rewards, truncated = [0.0] * len(samples), [False] * len(samples)
    sets = {"prompts": EvalSamples(samples, rewards, truncated)}
    hooks.call("slime_log_evaluation", step=rollout, sets=sets, metrics={"eval/prompts": 0.0})
    return samples if replaced is None else replaced.samples


class _NoPrompts(DataSource):
    """A data source without prompts."""

    def next_groups(self, n: int) -> list[PromptGroup]:
        raise PropertyViolation("slime_after_collect took prompts; it may put groups back, and take none")

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Accept and discard the groups."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""

    def __len__(self) -> int:
        return 0


def _groups(rollout: int) -> list[PromptGroup]:
    numbers = range(2 * rollout, 2 * rollout + 2)
    return [
        [Sample(group_index=group, index=2 * group + i, prompt="6 * 7 =", label="42") for i in range(2)]
        for group in numbers
    ]


def _finished(rollout: int) -> list[Sample]:
    """Return two groups of two finished samples, one of them truncated."""
    samples = [sample for group in _groups(rollout) for sample in group]
    for position, sample in enumerate(samples):
        sample.tokens, sample.response_length, sample.response = [3, 4, 5, 6], 2, "42"
        sample.rollout_log_probs, sample.weight_versions = [-0.5, -0.25], [str(rollout)]
        sample.status = Status.TRUNCATED if position == 1 else Status.COMPLETED
        sample.reward = float(position % 2)
    return samples


def _require_whole(sample: Sample) -> None:
    columns = {"loss_mask": sample.loss_mask, "rollout_log_probs": sample.rollout_log_probs}
    misshapen = [
        name for name, column in columns.items() if column is not None and len(column) != sample.response_length
    ]
    require(
        not misshapen and len(sample.tokens) >= sample.response_length,
        f"a hook left sample {_name(sample)} with {sample.response_length} response tokens and another number of "
        f"{', '.join(misshapen) or 'tokens'}",
    )
    require(math.isfinite(sample.reward_value()), f"a hook left sample {_name(sample)} with the reward {sample.reward}")


def _name(sample: Sample) -> tuple[int | None, int | None]:
    return sample.group_index, sample.index


def _require_none(hooks: Hooks) -> None:
    """Check that no observer failed: a run only warns about it, but here it is an error."""
    warnings = hooks.failures.take().warnings
    require(not warnings, "\n".join(warnings))
