"""The calls that a plugin may implement: declarations, each made once, at start; and the lifecycle of a run.

Declarations are plain functions without parameters, but for those that are handed settings::

    from slime_core import Component, hookimpl

    @hookimpl
    def slime_register_reward_models():
        yield Component("length", target="my_plugin.rewards:Length", summary="Shorter is better")

Order between plugins never decides anything: two plugins that claim one name, or set one preset, are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import pluggy

from slime_core.config.options import DerivedSetting
from slime_core.plugins.component import Component, Kind
from slime_core.plugins.contracts.learning import LossParts, MicroBatch, ModelSpec
from slime_core.plugins.contracts.rollouts import DataSource, TrainSamples
from slime_core.plugins.contracts.run import EvalSamples, LearnerInfo, Place, RunInfo, RunPlan, SamplerInfo, TrainStep
from slime_core.types import JsonValue, PromptGroup, Sample, TrainBatch

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slime_core.generation import GenerateContext
    from slime_core.plugins.loading import FunctionSource

PROJECT = "slime"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Function = TypeVar("Function", bound=Callable[..., object])


def observer(function: Function) -> Function:
    """Marks an implementation of a participant's hook that only looks, such as one that stores samples: its exception
    is logged and counted, and after three it is not called again; the run continues.

    Example::

        @hookimpl
        @observer
        def slime_after_rollout(rollout, samples): ...

    It must not change what it is given. Only for hooks whose policy in the table of docs/hooks.md allows it.
    """
    function.__dict__[OBSERVES] = True
    return function


OBSERVES = "_slime_observes"


@hookspec
def slime_register_advantage_estimators() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield advantage estimators: how rewards become advantages (contract ``AdvantageEstimator``)."""


@hookspec
def slime_register_policy_losses() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield policy losses: what is minimised, token by token (contract ``PolicyLoss``)."""


@hookspec
def slime_register_corrections() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield off-policy corrections: how far tokens of other weights count (contract ``Correction``)."""


@hookspec
def slime_register_reward_models() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield reward models: how responses are scored (contract ``RewardModel``)."""


@hookspec
def slime_register_sample_transforms() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield sample transforms: which finished groups are trained on, and how (contracts ``GroupTransform`` and
    ``RolloutTransform``)."""


@hookspec
def slime_register_generate_functions() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield generate functions: how a response comes about (contract ``GenerateFunction``)."""


@hookspec
def slime_register_data_sources() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield data sources: where prompts come from (contract ``DataSource``)."""


@hookspec
def slime_register_prompt_formats() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield prompt formats, named by the suffix of their files: how rows are read (contract ``PromptFormat``)."""


@hookspec
def slime_register_rollout_sources() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield rollout sources: what makes whole rollouts (contract ``RolloutSource``)."""


@hookspec
def slime_register_model_specs() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield model specs: what a model looks like in Megatron (contract ``ModelSpec``)."""


@hookspec
def slime_register_trackers() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield trackers: where metrics go (contract ``Tracker``)."""


@hookspec
def slime_presets() -> Mapping[str, object]:  # type: ignore[empty-body]
    """Return the defaults that naming the plugin sets, by flag name: ``{"advantage_estimator": "grpo"}``."""


@hookspec
def slime_options() -> type[BaseModel]:  # type: ignore[empty-body]
    """Return the frozen pydantic model of the plugin's own settings; every field has a default and a description."""


@hookspec
def slime_settings(options: object, settings: Mapping[str, JsonValue]) -> Iterable[DerivedSetting] | None:
    """Yield settings of the core that follow from the plugin's options; None: none do.

    Called while settings are read, perhaps several times, before they are checked. ``settings`` are those of the core
    that presets, file and flags give, by name. An option that cannot be understood is a ``ConfigError``.
    """


@hookspec
def slime_check(
    plan: RunPlan, options: object, trains: bool, code: Mapping[str, Sequence[FunctionSource]]
) -> Iterable[str] | None:
    """Yield what is wrong with the settings of a run, as messages for its user; None: nothing is.

    Called once, before anything starts, by ``slime run``, ``slime check`` and ``slime eval``, where ``trains`` is
    False. What one annotation can say (``UsedBy``, ``Needs``, ``Conflicts``) needs no check. ``code`` holds the
    functions that options name by path (``NamesCode``), by option; their text can be read, and nothing of them has been
    imported.
    """


@hookspec
def slime_check_row(metadata: Mapping[str, JsonValue], plan: RunPlan, options: object) -> Iterable[str] | None:
    """Yield what is wrong with the metadata of a row of a prompt file, for ``FILE, line N: ...``; None: nothing is.

    Called for every row where it is read: before anything starts, as far as files are looked through then, and in the
    sampler. ``--on-bad-data skip`` leaves such rows out.
    """


