"""The hooks of plugin ``ppo``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slime_core import AdvantageTraits, Component, FunctionSource, RunPlan, hookimpl

__all__: list[str] = []

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that whiten: mean 0 and variance 1 over the trained tokens of the rollout."""


@hookimpl
def slime_register_advantage_estimators() -> Iterator[Component]:
    yield Component(
        "ppo",
        target="slime_ppo.ppo:GeneralizedAdvantage",
        traits=AdvantageTraits(
            scope="token",
            reads={"rewards", "mask", "values", "kl", "gamma", "lambd"},
            policy_loss="clipped",
        ),
        summary="Generalised advantage estimation over a critic's values (PPO, 1707.06347; GAE, 1506.02438)",
    )
    yield Component(
        "reinforce_plus_plus",
        target="slime_ppo.reinforce_plus_plus:ReinforcePlusPlus",
        traits=AdvantageTraits(
            scope="token",
            reads={"rewards", "mask", "kl", "gamma"},
            policy_loss="clipped",
        ),
        summary="Return of each token, divergence in the reward, whitened over the batch (REINFORCE++, 2501.03262)",
    )
    yield Component(
        "reinforce_plus_plus_baseline",
        target="slime_ppo.advantage:ReinforcePlusPlusBaseline",
        traits=AdvantageTraits(
            scope="sample",
            reads={"rewards", "groups", "rollouts", "mask_sums"},
            across_groups=True,
        ),
        summary="Reward minus group mean, whitened over the whole batch (REINFORCE++, 2501.03262)",
    )


@hookimpl
def slime_presets() -> dict[str, object]:
    return {"advantage_estimator": "ppo"}


@hookimpl
def slime_check(plan: RunPlan, trains: bool, code: Mapping[str, Sequence[FunctionSource]]) -> Iterator[str]:
    name = str(plan.settings.get("advantage_estimator")).removeprefix("ppo:")
    if code:
        return  # a user function may replace rewards or advantages, so only the run shows the outcome
    if trains and name == "reinforce_plus_plus_baseline" and plan.n_samples_per_prompt == 1:
        yield (
            "n_samples_per_prompt = 1: advantage estimator 'reinforce_plus_plus_baseline' subtracts the mean reward of "
            "a group, and the reward of a group of one is its mean, so that nothing would be learned. Give "
            "--n-samples-per-prompt at least 2, or --advantage-estimator reinforce_plus_plus, which compares with the "
            "whole batch"
        )
    if trains and name in WHITENED and plan.settings.get("normalize_advantages") is True:
        yield (
            f"normalize_advantages = true has no effect: advantage estimator {name!r} whitens its advantages itself. "
            "Leave --normalize-advantages out, or choose another estimator"
        )
