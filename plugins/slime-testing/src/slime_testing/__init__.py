"""The conformance kit for plugins: one test suite for each kind of component, subclassed with the component's name.

    from slime_testing import AdvantageEstimatorSuite

    class TestMine(AdvantageEstimatorSuite):
        component = "my_algo"

Parts, each importing only those above it: ``subject`` finds the component as a run would; ``suite`` is the base class
of all suites; ``estimators``, ``token_estimators``, ``losses``, ``corrections``, ``rewards``, ``transforms``,
``generation``, ``sources``, ``rollout_sources``, ``models``, ``trackers`` and ``lifecycle`` define one
suite each; ``conformance`` runs them without pytest; ``pytest_plugin`` has the fixtures.

Used by the suites: ``resumed`` (aborted responses that resume), ``rank_hooks`` and ``ranks`` (hooks in real processes),
``model_process`` (a model spec against Hugging Face's model), ``packed`` (examples of tokens), ``waiting`` (time
limits), ``recorder`` (a plugin that records its calls). For tests of slime itself: ``fork_server``
(a server that forks processes with the engines imported) and ``pairs`` (a tokenizer whose text does not determine the
ids).

Commands, which ``plugin`` registers: ``scaffold`` writes a package from ``templates`` (``slime plugins new``);
``checkup`` checks each plugin (``slime plugins check``) with ``examine``, which runs in a separate process, and with
``wheels``, which reads metadata and files; ``verdicts`` defines the lines of the result.

A suite depends on the contract and on the arguments with which the component was added, and on nothing else. Importing
this package is cheap; accessing a suite imports hypothesis.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_testing.corrections import CorrectionSuite
    from slime_testing.estimators import AdvantageEstimatorSuite
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