@hookspec
def slime_prepare(plan: RunPlan, options: object, code: Mapping[str, Sequence[FunctionSource]]) -> object:
    """Return what the plugin's components and lifecycle hooks are handed in place of its options.

    Called once on the driver, after every check, for plugins whose options name code or files: what it returns is
    pickled and sent to every process, which need not have those files. ``code`` is that of ``slime_check``.
    """


# --- Lifecycle -------------------------------------------------------------------------------------------------------
# Called while the run goes on, in the run's order of plugins: core, then as they were named. An implementation names
# the parameters it wants; ``options`` is the options object of its own plugin, None without one.


@hookspec
def slime_run_start(run: RunInfo, options: object) -> None:
    """Everything has started; no state has been restored yet, and nothing has been sampled."""


@hookspec
def slime_run_end(run: RunInfo, error: BaseException | None, options: object) -> None:
    """The run is over; ``error`` is what ended it, None after its last rollout.

    Called wherever ``slime_run_start`` was, also where that failed.
    """


@hookspec
def slime_sampler_start(sampler: SamplerInfo, options: object) -> None:
    """The engines' addresses are known, and no component of the sampler is made yet."""


@hookspec
def slime_before_rollout(rollout: int, groups: list[PromptGroup], options: object) -> None:
    """Prompt groups are about to be generated; their samples may be changed in place.

    Called again, with the same ``rollout``, for the groups that take the place of those that sample transforms drop.
    """


@hookspec
async def slime_after_generate(sample: Sample, context: GenerateContext, options: object) -> Sample | None:
    """A sample was generated, completed or truncated, and has no reward from a reward model yet; ``async``.

    It may be changed in place. A sample that is returned takes its place.
    """


@hookspec
def slime_after_rollout(rollout: int, samples: list[Sample], options: object) -> None:
    """The samples that will be trained on are rewarded and transformed; they may be changed in place."""


@hookspec
def slime_after_collect(rollout: int, groups: list[PromptGroup], prompts: DataSource, options: object) -> None:
    """Every group of a rollout has come; ``groups`` has also those that are not trained on. After
    ``slime_after_rollout``."""


@hookspec
def slime_before_shards(rollout: int, samples: list[Sample], options: object) -> TrainSamples | None:
    """A batch is ready and not yet cut into shards. What is returned is trained in its place; None: ``samples``."""


@hookspec
def slime_log_rollout(
    rollout: int, samples: list[Sample], metrics: dict[str, float], seconds: float, options: object
) -> bool | None:
    """The metrics of a rollout are complete; ``samples`` is everything that was generated. True: they are not logged by
    the core. They may be changed in place."""


@hookspec
def slime_log_evaluation(
    step: int, sets: Mapping[str, EvalSamples], metrics: dict[str, float], options: object
) -> bool | None:
    """The same for an evaluation after ``step`` steps; ``sets`` has what was measured, by evaluation set."""


@hookspec
async def slime_evaluate(step: int, prompts: DataSource | None, options: object) -> Mapping[str, float] | None:
    """An evaluation after ``step`` steps is due; ``async``. Metrics that are returned are its result, and the core
    evaluates nothing and calls no ``slime_log_evaluation``; None: another plugin or the core evaluates.

    ``prompts`` is the data source of the training prompts; None where the process only evaluates.
    """


@hookspec
def slime_learner_start(learner: LearnerInfo, options: object) -> None:
    """Process groups are up; ``learner.model`` is empty, because the model comes next."""


@hookspec
def slime_model_spec(spec: ModelSpec, options: object) -> None:
    """The model spec of the checkpoint is made and has built nothing; it may be changed in place.

    Called for every model that is trained: on ranks of a separate critic too. An ``MBridgeSpec`` has ``layers`` and
    ``provider`` to be set.
    """


@hookspec
def slime_loss_parts(learner: LearnerInfo, options: object) -> LossParts | None:
    """Return what takes the place of parts of the actor's loss; None: nothing.

    Called once on each rank, when the model is built. Two plugins that replace the same part are an error.
    """


@hookspec
def slime_before_training(shard: TrainBatch, steps: Sequence[Sequence[MicroBatch]], options: object) -> None:
    """The rank's shard is cut into the micro-batches of each optimizer step, and all columns are filled; those of the
    micro-batches may be changed in place. Not called on ranks of a separate critic."""


@hookspec
def slime_before_log_probs(role: str, learner: LearnerInfo, options: object) -> None:
    """The model holds ``role`` (``actor``, ``old_actor``, ``reference``, ``teacher``); a forward pass follows."""


@hookspec
def slime_before_train_step(step: TrainStep, options: object) -> None:
    """The gradients of an optimizer step are about to be computed."""


