"""The records that cross rooms, and the shape legend of the whole project.

    sample   Sample, Status, SpecInfo, PromptGroup: what user code sees and what is generated; TokenIds, LogProbs, Mask:
             flat arrays that behave like lists; SampleRecord: one row of a run's files of samples; JsonValue
    rollout  Reward, RewardFailure: what a reward model returns for one sample; GroupedRewards: those of a rollout;
             TrainBatch, StepPlan: what is trained

Shapes are read off names: P prompts, G samples of one prompt, B samples, T tokens (ragged or packed), U response
tokens, V vocabulary entries, R data-parallel ranks. ``rewards_B`` is one number a sample, ``log_probs_T`` one a packed
token.

A *prompt group* is the list of samples that answer one prompt. A *rollout* is one generation step over P prompt groups.
A *shard* (:class:`TrainBatch`) is what one data-parallel rank trains of one rollout.
"""

from slime_core.types.rollout import GroupedRewards, Reward, RewardFailure, StepPlan, TrainBatch
from slime_core.types.sample import (
    REWARD_KEY,
    JsonValue,
    LogProbs,
    Mask,
    PromptGroup,
    Sample,
    SampleRecord,
    SpecInfo,
    Status,
    TokenIds,
    label_text,
)

__all__ = [
    "REWARD_KEY",
    "GroupedRewards",
    "JsonValue",
    "LogProbs",
    "Mask",
    "PromptGroup",
    "Reward",
    "RewardFailure",
    "Sample",
    "SampleRecord",
    "SpecInfo",
    "Status",
    "StepPlan",
    "TokenIds",
    "TrainBatch",
    "label_text",
]
