"""Builds the components that run on a learner rank: model spec, policy loss, corrections, an estimator for tokens."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from slime_core.config.learning import AlgorithmConfig
from slime_core.errors import PluginError, RunError
from slime_core.learner import LearnerSettings
from slime_core.learner.columns import DataParallelSums, TokenEstimation
from slime_core.learner.objective import Corrections, NamedCorrection, Objective
from slime_core.plugins.component import Kind
from slime_core.plugins.construction import construct
from slime_core.plugins.contracts import AdvantageSettings, LearnerInfo, LossParts, RunView
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.plugins.registry import Registry


@dataclass(frozen=True, slots=True)
class AcceptedInputs:
    """The inputs of samples that a model takes in addition to tokens.

    Arguments:
        names: of the keyword arguments that its forward takes.
        builder: the model spec and its plugin, for messages.
        context: ranks that share a row.
    """

    names: Set[str]
    builder: str
    context: int = 1

    def require(self, carried: Set[str]) -> None:
        """Return if the model takes every input that samples carry.

        Arguments:
            carried: names of the samples' inputs.

        Raises:
            RunError: it does not.
        """
        foreign = ", ".join(sorted(carried - self.names))
        if foreign:
            takes = f"takes {', '.join(sorted(self.names))}" if self.names else "takes tokens only"
            raise RunError(
                f"the samples carry {foreign} in multimodal_train_inputs, and the model of {self.builder} {takes}; "
                "training would go on without what the engine was shown. Use a model spec whose traits declare them "
                "(ModelSpecTraits.inputs), or leave them out of the samples"
            )
        if carried and self.context > 1:
            raise RunError(
                f"the samples carry {', '.join(sorted(carried))} in multimodal_train_inputs, and context_parallel_size "
                f"= {self.context} gives a rank parts of a row: nothing says which of these belong to its tokens. "
                "Leave --context-parallel-size out"
            )


def build_objective(
    registry: Registry,
    policy_loss: str,
    algorithm: AlgorithmConfig,
    *,
    options: Mapping[str, Any],
    run: RunView,
    context_group: Any = None,
    parts: LossParts | None = None,
    generate_function: str | None = None,
) -> Objective:
    """The loss of a run.

    Arguments:
        policy_loss: name of the component.
        options: plugin name -> its options object.
        run: what every component is made with.
        context_group: the ranks that share every row, if there are several.
        parts: what plugins put in place of parts of the loss; None: nothing.
        generate_function: name of the component that makes the samples; None: one that samples from engines.
    """
    parts = parts or LossParts()
    named = [
        NamedCorrection(
            construct(registry, Kind.CORRECTION, name, options, run), _component_label(registry, Kind.CORRECTION, name)
        )
        for name in algorithm.corrections
    ]
    return Objective(
        construct(registry, Kind.POLICY_LOSS, policy_loss, options, run),
        algorithm,
        label=_component_label(registry, Kind.POLICY_LOSS, policy_loss),
        corrections=Corrections(named),
        context_group=context_group,
        correct=parts.correct,
        reduce=parts.reduce,
        of_logits=parts.of_logits,
        engine_sampled=generate_function is None or _samples_from_engine(registry, generate_function),
    )


def build_learning(
    registry: Registry, settings: LearnerSettings, *, parts: LossParts
) -> tuple[Objective, TokenEstimation | None]:
    """The loss, and the advantage estimator if its scope is ``token``.

    Raises:
        PluginError: a component cannot be made.
    """
    from megatron.core import parallel_state

    shared = parallel_state.get_context_parallel_group() if settings.layout.context > 1 else None
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=False)
    algorithm, options = settings.config.algorithm, settings.options
    objective = build_objective(
        registry,
        settings.policy_loss,
        algorithm,
        options=options,
        run=settings.run,
        context_group=shared,
        parts=parts,
        generate_function=settings.config.rollout.generate_function,
    )
    estimation = build_estimation(
        registry, algorithm, options=options, run=settings.run, data_group=replicas, context_group=shared
    )
    return objective, estimation


def loss_parts(hooks: LifecycleHooks, learner: LearnerInfo) -> LossParts:
    """The parts of the loss that the run's plugins replace.

    Raises:
        PluginError: two of them replace the same part, or one returned something else than a ``LossParts``.
    """
    merged = LossParts()
    for found in hooks.answers("slime_loss_parts", learner=learner):
        if not isinstance(found, LossParts):
            plugins = hooks.implementers("slime_loss_parts")
            raise PluginError(f"slime_loss_parts of {plugins} returned {found!r:.80}; return a LossParts, or None.")
        if twice := sorted(merged.given & found.given):
            plugins = hooks.implementers("slime_loss_parts")
            raise PluginError(
                f"slime_loss_parts: two of the plugins {plugins} give {', '.join(twice)} of the loss, and it can have "
                "one. Run without one of them."
            )
        merged = replace(merged, **{name: getattr(found, name) for name in found.given})
    return merged


def build_model_spec(registry: Registry, settings: LearnerSettings, *, hooks: LifecycleHooks) -> Any:
    """The model spec that fits the checkpoint, as the run's plugins changed it.

    Raises:
        RunError: no active plugin has one.
        PluginError: it cannot be made, or a plugin cannot change this family.
    """
    name = _spec_name(registry, settings.architecture)
    spec = construct(registry, Kind.MODEL_SPEC, name, settings.options, settings.run)
    hooks.answers("slime_model_spec", spec=spec)
    return spec


def model_spec_label(registry: Registry, architecture: str) -> str:
    """The model spec that fits the checkpoint, and its plugin, for messages."""
    return _component_label(registry, Kind.MODEL_SPEC, _spec_name(registry, architecture))


def accepted_inputs(registry: Registry, settings: LearnerSettings) -> AcceptedInputs:
    """The inputs that the checkpoint's model takes in addition to tokens."""
    name = _spec_name(registry, settings.architecture)
    traits: Any = registry.find(Kind.MODEL_SPEC, name).traits
    return AcceptedInputs(traits.inputs, _component_label(registry, Kind.MODEL_SPEC, name), settings.layout.context)


