"""Whether what makes the samples of a run, what rewards them and what learns from them go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime_core.config.schema import RunConfig
from slime_core.errors import PluginError
from slime_core.plugins.component import Kind
from slime_core.plugins.registration import Registry

__all__ = ["check_pairings"]


def check_pairings(config: RunConfig, registry: Registry) -> None:
    """Returns if the components of a run that trains go together, as far as their traits say.

    Raises:
        PluginError: one needs what another does not make; names the settings, the components and the next step.
    """
    if config.custom.rollout_function_path is None:
        _refuse_unknown_log_probs(config, registry)


# --- What no engine has drawn -----------------------------------------------------------------------------------------


def _refuse_unknown_log_probs(config: RunConfig, registry: Registry) -> None:
    name = config.rollout.generate_function
    if _traits(registry, Kind.GENERATE_FUNCTION, name).draws:
        return
    given = list(_reading_the_engine(config, registry))
    if given:
        raise PluginError(
            f"generate_function = {name}: the responses of {_named(registry, Kind.GENERATE_FUNCTION, name)} are not "
            "drawn by an engine, so no engine says how likely their tokens were, and it is read by "
            f"{', '.join(given)}. {_without(given)}, or choose another generate function."
        )


def _reading_the_engine(config: RunConfig, registry: Registry) -> Iterator[str]:
    """What of the run needs an engine's log-probabilities, or what else it says of tokens that it drew."""
    for name in config.algorithm.corrections:
        if _traits(registry, Kind.CORRECTION, name).compares_engine:
            yield f"corrections = {name}"
    if (path := config.custom.custom_tis_function_path) is not None:
        yield f"custom_tis_function_path = {path}"
    for setting in ("use_rollout_logprobs", "get_mismatch_metrics", "true_on_policy_mode"):
        if getattr(config.algorithm, setting):
            yield f"{setting} = true"
    if config.learner.use_rollout_routing_replay:
        yield "use_rollout_routing_replay = true"
    if config.weights.parity_interval and config.debug.generates and config.debug.trains:
        yield f"parity_interval = {config.weights.parity_interval}"


def _without(given: list[str]) -> str:
    others = [one.partition(" = ")[0].replace("_", "-") for one in given if not one.startswith("parity_interval")]
    out = f"leave --{' and --'.join(others)} out" if others else ""
    parity = "give --parity-interval 0" if len(others) < len(given) else ""
    steps = " and ".join(step for step in (parity, out) if step)
    return steps[0].upper() + steps[1:]


# --- What the registry says -------------------------------------------------------------------------------------------


def _traits(registry: Registry, kind: Kind, name: str) -> Any:
    return registry.find(kind, name).traits


def _named(registry: Registry, kind: Kind, name: str) -> str:
    return f"{name!r} of {registry.owner(kind, name)}"
