"""Plugin ``core``: the components that the core ships."""

from __future__ import annotations

from slime_core import Registration, hookimpl


@hookimpl
def slime_register(add: Registration) -> None:
    add.reward_model("exact_match", "slime_core.builtin.rollout:ExactMatch", isolated=False)
    add.reward_model("random", "slime_core.builtin.rollout:Random", isolated=False)
    add.reward_model("zero", "slime_core.builtin.rollout:NoReward", isolated=False, is_constant=True)
    add.advantage_estimator("sft", "slime_core.builtin.losses:NoAdvantage", policy_loss="sft")
    add.policy_loss("clipped", "slime_core.builtin.losses:Clipped")
    add.policy_loss("sft", "slime_core.builtin.losses:NegativeLogLikelihood", reads=frozenset())
    add.generate_function(
        "single_turn", "slime_core.builtin.rollout:SingleTurn", scope="group", sends_prompts_whole=True, resumes=True
    )
    add.generate_function(
        "from_label",
        "slime_core.builtin.rollout:FromLabel",
        scope="group",
        sends_prompts_whole=True,
        samples_from_engine=False,
    )
