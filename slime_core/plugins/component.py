"""What a plugin declares: a name, where its code is, and what the core may know about it before importing that code."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from slime_core.plugins.traits import (
    TARGET,
    AdvantageTraits,
    CorrectionTraits,
    DataTraits,
    GenerateTraits,
    ModelSpecTraits,
    PolicyLossTraits,
    PromptFormatTraits,
    RewardTraits,
    RolloutSourceTraits,
    TrackerTraits,
    Traits,
    TransformTraits,
)

__all__ = ["Component", "Kind"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


class Kind(StrEnum):
    """What a component can be; each kind has one registration hook, one traits class and one contract."""

    ADVANTAGE_ESTIMATOR = "advantage_estimator"
    POLICY_LOSS = "policy_loss"
    CORRECTION = "correction"
    REWARD_MODEL = "reward_model"
    SAMPLE_TRANSFORM = "sample_transform"
    GENERATE_FUNCTION = "generate_function"
    DATA_SOURCE = "data_source"
    PROMPT_FORMAT = "prompt_format"
    ROLLOUT_SOURCE = "rollout_source"
    MODEL_SPEC = "model_spec"
    TRACKER = "tracker"

    @property
    def words(self) -> str:
        """The kind as words, for messages."""
        return self.value.replace("_", " ")

    @property
    def traits(self) -> type[Traits]:
        """The class that a component of this kind carries as ``traits``."""
        return _TRAITS[self]


_TRAITS: dict[Kind, type[Traits]] = {
    Kind.ADVANTAGE_ESTIMATOR: AdvantageTraits,
    Kind.POLICY_LOSS: PolicyLossTraits,
    Kind.CORRECTION: CorrectionTraits,
    Kind.REWARD_MODEL: RewardTraits,
    Kind.SAMPLE_TRANSFORM: TransformTraits,
    Kind.GENERATE_FUNCTION: GenerateTraits,
    Kind.DATA_SOURCE: DataTraits,
    Kind.PROMPT_FORMAT: PromptFormatTraits,
    Kind.ROLLOUT_SOURCE: RolloutSourceTraits,
    Kind.MODEL_SPEC: ModelSpecTraits,
    Kind.TRACKER: TrackerTraits,
}


@dataclass(frozen=True, slots=True)
class Component:
    """One thing a run can select by name; its code is imported only where it is selected.

    Example::

        Component("grpo", target="slime_grpo.advantage:GroupRelative", traits=AdvantageTraits(scope="sample"),
                  summary="Group-relative advantage (DeepSeekMath, 2402.03300)")

    Arguments:
        name: what the run writes, such as ``--advantage-estimator grpo``; letters, digits and ``. _ + -``.
        target: ``package.module:attribute``; inside a single-file plugin, ``f"{__name__}:attribute"``.
        traits: an instance of the kind's traits class; None: that class's defaults.
        summary: one line for ``slime plugins show``.

    Raises:
        ValueError: ``name`` or ``target`` is not of that form.
    """

    name: str
    _: KW_ONLY
    target: str
    traits: Traits | None = None
    summary: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a component's name has letters, digits and . _ + - only; found {self.name!r}")
        if not TARGET.fullmatch(self.target):
            found = f"component {self.name!r} has the target {self.target!r}"
            raise ValueError(f"{found}; write it as 'package.module:attribute'")
