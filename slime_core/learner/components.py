"""Builds the components that run on a learner rank: model spec, policy loss, corrections, an estimator for tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime_core.config.schema import AlgorithmConfig
from slime_core.errors import PluginError, RunError
from slime_core.learner.loss.advantages import OverShards, TokenEstimation
from slime_core.learner.loss.corrections import Corrections, NamedCorrection
from slime_core.learner.loss.objective import Objective
from slime_core.learner.packed.inputs import AcceptedInputs
from slime_core.learner.settings import LearnerSettings
from slime_core.plugins.component import Kind
from slime_core.plugins.construction import construct
from slime_core.plugins.contracts import AdvantageSettings, LearnerInfo, LossParts, RunView
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.plugins.registry import Registry

__all__ = [
    "accepted_inputs",
    "build_estimation",
    "build_learning",
    "build_model_spec",
    "build_objective",
    "loss_parts",
    "who_builds",
]


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
        generate_function: name of the component that makes the samples; None: one that has engines draw them.
    """
    parts = parts or LossParts()
    named = [
        NamedCorrection(construct(registry, Kind.CORRECTION, name, options, run), _who(registry, Kind.CORRECTION, name))
        for name in algorithm.corrections
    ]
    return Objective(
        construct(registry, Kind.POLICY_LOSS, policy_loss, options, run),
        algorithm,
        who=_who(registry, Kind.POLICY_LOSS, policy_loss),
        corrections=Corrections(named),
        context_group=context_group,
        correct=parts.correct,
        reduce=parts.reduce,
        of_logits=parts.of_logits,
        drawn=generate_function is None or _draws(registry, generate_function),
    )


def build_learning(
    registry: Registry, settings: LearnerSettings, *, parts: LossParts
) -> tuple[Objective, TokenEstimation | None]:
    """What a rank learns by: the loss, and the estimator of advantages where it works token by token.

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
    """What the run's plugins put in place of parts of the loss.

    Raises:
        PluginError: two of them replace the same part, or one returned something else than a ``LossParts``.
    """
    merged = LossParts()
    for found in hooks.answers("slime_loss_parts", learner=learner):
        if not isinstance(found, LossParts):
            who = hooks.implementers("slime_loss_parts")
            raise PluginError(f"slime_loss_parts of {who} returned {found!r:.80}; return a LossParts, or None.")
        if twice := sorted(merged.given & found.given):
            who = hooks.implementers("slime_loss_parts")
            raise PluginError(
                f"slime_loss_parts: two of the plugins {who} give {', '.join(twice)} of the loss, and it can have one. "
                "Run without one of them."
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


def who_builds(registry: Registry, architecture: str) -> str:
    """The model spec that fits the checkpoint, and its plugin, for messages."""
    return _who(registry, Kind.MODEL_SPEC, _spec_name(registry, architecture))


def accepted_inputs(registry: Registry, settings: LearnerSettings) -> AcceptedInputs:
    """What the model of the checkpoint takes beside tokens."""
    name = _spec_name(registry, settings.architecture)
    traits: Any = registry.find(Kind.MODEL_SPEC, name).traits
    return AcceptedInputs(traits.inputs, _who(registry, Kind.MODEL_SPEC, name), settings.layout.context)


def build_estimation(
    registry: Registry,
    algorithm: AlgorithmConfig,
    *,
    options: Mapping[str, Any],
    run: RunView,
    data_group: Any,
    context_group: Any = None,
) -> TokenEstimation | None:
    """The run's advantage estimator if its scope is ``token``; None: the sampler, or nobody, estimates.

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
        who=_who(registry, kind, name),
        reads=traits.reads | traits.kl_reads if algorithm.kl_coef else traits.reads,
        settings=AdvantageSettings(gamma=algorithm.gamma, lambd=algorithm.lambd, kl_coef=algorithm.kl_coef),
        reduce=OverShards(data_group),
        context_group=context_group,
    )


def _draws(registry: Registry, generate_function: str) -> bool:
    traits: Any = registry.find(Kind.GENERATE_FUNCTION, generate_function).traits
    return bool(traits.draws)


def _spec_name(registry: Registry, architecture: str) -> str:
    component = registry.model_spec(architecture)
    if component is None:
        raise RunError(f"no active plugin has a model spec for {architecture}; the driver should have refused this")
    return component.name


def _who(registry: Registry, kind: Kind, name: str) -> str:
    return f"{kind.words} {name!r} of {registry.owner(kind, name)}"
