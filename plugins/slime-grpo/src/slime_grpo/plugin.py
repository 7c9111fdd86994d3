"""Plugin ``grpo``: group-relative advantages, their policy losses, and DAPO's sample transforms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_core import Registration, hookimpl

if TYPE_CHECKING:
    from slime_core import RunPlan

COLUMNS = {"rewards", "groups", "rollouts"}
GSPO = "The advantage of grpo, for the policy loss gspo (GSPO, 2507.18071)."
CISPO = "The advantage of grpo, for the policy loss cispo (CISPO, 2506.13585)."


@hookimpl
def slime_register(add: Registration) -> None:
    add.advantage_estimator("grpo", "slime_grpo.advantage:grpo", reads=COLUMNS)
    add.advantage_estimator("dr_grpo", "slime_grpo.advantage:dr_grpo", reads=COLUMNS)
    add.advantage_estimator("rloo", "slime_grpo.advantage:rloo", reads=COLUMNS)
    add.advantage_estimator("gspo", "slime_grpo.advantage:grpo", reads=COLUMNS, policy_loss="gspo", summary=GSPO)
    add.advantage_estimator("cispo", "slime_grpo.advantage:grpo", reads=COLUMNS, policy_loss="cispo", summary=CISPO)
    add.policy_loss("gspo", "slime_grpo.losses:gspo")
    add.policy_loss("cispo", "slime_grpo.losses:cispo")
    add.sample_transform("drop_zero_std", "slime_grpo.transforms:drop_zero_std")
    add.sample_transform("mask_truncated", "slime_grpo.transforms:mask_truncated")
    add.sample_transform("punish_overlong", "slime_grpo.transforms:punish_overlong")
    add.options("slime_grpo.options:GrpoOptions")
    add.presets(advantage_estimator="grpo")


@hookimpl
def slime_check(plan: RunPlan, trains: bool) -> Iterator[str]:
    loss = str(plan.settings.get("policy_loss") or plan.settings.get("advantage_estimator"))
    bound = plan.settings.get("eps_clip_c")
    if trains and bound is not None and loss.removeprefix("grpo:") == "cispo":
        yield (
            f"eps_clip_c = {bound} has no effect on the policy loss cispo, which bounds every ratio by --eps-clip and "
            "--eps-clip-high. Leave --eps-clip-c out, or choose --policy-loss clipped"
        )
