"""The hooks of plugin ``core``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core import Component, DataTraits, GenerateTraits, PolicyLossTraits, RewardTraits, hookimpl

__all__: list[str] = []


@hookimpl
def slime_register_reward_models() -> Iterator[Component]:
    yield Component(
        "exact_match",
        target="slime_core.builtin.rewards:ExactMatch",
        traits=RewardTraits(scope="sample"),
        summary="1 where the stripped response equals the stripped label, else 0",
    )
    yield Component(
        "random",
        target="slime_core.builtin.rewards:Random",
        traits=RewardTraits(scope="sample"),
        summary="A fair coin, the same for the same sample; for measuring everything but learning",
    )


@hookimpl
def slime_register_policy_losses() -> Iterator[Component]:
    yield Component(
        "clipped",
        target="slime_core.builtin.losses:Clipped",
        traits=PolicyLossTraits(reads={"old_log_probs"}),
        summary="Clipped surrogate (PPO, 1707.06347), with clip-higher (2503.14476) and dual clip (1912.09729)",
    )
    yield Component(
        "sft",
        target="slime_core.builtin.losses:NegativeLogLikelihood",
        traits=PolicyLossTraits(reads=frozenset()),
        summary="Negative log-likelihood of the response tokens",
    )


@hookimpl
def slime_register_generate_functions() -> Iterator[Component]:
    yield Component(
        "single_turn",
        target="slime_core.rollout.generate:SingleTurn",
        traits=GenerateTraits(scope="group"),
        summary="One response to each prompt",
    )


@hookimpl
def slime_register_data_sources() -> Iterator[Component]:
    yield Component(
        "prompts",
        target="slime_core.data.prompts:PromptFiles",
        traits=DataTraits(),
        summary="Prompts from a JSON Lines file, shuffled anew each epoch",
    )
