"""The hooks of plugin ``ppo``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core import AdvantageTraits, Component, hookimpl

__all__: list[str] = []


@hookimpl
def slime_register_advantage_estimators() -> Iterator[Component]:
    yield Component(
        "ppo",
        target="slime_ppo.ppo:GeneralizedAdvantage",
        traits=AdvantageTraits(
            scope="token",
            reads={"rewards", "mask", "values"},
            kl_reads={"log_probs", "ref_log_probs"},
            policy_loss="clipped",
            uses={"gamma", "lambd"},
        ),
        summary="Generalised advantage estimation over a critic's values (PPO, 1707.06347; GAE, 1506.02438)",
    )
    yield Component(
        "reinforce_plus_plus",
        target="slime_ppo.reinforce_plus_plus:ReinforcePlusPlus",
        traits=AdvantageTraits(
            scope="token",
            reads={"rewards", "mask"},
            kl_reads={"log_probs", "ref_log_probs"},
            policy_loss="clipped",
            uses={"gamma"},
            whitens=True,
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
            whitens=True,
        ),
        summary="Reward minus group mean, whitened over the whole batch (REINFORCE++, 2501.03262)",
    )


@hookimpl
def slime_presets() -> dict[str, object]:
    return {"advantage_estimator": "ppo"}
