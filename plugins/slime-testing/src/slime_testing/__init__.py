"""The conformance kit: what a plugin's own tests are made of. A suite a kind, subclassed by naming the component.

    from slime_testing import AdvantageEstimatorSuite

    class TestMine(AdvantageEstimatorSuite):
        component = "my_algo"

Parts, each importing only those above it: ``subject`` finds the component as a run would; ``suite`` is the class under
all suites; ``estimators``, ``token_estimators``, ``losses``, ``corrections``, ``rewards``, ``transforms``,
``generation``, ``sources``, ``rollout_sources``, ``formats``, ``models``, ``trackers`` and ``lifecycle`` hold one suite
each; ``conformance`` runs them without pytest; ``pytest_plugin`` has the fixtures.

Used by the suites: ``resumed`` (aborted responses that resume), ``rank_hooks`` and ``ranks`` (hooks in real processes),
``model_process`` (a model spec against Hugging Face's model), ``packed`` (examples of tokens), ``waiting`` (time
limits), ``recorder`` (a plugin that notes its calls). For tests of slime itself: ``fork_server``
(a server that forks processes with the engines imported) and ``pairs`` (a tokenizer whose text does not determine the
ids).

Commands: ``scaffold`` writes a package from ``templates`` (``slime plugins new``); ``checkup`` looks at each plugin in
a process of its own, ``examine``, and at its metadata and files, ``wheels``; ``verdicts`` are the lines of what was
found (``slime plugins check``).

The one rule: a suite knows the contract and nothing of the component but its traits. Importing this package is cheap;
naming a suite imports hypothesis.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_testing.corrections import CorrectionSuite
    from slime_testing.estimators import AdvantageEstimatorSuite
    from slime_testing.formats import PromptFormatSuite
    from slime_testing.generation import GenerateFunctionSuite
    from slime_testing.lifecycle import LifecycleSuite
    from slime_testing.losses import PolicyLossSuite
    from slime_testing.models import ModelSpecSuite
    from slime_testing.rewards import RewardModelSuite
    from slime_testing.rollout_sources import RolloutSourceSuite
    from slime_testing.sources import DataSourceSuite
    from slime_testing.token_estimators import TokenAdvantageEstimatorSuite
    from slime_testing.trackers import TrackerSuite
    from slime_testing.transforms import SampleTransformSuite

__all__ = [
    "AdvantageEstimatorSuite",
    "CorrectionSuite",
    "DataSourceSuite",
    "GenerateFunctionSuite",
    "LifecycleSuite",
    "ModelSpecSuite",
    "PolicyLossSuite",
    "PromptFormatSuite",
    "RewardModelSuite",
    "RolloutSourceSuite",
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
    "PromptFormatSuite": "formats",
    "RewardModelSuite": "rewards",
    "RolloutSourceSuite": "rollout_sources",
    "SampleTransformSuite": "transforms",
    "TokenAdvantageEstimatorSuite": "token_estimators",
    "TrackerSuite": "trackers",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