def build_estimation(
    registry: Registry,
    algorithm: AlgorithmConfig,
    *,
    options: Mapping[str, Any],
    run: RunView,
    data_group: Any,
    context_group: Any = None,
) -> TokenEstimation | None:
    """The run's advantage estimator if its scope is ``token``; None: the sampler estimates, or the run has none.

    Arguments:
        data_group: one rank of each data-parallel shard.
        context_group: the ranks that share every row, if there are several.
    """
    kind, name = Kind.ADVANTAGE_ESTIMATOR, algorithm.advantage_estimator
    if name is None:
        return None
    traits: Any = registry.find(kind, name).traits
    if traits.scope != "token":
        return None
    return TokenEstimation(
        construct(registry, kind, name, options, run),
        label=_component_label(registry, kind, name),
        reads=traits.columns(kl_coef=algorithm.kl_coef),
        settings=AdvantageSettings(gamma=algorithm.gamma, lambd=algorithm.lambd, kl_coef=algorithm.kl_coef),
        reduce=DataParallelSums(data_group),
        context_group=context_group,
    )


def _samples_from_engine(registry: Registry, generate_function: str) -> bool:
    traits: Any = registry.find(Kind.GENERATE_FUNCTION, generate_function).traits
    return bool(traits.samples_from_engine)


def _spec_name(registry: Registry, architecture: str) -> str:
    component = registry.model_spec(architecture)
    if component is None:
        raise RunError(f"no active plugin has a model spec for {architecture}; the driver should have refused this")
    return component.name


def _component_label(registry: Registry, kind: Kind, name: str) -> str:
    return f"{kind.words} {name!r} of {registry.owner(kind, name)}"
