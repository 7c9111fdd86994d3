"""The suites without pytest, and the fixtures with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

import slime_testing as testing
from slime_core.errors import PluginError
from slime_testing import RewardModelSuite
from slime_testing.conformance import check_component, check_lifecycle
from slime_testing.fake_engine import FakeEngine
from slime_testing.harness import PLACES, Kind, find_plugin, installed_plugins
from slime_testing.recorder import HookRecorder
from slime_testing.suite import properties

SORTED = "return sorted(len(sample.response) for sample in samples)"
REWARD = f"""
from slime_core import hookimpl

@hookimpl
def slime_register(add):
    add.reward_model("mine", reward)

async def reward(samples):
    {SORTED}
"""


def test_a_right_component_has_no_findings() -> None:
    assert check_component("exact_match", kind=Kind.REWARD_MODEL, plugin="core") == []


@pytest.mark.parametrize(
    ("body", "prop", "skipped", "word"),
    [
        (SORTED, "rewards_come_in_the_order_of_the_samples", False, "order"),
        ("raise KeyError('label')", "every_sample_gets_one_finite_reward", False, "KeyError: 'label'"),
        ("return [0.0] * len(samples)", "the_examples_get_different_rewards", True, "[0.0]"),
    ],
)
def test_a_violated_or_untested_property_is_reported(
    body: str, prop: str, skipped: bool, word: str, slime_local_plugin: Callable[..., str]
) -> None:
    plugin = slime_local_plugin(REWARD.replace(SORTED, body))
    first = check_component("mine", kind=Kind.REWARD_MODEL, plugin=plugin)[0]
    assert (first.component, first.property, first.skipped) == ("mine", prop, skipped)
    assert word in first.message


def test_an_unknown_component_is_an_error() -> None:
    with pytest.raises(PluginError, match="'nothing'"):
        check_component("nothing", kind=Kind.REWARD_MODEL, plugin="core")


def test_a_plugin_without_hooks_has_a_finding() -> None:
    findings = check_lifecycle(find_plugin("grpo"))
    assert [finding.property for finding in findings] == ["the_plugin_implements_hooks_that_slime_calls"]


def test_every_suite_can_be_imported_by_its_public_name() -> None:
    assert all(properties(getattr(testing, name)) for name in testing.__all__)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = testing.Nothing


def test_a_class_without_a_component_is_an_error() -> None:
    with pytest.raises(PluginError, match="RewardModelSuite"):
        RewardModelSuite.subject()


def test_every_subclass_has_separate_properties() -> None:
    first, second = (type("TestMine", (RewardModelSuite,), {"component": "random"}) for _ in range(2))
    name = "test_rewards_come_in_the_order_of_the_samples"
    assert vars(first)[name] is not vars(second)[name]


def test_the_pytest_plugin_and_the_conformance_module_load_nothing_heavy() -> None:
    program = "import sys, slime_testing.pytest_plugin, slime_testing.conformance; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "ray", "numpy", "megatron", "transformers", "hypothesis", "aiohttp"}


def test_installed_plugins_can_be_hidden(slime_discovery_off: None) -> None:
    assert {plugin.distribution for plugin in installed_plugins()} == {"slime-rl"}


def test_the_recorder_has_every_hook_and_records_its_arguments(slime_hook_recorder: HookRecorder) -> None:
    vars(HookRecorder)["slime_after_weight_sync"](slime_hook_recorder, version=3, options=None)
    assert slime_hook_recorder.calls == [("slime_after_weight_sync", {"version": 3, "options": None})]
    assert slime_hook_recorder.names == ["slime_after_weight_sync"]
    assert all(hasattr(slime_hook_recorder, hook) for hook in PLACES)


def test_the_fake_engine_is_up(slime_fake_engine: FakeEngine) -> None:
    assert slime_fake_engine.url.startswith("http://127.0.0.1:")
