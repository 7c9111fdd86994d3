"""Builds the components that run on a learner rank: model spec, policy loss, corrections, an estimator for tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime_core.components.construction import construct
from slime_core.components.selection import SETTINGS_READ
from slime_core.contracts import AdvantageSettings, LearnerInfo, LossParts
from slime_core.errors import PluginError
from slime_core.learner import LearnerSettings
from slime_core.learner.advantages import DataParallelSums, TokenEstimation
from slime_core.learner.objective import Corrections, NamedCorrection, Objective
from slime_core.learner.trained_model import NamedSpec
from slime_core.plugins.lifecycle import Hooks
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry


def build_learning(
    registry: Registry, settings: LearnerSettings, *, parts: LossParts
) -> tuple[Objective, TokenEstimation | None]:
    """Build the loss, and the advantage estimator if its scope is ``token``.

    Raises:
        PluginError: a component cannot be built.
    """
    from megatron.core import parallel_state

    shared = parallel_state.get_context_parallel_group() if settings.layout.context > 1 else None
    objective = build_objective(registry, settings, parts=parts, context_group=shared)
    return objective, _build_estimation(registry, settings, context_group=shared)


def build_objective(
    registry: Registry, settings: LearnerSettings, *, parts: LossParts, context_group: Any = None
) -> Objective:
    """Build the loss of a run.

    Arguments:
        parts: functions of plugins that replace parts of the loss.
        context_group: the ranks that share every row; None if a rank holds complete rows.
    """
    algorithm = settings.config.algorithm
    named = [NamedCorrection(*_construct(registry, Kind.CORRECTION, name, settings)) for name in algorithm.corrections]
    policy_loss, label = _construct(registry, Kind.POLICY_LOSS, settings.policy_loss, settings)
    generating = registry.traits(Kind.GENERATE_FUNCTION, settings.config.rollout.generate_function)
    return Objective(
        policy_loss,
        algorithm,
        label=label,
        corrections=Corrections(named),
        context_group=context_group,
        parts=parts,
        engine_sampled=generating.samples_from_engine,
    )


def _build_estimation(registry: Registry, settings: LearnerSettings, *, context_group: Any) -> TokenEstimation | None:
    """Build the advantage estimator if its scope is ``token``; else the sampler estimates, or nothing does."""
    from megatron.core import parallel_state

    algorithm, kind = settings.config.algorithm, Kind.ADVANTAGE_ESTIMATOR
    name = algorithm.advantage_estimator
    if name is None:
        return None
    traits = registry.traits(kind, name)
    if traits.scope != "token":
        return None
    estimator, label = _construct(registry, kind, name, settings)
    return TokenEstimation(
        estimator,
        label=label,
        reads=_columns(traits.reads, kl_coef=algorithm.kl_coef),
        settings=AdvantageSettings(gamma=algorithm.gamma, lambd=algorithm.lambd, kl_coef=algorithm.kl_coef),
        reduce=DataParallelSums(parallel_state.get_data_parallel_group(with_context_parallel=False)),
        context_group=context_group,
    )


def collect_loss_parts(hooks: Hooks, learner: LearnerInfo) -> LossParts:
    """Return the parts of the loss that the run's plugins replace.

    Raises:
        PluginError: two plugins replace the same part, or a plugin returned something other than a ``LossParts``.
    """
    merged, plugins = LossParts(), hooks.implementers("slime_loss_parts")
    for parts in hooks.call("slime_loss_parts", learner=learner):
        if not isinstance(parts, LossParts):
            raise PluginError(f"slime_loss_parts of {plugins} returned {parts!r:.80}; accepted: None or a LossParts.")
        if twice := sorted(merged.given & parts.given):
            raise PluginError(
                f"slime_loss_parts: two of the plugins {plugins} give {', '.join(twice)} of the loss, and it can have "
                "one. Run without one of them."
            )
        merged = replace(merged, **{name: getattr(parts, name) for name in parts.given})
    return merged


def build_model_spec(registry: Registry, settings: LearnerSettings, *, hooks: Hooks) -> NamedSpec:
    """Build the model spec of the checkpoint's architecture, with the changes of the run's plugins.

    Raises:
        PluginError: the spec cannot be built, or a plugin cannot change this family.
    """
    offer = registry.model_spec(settings.architecture, implementation=settings.config.model.model_impl)
    assert offer is not None, "the driver refuses a checkpoint without a model spec"
    component = offer[1]
    spec, label = _construct(registry, Kind.MODEL_SPEC, component.name, settings)
    hooks.call("slime_model_spec", spec=spec)
    return NamedSpec(spec, label, inputs=component.traits.inputs)


def _columns(reads: frozenset[str], *, kl_coef: float) -> frozenset[str]:
    """Return the columns that an estimator reads, with those of the divergence if ``kl_coef`` is not 0."""
    divergence = {"log_probs", "ref_log_probs"} if kl_coef and "kl" in reads else set()
    return (reads - SETTINGS_READ) | divergence


def _construct(registry: Registry, kind: Kind, name: str, settings: LearnerSettings) -> tuple[Any, str]:
    """Construct a component; return it and its label in messages, which names its plugin."""
    component = construct(registry, kind, name, settings.options, settings.run)
    return component, f"{kind.words} {name!r} of {registry.owner(kind, name)}"
