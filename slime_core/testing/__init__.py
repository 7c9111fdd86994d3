"""The conformance kit: what a plugin's own tests are made of. A suite a kind, subclassed by naming the component.

    from slime_core.testing import AdvantageEstimatorSuite

    class TestMine(AdvantageEstimatorSuite):
        component = "my_algo"

Parts, each importing only those above it: ``fake_engine`` is an inference server without a model; ``subject`` finds the
component as a run would; ``suite`` is the class under all suites; ``estimators``, ``token_estimators``, ``losses``,
``corrections``, ``rewards``, ``transforms``, ``generation``, ``sources``, ``models``, ``trackers`` and ``lifecycle``
hold one suite each; ``conformance`` runs them without pytest; ``pytest_plugin`` has the fixtures.

Behind the suites: ``resumed`` (responses that go on), ``rank_hooks`` and ``ranks`` (hooks in real processes),
``model_process`` (a model spec against Hugging Face's model), ``packed`` (examples of tokens), ``waiting`` (time
limits), ``recorder`` (a plugin that notes its calls). For tests of slime itself: ``fake_server``, ``nursery``
(processes forked from one that has the engines imported) and ``pairs`` (a tokenizer for which text says less than ids).

The one rule: a suite knows the contract and nothing of the component but its traits. Importing this package is cheap;
naming a suite needs hypothesis (``pip install 'slime-rl[testing]'``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.testing.corrections import CorrectionSuite
    from slime_core.testing.estimators import AdvantageEstimatorSuite
    from slime_core.testing.generation import GenerateFunctionSuite
    from slime_core.testing.lifecycle import LifecycleSuite
    from slime_core.testing.losses import PolicyLossSuite
    from slime_core.testing.models import ModelSpecSuite
    from slime_core.testing.rewards import RewardModelSuite
    from slime_core.testing.sources import DataSourceSuite
    from slime_core.testing.token_estimators import TokenAdvantageEstimatorSuite
    from slime_core.testing.trackers import TrackerSuite
    from slime_core.testing.transforms import SampleTransformSuite

__all__ = [
    "AdvantageEstimatorSuite",
    "CorrectionSuite",
    "DataSourceSuite",
    "GenerateFunctionSuite",
    "LifecycleSuite",
    "ModelSpecSuite",
    "PolicyLossSuite",
    "RewardModelSuite",
    "SampleTransformSuite",
    "TokenAdvantageEstimatorSuite",
    "TrackerSuite",
]

_PLACES = {
    "AdvantageEstimatorSuite": "estimators",
    "CorrectionSuite": "corrections",
    "DataSourceSuite": "sources",
    "GenerateFunctionSuite": "generation",
    "LifecycleSuite": "lifecycle",
    "ModelSpecSuite": "models",
    "PolicyLossSuite": "losses",
    "RewardModelSuite": "rewards",
    "SampleTransformSuite": "transforms",
    "TokenAdvantageEstimatorSuite": "token_estimators",
    "TrackerSuite": "trackers",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
