"""Runs the suites without pytest, for ``slime plugins check``; violations are returned as records."""

from __future__ import annotations

import importlib
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import slime_testing as testing
from slime_core import boundary
from slime_core.errors import PluginError
from slime_testing.harness import Kind, Plugin, activate

__all__ = ["Finding", "check_component", "check_lifecycle"]

_SUITES = {
    Kind.CORRECTION: "CorrectionSuite",
    Kind.DATA_SOURCE: "DataSourceSuite",
    Kind.GENERATE_FUNCTION: "GenerateFunctionSuite",
    Kind.MODEL_SPEC: "ModelSpecSuite",
    Kind.POLICY_LOSS: "PolicyLossSuite",
    Kind.REWARD_MODEL: "RewardModelSuite",
    Kind.ROLLOUT_SOURCE: "RolloutSourceSuite",
    Kind.SAMPLE_TRANSFORM: "SampleTransformSuite",
    Kind.TRACKER: "TrackerSuite",
}
_ESTIMATORS = {"sample": "AdvantageEstimatorSuite", "token": "TokenAdvantageEstimatorSuite"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One property that is violated or was not tested.

    Example: ``Finding("my_algo", "the_batch_is_not_changed", "estimate() changed its input: rewards_B. ...")``.

    Arguments:
        component: name of the component; for hooks, name of the plugin.
        property: name of the suite's method without ``test_``, which states the property.
        message: description of the violation.
        skipped: True: the examples cannot test the property; the message says why.
    """

    component: str
    property: str
    message: str
    skipped: bool = False


def check_component(component: str, *, kind: Kind, plugin: str | Plugin, options: Any = None) -> list[Finding]:
    """Test every property of a component; empty: all hold.

    Takes up to ten seconds; a model spec, which is built in a separate process, up to a minute.

    Arguments:
        plugin: its plugin, or a word of ``--plugin``.
        options: the plugin's options; None means its defaults.

    Raises:
        PluginError: the plugin or the component cannot be found or loaded.
    """
    active = activate(plugin)
    traits = active.component(kind, component).traits
    name = _ESTIMATORS[traits.scope] if kind is Kind.ADVANTAGE_ESTIMATOR else _SUITES[kind]
    suite = _subclass(name, component=component, plugin=active.plugin, options=options)
    return list(_findings(suite, component, active.plugin))


def check_lifecycle(plugin: Plugin) -> list[Finding]:
    """Test the properties of the plugin's lifecycle hooks; hooks of learner ranks run in two processes.

    Raises:
        PluginError: the plugin cannot be found.
    """
    return list(_findings(_subclass("LifecycleSuite", plugin=plugin), plugin.name, plugin))


def _subclass(name: str, **attributes: Any) -> Any:
    return type(f"Checked{name}", (getattr(testing, name),), {**attributes, "__module__": __name__})


def _findings(suite: Any, component: str, owner: Plugin) -> Iterator[Finding]:
    written = importlib.import_module("slime_testing.suite")
    for name in written.properties(suite):
        failure = _failure(getattr(suite(), name), f"{owner}: {name}", written.PropertyViolation)
        if failure is not None:
            skipped = isinstance(failure, written.NotTested)
            yield Finding(component, name.removeprefix("test_"), str(failure), skipped)


def _failure(run: Callable[[], None], what: str, violation: type[Exception]) -> Exception | None:
    """Return the violation of the property, or the exception that the component raised during the test."""
    try:
        with boundary(what, "testing this property"):
            return _violation(run, violation)
    except PluginError as failure:
        return failure


def _violation(run: Callable[[], None], violation: type[Exception]) -> Exception | None:
    try:
        run()
    except violation as failure:
        return failure
    except unittest.SkipTest:  # another property reports the reason
        return None
    return None
