"""The records that packages exchange, and the shape legend of the whole project.

    sample   Sample, Status, SpecInfo, PromptGroup: samples for user code; TokenIds, LogProbs, Mask: flat arrays that
             behave like lists; EngineColumn: data of an engine per token; JsonLabel; SampleRecord: one
             row of a run's files of samples; JsonValue
    rollout  Reward, RewardFailure: the result of a reward model for one sample; GroupedRewards: the rewards of a
             rollout; TrainBatch, StepPlan: a shard for training

Names show shapes: P prompts, G samples of one prompt, B samples, T tokens (ragged or packed), U response
tokens, V vocabulary entries, R data-parallel ranks. ``rewards_B`` is one number per sample, ``log_probs_T`` one per
packed token.

A *prompt group* is the list of samples that answer one prompt. A *rollout* is the samples that one iteration of the
training loop trains on: P prompt groups. A *generation* is one call of the engine or of a generate function for one
sample; it may return several samples (*siblings*), which share a ``rollout_id``. slime named this field; it numbers
generations, not rollouts. A *shard* (:class:`TrainBatch`) is the part of a rollout that one data-parallel rank trains.
"""

from slime_core.types.rollout import GroupedRewards, Reward, RewardFailure, StepPlan, TrainBatch
from slime_core.types.sample import (
    BAD,
    GENERATE_FUNCTION,
    REWARD_KEY,
    REWARD_MODEL,
    REWARD_TOLERANCE,
    SAMPLING_PARAMS,
    TOO_LONG,
    TOOLS,
    EngineColumn,
    JsonLabel,
    JsonValue,
    LogProbs,
    Mask,
    Prompt,
    PromptGroup,
    Sample,
    SampleRecord,
    SpecInfo,
    Status,
    TokenIds,
    equal_rewards,
    label_text,
    needs_label,
    needs_text_label,
    reaches,
    tools_of,
)

__all__ = [
    "BAD",
    "GENERATE_FUNCTION",
    "REWARD_KEY",
    "REWARD_MODEL",
    "REWARD_TOLERANCE",
    "SAMPLING_PARAMS",
    "TOOLS",
    "TOO_LONG",
    "EngineColumn",
    "GroupedRewards",
    "JsonLabel",
    "JsonValue",
    "LogProbs",
    "Mask",
    "Prompt",
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
    "equal_rewards",
    "label_text",
    "needs_label",
    "needs_text_label",
    "reaches",
    "tools_of",
]
