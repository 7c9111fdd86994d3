"""Names for plugins that may change in a minor version: arguments of provisional hooks, and code that options name."""

import typing as _typing

from slime_core.exports import import_on_use as _import_on_use

if _typing.TYPE_CHECKING:
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
        WrappedModel,
    )
    from slime_core.contracts.learning import NamedTensors
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
    "NamedTensors",
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
    "WrappedModel",
    "describe",
    "load_function",
    "own_definitions",
]

_HOMES = ("config.options", "user_code.failures", "contracts", "contracts.learning", "types", "components.functions")

__getattr__ = _import_on_use(__name__, __all__, [f"slime_core.{home}" for home in _HOMES])
