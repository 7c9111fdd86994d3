"""The hooks that a plugin may implement.

A plugin is a module with functions that are marked with :data:`hookimpl` and named like a hook below. An implementation
takes the parameters of the hook that it names, in any order. pluggy calls the plugin that was registered last first;
``hookimpl(tryfirst=True)``, ``trylast=True`` and ``wrapper=True`` work as pluggy documents them. ``options`` is the
options object of the implementing plugin, or None if it has none.

``slime_register`` is called for every installed plugin, the other hooks only for plugins that take part in the run.
:data:`STABLE` lists the hooks that keep their meaning between minor versions; the others are provisional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pluggy

if TYPE_CHECKING:
    import torch

    from slime_core.components.functions import FunctionSource
    from slime_core.config.options import DerivedSetting
    from slime_core.contracts.learning import LossParts, MicroBatch, ModelSpec, NamedTensors, WrappedModel
    from slime_core.contracts.rollouts import DataSource, TrainSamples
    from slime_core.contracts.run import EvalSamples, LearnerInfo, Place, RunInfo, RunPlan, SamplerInfo, TrainStep
    from slime_core.generation import GenerateContext
    from slime_core.plugins.registration import Registration
    from slime_core.types import JsonValue, PromptGroup, Sample, TrainBatch

PROJECT = "slime"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Function = TypeVar("Function", bound=Callable[..., object])

OBSERVES = "_slime_observes"


def observer(function: Function) -> Function:
    """Mark a hook implementation that only watches: its exceptions are logged and counted, and the run continues. After
    three exceptions it is not called again.

    Example::

        @hookimpl
        @observer
        def slime_after_rollout(rollout, samples): ...
    """
    function.__dict__[OBSERVES] = True
    return function


@dataclass(frozen=True, slots=True)
class Hook:
    """A hook of this module.

    Arguments:
        places: the processes that call it while a run is in progress, as values of :class:`~slime_core.Place`; empty:
            the driver, before the run starts.
        is_stable: it keeps its meaning between minor versions.
        observes: all its implementations are observers.
        yields: implementations may be generators.
    """

    places: tuple[str, ...] = ()
    is_stable: bool = False
    observes: bool = False
    yields: bool = False


HOOKS: dict[str, Hook] = {}
"""All hooks by name."""


def _hook(*places: str, firstresult: bool = False, **properties: bool) -> Callable[[Function], Function]:
    def add(function: Function) -> Function:
        HOOKS[function.__name__] = Hook(places, **properties)
        return hookspec(function, firstresult=firstresult)

    return add


@_hook(is_stable=True)
def slime_register(add: Registration) -> None:
    """Add components, presets, options and commands: one call of a method of ``add`` for each."""


@_hook(yields=True)
def slime_settings(options: object, settings: Mapping[str, JsonValue]) -> Iterable[DerivedSetting] | None:
    """Yield settings of the core that follow from the plugin's options.

    Called while settings are read, possibly several times, before they are checked. ``settings`` holds the settings of
    the core that presets, file and flags set. Raise ``ConfigError`` for an option that cannot be used.
    """


@_hook(is_stable=True, yields=True)
def slime_check(
    plan: RunPlan, options: object, trains: bool, code: Mapping[str, Sequence[FunctionSource]]
) -> Iterable[str] | None:
    """Yield a message for each mistake in the settings that no annotation of an option can express.

    Called once before anything starts, by ``slime run``, ``slime check`` and ``slime eval``; ``trains`` is False for
    ``slime eval``. ``code`` maps options to the functions that they name by path (``NamesCode``), not yet imported.
    """


@_hook(yields=True)
def slime_check_row(metadata: Mapping[str, JsonValue], plan: RunPlan, options: object) -> Iterable[str] | None:
    """Yield a message for each mistake in the metadata of a row of a prompt file, for ``FILE, line N: ...``.

    Called for every row when it is read: before the run starts, for the rows that are checked then, and in the sampler.
    ``--on-bad-data skip`` skips such rows.
    """


@_hook()
def slime_prepare(plan: RunPlan, options: object, code: Mapping[str, Sequence[FunctionSource]]) -> object:
    """Return the object that the plugin's components and lifecycle hooks receive as ``options``.

    Called once on the driver, after every check. The result is pickled and sent to every process, so that processes
    without the files that options name can run. ``code`` is the same as for ``slime_check``.
    """


# --- Lifecycle: called while the run is in progress ------------------------------------------------------------------


@_hook("driver", is_stable=True)
def slime_run_start(run: RunInfo, options: object) -> None:
    """Called after everything has started, before state is restored and before anything is sampled."""


@_hook("driver", is_stable=True, observes=True)
def slime_run_end(run: RunInfo, error: BaseException | None, options: object) -> None:
    """Called when the run ends. ``error`` is the exception that ended it, or None after the last rollout.

    Called also if ``slime_run_start`` failed.
    """


@_hook("sampler")
def slime_sampler_start(sampler: SamplerInfo, options: object) -> None:
    """Called when the engines' addresses are known, before the sampler's components are built."""


@_hook("sampler", is_stable=True)
def slime_before_rollout(rollout: int, groups: list[PromptGroup], options: object) -> None:
    """Called before prompt groups are generated. Their samples may be changed in place.

    Called again, with the same ``rollout``, for the groups that replace those that sample transforms drop.
    """


@_hook("sampler")
async def slime_after_generate(sample: Sample, context: GenerateContext, options: object) -> Sample | None:
    """Called with each completed or truncated sample before the reward model scores it; ``async``.

    The sample may be changed in place. Return another sample to replace it.
    """


@_hook("sampler", is_stable=True)
def slime_after_rollout(rollout: int, samples: list[Sample], options: object) -> None:
    """Called with the rewarded and transformed samples that will be trained on. They may be changed in place."""


@_hook("sampler")
def slime_after_collect(rollout: int, groups: list[PromptGroup], prompts: DataSource, options: object) -> None:
    """Called after ``slime_after_rollout`` with every group of the rollout, including those that are not trained on."""


@_hook("sampler", firstresult=True)
def slime_before_shards(rollout: int, samples: list[Sample], options: object) -> TrainSamples | None:
    """Return replacement samples, or None to train on ``samples``. Called before the batch is cut into shards; the
    first plugin that returns samples decides."""


@_hook("sampler")
def slime_log_rollout(
    rollout: int, samples: list[Sample], metrics: dict[str, float], seconds: float, options: object
) -> bool | None:
    """Called with all generated samples and the metrics of a rollout, which may be changed in place. Return True to
    keep the core from logging them."""


@_hook("sampler")
def slime_log_evaluation(
    step: int, sets: Mapping[str, EvalSamples], metrics: dict[str, float], options: object
) -> bool | None:
    """Called with the results of an evaluation after ``step`` steps, like ``slime_log_rollout``. ``sets`` maps the name
    of an evaluation set to its samples."""


@_hook("sampler")
async def slime_evaluate(step: int, prompts: DataSource | None, options: object) -> Mapping[str, float] | None:
    """Return the metrics of the evaluation after ``step`` steps, or None to leave it to another plugin or the core;
    ``async``. If a plugin returns metrics, ``slime_log_evaluation`` is not called.

    ``prompts`` is the data source of the training prompts; None if the process only evaluates.
    """


@_hook("rank")
def slime_learner_start(learner: LearnerInfo, options: object) -> None:
    """Called when the process groups exist, before the model is built, so ``learner.model`` is empty."""


@_hook("rank")
def slime_model_spec(spec: ModelSpec, options: object) -> None:
    """Called with the model spec before it builds the model. It may be changed in place: an ``MBridgeSpec`` has
    ``layers`` and ``provider``.

    Called for every trained model, including that of a separate critic.
    """


@_hook("rank")
def slime_wrap_model(
    spec: ModelSpec,
    chunks: Sequence[torch.nn.Module],
    learner: LearnerInfo,
    folder: Path,
    export_weights: Callable[[], NamedTensors],
    options: object,
) -> WrappedModel | None:
    """Change the actor's model before Megatron wraps it for training: freeze parameters, add or replace modules.

    Called once on each rank; ``chunks`` hold the start weights, which ``folder`` describes. ``spec`` does not see
    children that plugins add to a chunk when it loads and exports weights; other parameters have to keep their
    names. ``export_weights`` returns an iterator over the weights that ``spec`` exports; it is collective. Return
    replacements for what leaves the model, or None. Two plugins that replace the same part are an error. A critic
    is not wrapped.
    """


@_hook("rank")
def slime_loss_parts(learner: LearnerInfo, options: object) -> LossParts | None:
    """Return replacements for parts of the actor's loss, or None.

    Called once on each rank, when the model is built. Two plugins that replace the same part are an error.
    """


@_hook("rank")
def slime_before_training(shard: TrainBatch, steps: Sequence[Sequence[MicroBatch]], options: object) -> None:
    """Called when the rank's shard is cut into the micro-batches of each optimizer step and all columns are filled.
    The columns of micro-batches may be changed in place. Not called on ranks of a separate critic."""


@_hook("rank")
def slime_before_log_probs(role: str, learner: LearnerInfo, options: object) -> None:
    """Called before a forward pass of the model in ``role``: ``actor``, ``old_actor``, ``reference`` or ``teacher``."""


@_hook("rank", is_stable=True)
def slime_before_train_step(step: TrainStep, options: object) -> None:
    """Called before the gradients of an optimizer step are computed."""


@_hook("rank", is_stable=True, observes=True)
def slime_after_train_step(step: TrainStep, options: object) -> None:
    """Called after an optimizer step. ``step.metrics`` are its metrics, the same on every rank."""


@_hook("rank")
def slime_after_weight_write(folder: Path | None, engine_urls: Sequence[str], options: object) -> None:
    """Called on every rank when new weights are in ``folder`` (transport ``disk``), before an engine reads them.
    ``folder`` is None on ranks that did not write."""


@_hook("driver", is_stable=True, observes=True)
def slime_after_weight_sync(version: int, options: object) -> None:
    """Called when every engine serves the learner's weights as ``version``."""


@_hook("driver", "sampler", "rank", is_stable=True)
def slime_checkpoint_state(place: Place, options: object) -> Mapping[str, object] | None:
    """Return the plugin's state at this place as JSON-ready values, or None.

    On the learner only rank 0 is called; :func:`slime_checkpoint_restore` receives its state on every rank. In the
    sampler it is also called before each rollout, for a checkpoint at a SIGTERM during the rollout.
    """


@_hook("driver", "sampler", "rank", is_stable=True)
def slime_checkpoint_restore(place: Place, state: Mapping[str, object], options: object) -> None:
    """Restore the state that :func:`slime_checkpoint_state` returned at this place. Not called if it returned None."""


PLACES = {name: hook.places for name, hook in HOOKS.items() if hook.places}
"""Lifecycle hook -> the processes that call it."""
