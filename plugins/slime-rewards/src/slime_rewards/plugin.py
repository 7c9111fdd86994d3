"""The hooks of plugin ``rewards``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slime_core import Component, RewardTraits, RunPlan, hookimpl
from slime_core.types import JsonValue
from slime_rewards.options import RewardsOptions

__all__: list[str] = []

RULES = (
    ("math", "mathematics:Mathematics", "1 where the answer equals the label as a mathematical expression, else 0"),
    ("boxed_math", "mathematics:BoxedMathematics", "As math, on the content of the last boxed expression"),
    ("deepscaler", "mathematics:DeepScaleR", "1 where the boxed answer after the thinking equals the label, else 0"),
    (
        "dapo",
        "mathematics:Dapo",
        "score 1 or -1, acc 1 or 0, by the line 'Answer: ...' (DAPO, 2503.14476); needs --reward-key",
    ),
    ("f1", "texts:WordOverlap", "F1 of the response's words against the label's"),
    ("gpqa", "texts:MultipleChoice", "1 where the response takes the label's letter, else 0 (GPQA, 2311.12022)"),
    (
        "ifeval",
        "instructions.rewards:IfEval",
        "1 where the response follows the row's instruction_id_list, else 0 (IFEval, 2311.07911)",
    ),
    (
        "ifbench",
        "instructions.rewards:IfBench",
        "As ifeval, ignoring asterisks and outer lines (IFBench, 2507.02833); both know both benchmarks' instructions",
    ),
    (
        "instructions",
        "instructions.rewards:Instructions",
        "strict and loose as ifeval and ifbench, and strict_share and loose_share; needs --reward-key",
    ),
)
"""Rule-based reward models: name, target, summary. They run in separate processes."""

NUMBERS = {"dapo": {"score", "acc"}, "instructions": {"strict", "loose", "strict_share", "loose_share"}}
"""Reward models with several named numbers -> the names."""

SERVICES = (
    (
        "remote_rm",
        "RemoteReward",
        RewardTraits(isolated=False),
        "The answer of an HTTP service that gets prompt, response and label (--rm-url)",
    ),
    (
        "served_rm",
        "ServedReward",
        RewardTraits(isolated=False, auxiliary_model="scores"),
        "The output of a neural reward model that the run serves as an auxiliary model (--rm-model)",
    ),
    (
        "judge",
        "JudgeReward",
        RewardTraits(isolated=False, auxiliary_model="texts"),
        "The score that a language model, served as an auxiliary model, writes about a response (--rm-model)",
    ),
)
"""Reward models that call a service or a model: name, target, traits, summary. They run in the sampler."""


@hookimpl
def slime_register_reward_models() -> Iterator[Component]:
    for name, target, summary in RULES:
        traits = RewardTraits(numbers=NUMBERS.get(name, frozenset()))
        yield Component(name, target=f"slime_rewards.{target}", traits=traits, summary=summary)
    for name, target, traits, summary in SERVICES:
        yield Component(name, target=f"slime_rewards.services:{target}", traits=traits, summary=summary)


@hookimpl
def slime_options() -> type[RewardsOptions]:
    return RewardsOptions


@hookimpl
def slime_check(plan: RunPlan, options: RewardsOptions) -> Iterator[str]:
    from slime_rewards.checks import mistakes

    yield from mistakes(plan, options)


@hookimpl
def slime_check_row(metadata: Mapping[str, JsonValue], options: RewardsOptions) -> Iterator[str]:
    from slime_rewards.checks import row_mistakes

    yield from row_mistakes(metadata, options)
