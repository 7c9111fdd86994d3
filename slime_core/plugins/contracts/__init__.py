"""What the targets of components implement: one Protocol a kind, and the records they take and return.

Every target is called once, as ``Target(options, run)``: with the plugin's options object (None where the plugin has no
options) and a :class:`RunView`. The result is used for the whole run. numpy and torch appear in annotations only, so
that importing this package stays cheap.
"""

from slime_core.plugins.contracts.advantages import (
    AdvantageEstimator,
    AdvantageSettings,
    GroupedRewards,
    Reductions,
    ResponseTokens,
    TokenAdvantageEstimator,
    TokenAdvantages,
)
from slime_core.plugins.contracts.formats import PromptFormat, PromptTable, RawRow
from slime_core.plugins.contracts.learning import LogitsLoss, LossCorrection, LossParts, LossReducer, MicroBatch
from slime_core.plugins.contracts.lifecycle import (
    EvalSamples,
    LearnerInfo,
    Optimizer,
    Place,
    RunInfo,
    SamplerInfo,
    Schedule,
    TrainStep,
)
from slime_core.plugins.contracts.losses import (
    Correction,
    CorrectionOutput,
    CorrectionTerms,
    LossOutput,
    LossSettings,
    LossTerms,
    PolicyLoss,
    Segments,
)
from slime_core.plugins.contracts.models import ModelSpec
from slime_core.plugins.contracts.rollouts import (
    DataSource,
    GenerateFunction,
    GroupGenerateFunction,
    GroupTransform,
    PromptFilter,
    PromptRequest,
    PromptScreen,
    RewardModel,
    RolloutBatch,
    RolloutSource,
    RolloutTransform,
    ScreenedDataSource,
    TrainSamples,
    Transformed,
)
from slime_core.plugins.contracts.run import RunPlan, RunView, Tokenizer
from slime_core.plugins.contracts.trackers import SampleTracker, Tracker

__all__ = [
    "AdvantageEstimator",
    "AdvantageSettings",
    "Correction",
    "CorrectionOutput",
    "CorrectionTerms",
    "DataSource",
    "EvalSamples",
    "GenerateFunction",
    "GroupGenerateFunction",
    "GroupTransform",
    "GroupedRewards",
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
    "Optimizer",
    "Place",
    "PolicyLoss",
    "PromptFilter",
    "PromptFormat",
    "PromptRequest",
    "PromptScreen",
    "PromptTable",
    "RawRow",
    "Reductions",
    "ResponseTokens",
    "RewardModel",
    "RolloutBatch",
    "RolloutSource",
    "RolloutTransform",
    "RunInfo",
    "RunPlan",
    "RunView",
    "SampleTracker",
    "SamplerInfo",
    "Schedule",
    "ScreenedDataSource",
    "Segments",
    "TokenAdvantageEstimator",
    "TokenAdvantages",
    "Tokenizer",
    "Tracker",
    "TrainSamples",
    "TrainStep",
    "Transformed",
]
