"""The hooks of plugin ``grpo``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core import AdvantageTraits, Component, PolicyLossTraits, RunPlan, TransformTraits, hookimpl
from slime_grpo.options import GrpoOptions

__all__: list[str] = []

_TRAITS = AdvantageTraits(scope="sample", reads={"rewards", "groups", "rollouts"}, policy_loss="clipped")


@hookimpl
def slime_register_advantage_estimators() -> Iterator[Component]:
    yield Component(
        "grpo",
        target="slime_grpo.advantage:GroupRelative",
        traits=_TRAITS,
        summary="Group-relative advantage (DeepSeekMath, 2402.03300)",
    )
    yield Component(
        "dr_grpo",
        target="slime_grpo.advantage:GroupCentred",
        traits=_TRAITS,
        summary="Group-relative advantage without the standard deviation (Dr. GRPO, 2503.20783)",
    )
    yield Component(
        "rloo",
        target="slime_grpo.advantage:LeaveOneOut",
        traits=_TRAITS,
        summary="Reward minus the mean of the group's other rewards (RLOO, 2402.14740)",
    )
    yield Component(
        "gspo",
        target="slime_grpo.advantage:GroupRelative",
        traits=AdvantageTraits(scope="sample", reads={"rewards", "groups", "rollouts"}, policy_loss="gspo"),
        summary="grpo's advantage with one importance ratio a response (GSPO, 2507.18071)",
    )
    yield Component(
        "cispo",
        target="slime_grpo.advantage:GroupRelative",
        traits=AdvantageTraits(scope="sample", reads={"rewards", "groups", "rollouts"}, policy_loss="cispo"),
        summary="grpo's advantage with clipped importance weights (CISPO, 2506.13585)",
    )


@hookimpl
def slime_register_policy_losses() -> Iterator[Component]:
    yield Component(
        "gspo",
        target="slime_grpo.losses:SequenceClipped",
        traits=PolicyLossTraits(reads={"advantages", "old_log_probs"}),
        summary="Clipped surrogate of the response's geometric mean ratio (GSPO, 2507.18071)",
    )
    yield Component(
        "cispo",
        target="slime_grpo.losses:ClippedImportance",
        traits=PolicyLossTraits(reads={"advantages", "old_log_probs"}),
        summary="Policy gradient with clipped importance weights (CISPO, 2506.13585)",
    )


@hookimpl
def slime_register_sample_transforms() -> Iterator[Component]:
    yield Component(
        "drop_zero_std",
        target="slime_grpo.transforms:DropZeroStd",
        traits=TransformTraits(scope="group"),
        summary="Drops groups whose rewards are all equal (dynamic sampling, DAPO, 2503.14476)",
    )
    yield Component(
        "mask_truncated",
        target="slime_grpo.transforms:MaskTruncated",
        traits=TransformTraits(scope="group"),
        summary="Keeps truncated responses out of the loss (overlong filtering, DAPO, 2503.14476)",
    )
    yield Component(
        "punish_overlong",
        target="slime_grpo.transforms:PunishOverlong",
        traits=TransformTraits(scope="group"),
        summary="Lowers the reward of responses near the length limit (soft overlong punishment, DAPO, 2503.14476)",
    )


@hookimpl
def slime_presets() -> dict[str, object]:
    return {"advantage_estimator": "grpo"}


@hookimpl
def slime_options() -> type[GrpoOptions]:
    return GrpoOptions


@hookimpl
def slime_check(plan: RunPlan, options: GrpoOptions, trains: bool) -> Iterator[str]:
    buffer, longest = options.overlong_buffer_len, plan.max_response_len
    if trains and buffer is not None and buffer > longest:
        yield (
            f"overlong_buffer_len = {buffer} is above rollout_max_response_len = {longest}, whose end it is; give at "
            f"most {longest}, or leave it out"
        )
    chosen = str(plan.settings.get("policy_loss") or plan.settings.get("advantage_estimator"))
    bound = plan.settings.get("eps_clip_c")
    if trains and bound is not None and chosen.removeprefix("grpo:") == "cispo":
        yield (
            f"eps_clip_c = {bound} has no effect with the policy loss 'cispo': it bounds the ratio of negative "
            "advantages, and cispo bounds every ratio by --eps-clip and --eps-clip-high. Leave --eps-clip-c out, or "
            "choose --policy-loss clipped"
        )
