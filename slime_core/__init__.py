"""Reinforcement learning of language models with Megatron-core and SGLang, in a small core that plugins extend.

These are the stable names that plugins and user code import; :mod:`slime_core.provisional` has those that may change in
a minor version. Importing either loads neither torch nor Ray nor an engine.
"""

import typing as _typing

from slime_core.exports import import_on_use as _import_on_use
from slime_core.plugins.discovery import CORE as _CORE
from slime_core.plugins.hooks import hookimpl, observer
from slime_core.plugins.registration import Registration
from slime_core.user_code.failures import boundary

if _typing.TYPE_CHECKING:
    from slime_core.config.options import Conflicts, Flag, NamesCode, Needs, Provides, UsedBy
    from slime_core.config.section import PluginOptions
    from slime_core.contracts import (
        AdvantageEstimator,
        AdvantageSettings,
        CheckedRewardModel,
        Correction,
        CorrectionOutput,
        CorrectionTerms,
        DataSource,
        EvalSamples,
        GenerateFunction,
        GroupedRewards,
        GroupGenerateFunction,
        GroupTransform,
        LossOutput,
        LossSettings,
        LossTerms,
        ModelSpec,
        Place,
        PolicyLoss,
        Reductions,
        ResponseTokens,
        RewardModel,
        RolloutBatch,
        RolloutSource,
        RolloutTransform,
        RunInfo,
        RunPlan,
        RunView,
        Segments,
        TokenAdvantageEstimator,
        TokenAdvantages,
        Tokenizer,
        Tracker,
        TrainStep,
        Transformed,
    )
    from slime_core.types import EngineColumn, PromptGroup, Sample, SampleRecord, Status

__version__ = _CORE.version

__all__ = [
    "AdvantageEstimator",
    "AdvantageSettings",
    "CheckedRewardModel",
    "Conflicts",
    "Correction",
    "CorrectionOutput",
    "CorrectionTerms",
    "DataSource",
    "EngineColumn",
    "EvalSamples",
    "Flag",
    "GenerateFunction",
    "GroupGenerateFunction",
    "GroupTransform",
    "GroupedRewards",
    "LossOutput",
    "LossSettings",
    "LossTerms",
    "ModelSpec",
    "NamesCode",
    "Needs",
    "Place",
    "PluginOptions",
    "PolicyLoss",
    "PromptGroup",
    "Provides",
    "Reductions",
    "Registration",
    "ResponseTokens",
    "RewardModel",
    "RolloutBatch",
    "RolloutSource",
    "RolloutTransform",
    "RunInfo",
    "RunPlan",
    "RunView",
    "Sample",
    "SampleRecord",
    "Segments",
    "Status",
    "TokenAdvantageEstimator",
    "TokenAdvantages",
    "Tokenizer",
    "Tracker",
    "TrainStep",
    "Transformed",
    "UsedBy",
    "__version__",
    "boundary",
    "hookimpl",
    "observer",
]


_HOMES = ("config.options", "types", "contracts", "config.section")

__getattr__ = _import_on_use(__name__, __all__, [f"{__name__}.{home}" for home in _HOMES])
