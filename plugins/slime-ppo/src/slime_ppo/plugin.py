"""Plugin ``ppo``: PPO with a critic, and REINFORCE++ without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from slime_core import Registration, hookimpl

if TYPE_CHECKING:
    from slime_core import RunPlan
    from slime_core.provisional import FunctionSource

GAE = {"rewards", "mask", "values", "kl", "gamma", "lambd"}
RETURNS = {"rewards", "mask", "kl", "gamma"}
BASELINE = {"rewards", "groups", "rollouts", "mask_sums"}
WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose advantages have mean 0 and variance 1 over the trained tokens of the rollout."""


@hookimpl
def slime_register(add: Registration) -> None:
    add.advantage_estimator("ppo", "slime_ppo.ppo:ppo", scope="token", reads=GAE)
    add.advantage_estimator(
        "reinforce_plus_plus", "slime_ppo.reinforce_plus_plus:reinforce_plus_plus", scope="token", reads=RETURNS
    )
    add.advantage_estimator(
        "reinforce_plus_plus_baseline",
        "slime_ppo.advantage:reinforce_plus_plus_baseline",
        reads=BASELINE,
        across_groups=True,
    )
    add.presets(advantage_estimator="ppo")


@hookimpl
def slime_check(plan: RunPlan, trains: bool, code: Mapping[str, Sequence[FunctionSource]]) -> Iterator[str]:
    if code or not trains:
        return  # a user function may replace rewards or advantages, so only the run shows the outcome
    estimator = str(plan.settings.get("advantage_estimator")).removeprefix("ppo:")
    if estimator == "reinforce_plus_plus_baseline" and plan.n_samples_per_prompt == 1:
        yield (
            "n_samples_per_prompt = 1: advantage estimator 'reinforce_plus_plus_baseline' subtracts the mean reward of "
            "a group, so a group of one teaches nothing. Give --n-samples-per-prompt at least 2, or "
            "--advantage-estimator reinforce_plus_plus, which has no groups"
        )
    if estimator in WHITENED and plan.settings.get("normalize_advantages") is True:
        yield (
            f"normalize_advantages = true has no effect: advantage estimator {estimator!r} whitens its advantages "
            "itself. Leave --normalize-advantages out, or choose another estimator"
        )
