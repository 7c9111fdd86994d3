"""Plugin ``rewards``: its reward models, options and checks; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from slime_core import Registration, hookimpl

if TYPE_CHECKING:
    from slime_core import RunPlan
    from slime_core.types import JsonValue
    from slime_rewards.options import RewardsOptions

__all__: list[str] = []


@hookimpl
def slime_register(add: Registration) -> None:
    add.options("slime_rewards.options:RewardsOptions")
    add.reward_model("math", "slime_rewards.mathematics:Mathematics")
    add.reward_model("boxed_math", "slime_rewards.mathematics:BoxedMathematics")
    add.reward_model("deepscaler", "slime_rewards.mathematics:DeepScaleR")
    add.reward_model("dapo", "slime_rewards.mathematics:Dapo", numbers={"score", "acc"})
    add.reward_model("f1", "slime_rewards.texts:WordOverlap")
    add.reward_model("gpqa", "slime_rewards.texts:MultipleChoice")
    add.reward_model("ifeval", "slime_rewards.instructions.rewards:IfEval")
    add.reward_model("ifbench", "slime_rewards.instructions.rewards:IfBench")
    add.reward_model(
        "instructions",
        "slime_rewards.instructions.rewards:Instructions",
        numbers={"strict", "loose", "strict_share", "loose_share"},
    )
    # These call a service or a model, in the sampler.
    add.reward_model("remote_rm", "slime_rewards.services:RemoteReward", isolated=False)
    add.reward_model("served_rm", "slime_rewards.services:ServedReward", isolated=False, auxiliary_model="scores")
    add.reward_model("judge", "slime_rewards.services:JudgeReward", isolated=False, auxiliary_model="texts")


@hookimpl
def slime_check(plan: RunPlan, options: RewardsOptions) -> Iterator[str]:
    from slime_rewards.checks import mistakes

    yield from mistakes(plan, options)


@hookimpl
def slime_check_row(metadata: Mapping[str, JsonValue], options: RewardsOptions) -> Iterator[str]:
    from slime_rewards.checks import row_mistakes

    yield from row_mistakes(metadata, options)
