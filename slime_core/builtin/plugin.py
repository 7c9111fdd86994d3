"""The hooks of plugin ``core``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core import (
    AdvantageTraits,
    Component,
    DataTraits,
    GenerateTraits,
    PolicyLossTraits,
    RewardTraits,
    hookimpl,
)

__all__: list[str] = []


@hookimpl
def slime_register_reward_models() -> Iterator[Component]:
    yield Component(
        "exact_match",
        target="slime_core.builtin.rollout:ExactMatch",
        traits=RewardTraits(isolated=False),
        summary="1 where the stripped response equals the stripped label, else 0",
    )
    yield Component(
        "random",
        target="slime_core.builtin.rollout:Random",
        traits=RewardTraits(isolated=False),
        summary="A fair coin, the same for the same sample; for measuring everything but learning",
    )
    yield Component(
        "zero",
        target="slime_core.builtin.rollout:NoReward",
        traits=RewardTraits(isolated=False, is_constant=True),
        summary="0 for every sample, for runs that learn from a teacher or from labels alone",
    )


@hookimpl
def slime_register_advantage_estimators() -> Iterator[Component]:
    yield Component(
        "sft",
        target="slime_core.builtin.losses:NoAdvantage",
        traits=AdvantageTraits(scope="sample", policy_loss="sft"),
        summary="No advantages: supervised fine-tuning on the responses, as of --generate-function from_label",
    )


@hookimpl
def slime_register_policy_losses() -> Iterator[Component]:
    yield Component(
        "clipped",
        target="slime_core.builtin.losses:Clipped",
        traits=PolicyLossTraits(reads={"advantages", "old_log_probs"}),
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
        target="slime_core.builtin.rollout:SingleTurn",
        traits=GenerateTraits(scope="group", sends_prompts_whole=True, resumes=True),
        summary="One response to each prompt",
    )
    yield Component(
        "from_label",
        target="slime_core.builtin.rollout:FromLabel",
        traits=GenerateTraits(scope="group", sends_prompts_whole=True, samples_from_engine=False),
        summary="The label of each prompt as its response, for supervised fine-tuning; engines answer evaluations",
    )


@hookimpl
def slime_register_prompt_formats() -> Iterator[Component]:
    for suffix in ("jsonl", "ndjson"):
        yield Component(
            suffix,
            target="slime_core.prompts.rows:JsonLines",
            summary="JSON Lines, one object a line; files of other suffixes are read so too",
        )


@hookimpl
def slime_register_data_sources() -> Iterator[Component]:
    yield Component(
        "prompts",
        target="slime_core.builtin.rollout:PromptFiles",
        traits=DataTraits(reads_prompt_files=True),
        summary="Prompts from JSON Lines or files of another format, reshuffled each epoch",
    )
