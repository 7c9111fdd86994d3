"""Reinforcement learning of language models with Megatron-core and SGLang, in a small core that plugins extend.

These are the names that plugins and user code import; importing them loads neither torch nor Ray nor an engine.
"""

from slime_core.plugins.component import Component, Kind
from slime_core.plugins.contracts import (
    AdvantageEstimator,
    DataSource,
    GenerateFunction,
    GroupedRewards,
    GroupGenerateFunction,
    LossOutput,
    LossSettings,
    LossTerms,
    ModelSpec,
    PolicyLoss,
    PromptRequest,
    RewardModel,
    Segments,
    Tracker,
)
from slime_core.plugins.hooks import hookimpl
from slime_core.plugins.traits import (
    AdvantageTraits,
    DataTraits,
    GenerateTraits,
    ModelSpecTraits,
    PolicyLossTraits,
    RewardTraits,
    TrackerTraits,
)
from slime_core.types import PromptGroup, Sample, SpecInfo, Status

__version__ = "0.1.0"

__all__ = [
    "AdvantageEstimator",
    "AdvantageTraits",
    "Component",
    "DataSource",
    "DataTraits",
    "GenerateFunction",
    "GenerateTraits",
    "GroupGenerateFunction",
    "GroupedRewards",
    "Kind",
    "LossOutput",
    "LossSettings",
    "LossTerms",
    "ModelSpec",
    "ModelSpecTraits",
    "PolicyLoss",
    "PolicyLossTraits",
    "PromptGroup",
    "PromptRequest",
    "RewardModel",
    "RewardTraits",
    "Sample",
    "Segments",
    "SpecInfo",
    "Status",
    "Tracker",
    "TrackerTraits",
    "__version__",
    "hookimpl",
]
