"""Names for plugins that may change in a minor version: arguments of provisional hooks, and code that options name."""

from slime_core.components.functions import FunctionSource, load_function, own_definitions
from slime_core.config.options import AtMost, DerivedSetting, NamesPrompts, Once
from slime_core.contracts import (
    LearnerInfo,
    LogitsLoss,
    LossCorrection,
    LossParts,
    LossReducer,
    MicroBatch,
    Optimizer,
    PromptFilter,
    PromptLimits,
    PromptRequest,
    PromptRow,
    PromptScreen,
    SamplerInfo,
    SampleTracker,
    Schedule,
    TrainSamples,
)
from slime_core.types import SpecInfo
from slime_core.user_code.failures import describe

__all__ = [
    "AtMost",
    "DerivedSetting",
    "FunctionSource",
    "LearnerInfo",
    "LogitsLoss",
    "LossCorrection",
    "LossParts",
    "LossReducer",
    "MicroBatch",
    "NamesPrompts",
    "Once",
    "Optimizer",
    "PromptFilter",
    "PromptLimits",
    "PromptRequest",
    "PromptRow",
    "PromptScreen",
    "SampleTracker",
    "SamplerInfo",
    "Schedule",
    "SpecInfo",
    "TrainSamples",
    "describe",
    "load_function",
    "own_definitions",
]
