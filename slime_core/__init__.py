"""Reinforcement learning of language models with Megatron-core and SGLang, in a small core that plugins extend.

These are the names that plugins and user code import; importing them loads neither torch nor Ray nor an engine.
"""

__version__ = "0.1.0"

import typing as _typing

from slime_core.config.options import Conflicts, Flag, Needs, UsedBy
from slime_core.plugins.boundary import boundary
from slime_core.plugins.component import Component, Kind
from slime_core.plugins.contracts import (
    AdvantageEstimator,
    AdvantageSettings,
    Correction,
    CorrectionOutput,
    CorrectionTerms,
    DataSource,
    EvalSamples,
    GenerateFunction,
    GroupedRewards,
    GroupGenerateFunction,
    GroupTransform,
    LearnerInfo,
    LogitsLoss,
    LossCorrection,
    LossOutput,
    LossParts,
    LossReducer,
    LossSettings,
    LossTerms,
    MicroBatch,
    ModelSpec,
    Optimizer,
    Place,
    PolicyLoss,
    PromptFormat,
    PromptRequest,
    PromptScreen,
    PromptTable,
    RawRow,
    Reductions,
    ResponseTokens,
    RewardModel,
    RolloutBatch,
    RolloutSource,
    RolloutTransform,
    RunInfo,
    RunPlan,
    RunView,
    SamplerInfo,
    SampleTracker,
    Schedule,
    ScreenedDataSource,
    Segments,
    TokenAdvantageEstimator,
    TokenAdvantages,
    Tokenizer,
    Tracker,
    TrainSamples,
    TrainStep,
    Transformed,
)
from slime_core.plugins.functions import FunctionSource, load_function, own_definitions
from slime_core.plugins.hooks import hookimpl
from slime_core.plugins.traits import (
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
    TransformTraits,
)
from slime_core.types import PromptGroup, Sample, SampleRecord, SpecInfo, Status

if _typing.TYPE_CHECKING:
    from slime_core.config.section import PluginOptions

__all__ = [
    "AdvantageEstimator",
    "AdvantageSettings",
    "AdvantageTraits",
    "Component",
    "Conflicts",
    "Correction",
    "CorrectionOutput",
    "CorrectionTerms",
    "CorrectionTraits",
    "DataSource",
    "DataTraits",
    "EvalSamples",
    "Flag",
    "FunctionSource",
    "GenerateFunction",
    "GenerateTraits",
    "GroupGenerateFunction",
    "GroupTransform",
    "GroupedRewards",
    "Kind",
    "LearnerInfo",
    "LogitsLoss",
    "LossCorrection",
    "LossOutput",
    "LossParts",
    "LossReducer",
    "LossSettings",
    "LossTerms",
    "MicroBatch",
    "ModelSpec",
    "ModelSpecTraits",
    "Needs",
    "Optimizer",
    "Place",
    "PluginOptions",
    "PolicyLoss",
    "PolicyLossTraits",
    "PromptFormat",
    "PromptFormatTraits",
    "PromptGroup",
    "PromptRequest",
    "PromptScreen",
    "PromptTable",
    "RawRow",
    "Reductions",
    "ResponseTokens",
    "RewardModel",
    "RewardTraits",
    "RolloutBatch",
    "RolloutSource",
    "RolloutSourceTraits",
    "RolloutTransform",
    "RunInfo",
    "RunPlan",
    "RunView",
    "Sample",
    "SampleRecord",
    "SampleTracker",
    "SamplerInfo",
    "Schedule",
    "ScreenedDataSource",
    "Segments",
    "SpecInfo",
    "Status",
    "TokenAdvantageEstimator",
    "TokenAdvantages",
    "Tokenizer",
    "Tracker",
    "TrackerTraits",
    "TrainSamples",
    "TrainStep",
    "TransformTraits",
    "Transformed",
    "UsedBy",
    "__version__",
    "boundary",
    "hookimpl",
    "load_function",
    "own_definitions",
]


def __getattr__(name: str) -> object:
    # Listing plugins imports this package, and need not wait for pydantic.
    if name == "PluginOptions":
        from slime_core.config.section import PluginOptions

        return PluginOptions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