@hookspec
def slime_after_train_step(step: TrainStep, options: object) -> None:
    """The weights have changed; ``step.metrics`` are those of the step, the same on every rank."""


@hookspec
def slime_after_weight_write(folder: Path | None, engine_urls: Sequence[str], options: object) -> None:
    """A version of the weights lies in ``folder`` (transport ``disk``), and no engine has read it. Called on every
    rank; ``folder`` is None on ranks that did not write."""


@hookspec
def slime_after_weight_sync(version: int, options: object) -> None:
    """Every engine serves the learner's weights, as ``version``."""


@hookspec
def slime_checkpoint_state(place: Place, options: object) -> Mapping[str, object] | None:
    """Return what :func:`slime_checkpoint_restore` needs at this place, as JSON-ready values; None: nothing.

    On the learner only rank 0 is called; :func:`slime_checkpoint_restore` gets its state on every rank. In the sampler
    it is also called before each rollout, for a checkpoint at a SIGTERM during the rollout.
    """


@hookspec
def slime_checkpoint_restore(place: Place, state: Mapping[str, object], options: object) -> None:
    """Continue from what :func:`slime_checkpoint_state` returned at this place; not called where it returned None."""


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The places where a lifecycle hook is called, and the effect of its failure.

    Arguments:
        places: the processes that call it.
        policy: ``participant``: an exception ends the run. ``observer``: it is logged and counted, and after three the
            plugin is not called there again.
        is_async: implementations are ``async def``; the others are called without await.
        may_observe: an implementation may be an observer by :func:`observer`.
    """

    places: tuple[Place, ...]
    policy: Literal["participant", "observer"]
    is_async: bool = False
    may_observe: bool = False


LIFECYCLE_HOOKS: dict[str, Lifecycle] = {
    "slime_run_start": Lifecycle((Place.DRIVER,), "participant", may_observe=True),
    "slime_run_end": Lifecycle((Place.DRIVER,), "observer"),
    "slime_sampler_start": Lifecycle((Place.SAMPLER,), "participant", may_observe=True),
    "slime_before_rollout": Lifecycle((Place.SAMPLER,), "participant", may_observe=True),
    "slime_after_generate": Lifecycle((Place.SAMPLER,), "participant", is_async=True),
    "slime_after_rollout": Lifecycle((Place.SAMPLER,), "participant", may_observe=True),
    "slime_after_collect": Lifecycle((Place.SAMPLER,), "participant", may_observe=True),
    "slime_before_shards": Lifecycle((Place.SAMPLER,), "participant"),
    "slime_log_rollout": Lifecycle((Place.SAMPLER,), "participant"),
    "slime_evaluate": Lifecycle((Place.SAMPLER,), "participant", is_async=True),
    "slime_log_evaluation": Lifecycle((Place.SAMPLER,), "participant"),
    "slime_learner_start": Lifecycle((Place.RANK,), "participant", may_observe=True),
    "slime_model_spec": Lifecycle((Place.RANK,), "participant"),
    "slime_loss_parts": Lifecycle((Place.RANK,), "participant"),
    "slime_before_training": Lifecycle((Place.RANK,), "participant"),
    "slime_before_log_probs": Lifecycle((Place.RANK,), "participant", may_observe=True),
    "slime_before_train_step": Lifecycle((Place.RANK,), "participant", may_observe=True),
    "slime_after_train_step": Lifecycle((Place.RANK,), "observer"),
    "slime_after_weight_write": Lifecycle((Place.RANK,), "participant", may_observe=True),
    "slime_after_weight_sync": Lifecycle((Place.DRIVER,), "observer"),
    "slime_checkpoint_state": Lifecycle((Place.DRIVER, Place.SAMPLER, Place.RANK), "participant"),
    "slime_checkpoint_restore": Lifecycle((Place.DRIVER, Place.SAMPLER, Place.RANK), "participant"),
}

STATE, RESTORE = "slime_checkpoint_state", "slime_checkpoint_restore"
"""The two that carry a plugin's state through a checkpoint."""

REGISTRATION_HOOKS: dict[str, Kind] = {f"slime_register_{kind.plural}": kind for kind in Kind}

SETTINGS, CHECK, CHECK_ROW, PREPARE = "slime_settings", "slime_check", "slime_check_row", "slime_prepare"

OF_SETTINGS = (SETTINGS, CHECK, CHECK_ROW, PREPARE)
"""The hooks that are handed a run's settings."""

DECLARATIONS = (*REGISTRATION_HOOKS, "slime_presets", "slime_options", *OF_SETTINGS)
"""The hooks that declare; those before the last four are called once, at start, in this order."""

HOOKS = (*DECLARATIONS, *LIFECYCLE_HOOKS)
"""Every hook; a test compares it with the functions above."""
