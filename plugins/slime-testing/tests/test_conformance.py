"""The suites without pytest, and the fixtures with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import slime_testing as testing
from slime_core import Kind
from slime_core.errors import PluginError
from slime_core.plugins.discovery import installed
from slime_core.plugins.hooks import LIFECYCLE_HOOKS
from slime_testing import RewardModelSuite
from slime_testing.conformance import Finding, check_component, check_lifecycle
from slime_testing.suite import properties

REWARD = """
from slime_core import Component, hookimpl

@hookimpl
def slime_register_reward_models():
    yield Component("mine", target=f"{__name__}:Reward")

class Reward:
    def __init__(self, options, run): pass

    async def score(self, samples):
        return sorted(len(sample.response) for sample in samples)
"""


def test_a_component_that_holds_has_no_findings():
    assert check_component("exact_match", kind=Kind.REWARD_MODEL, plugin="core") == []


def test_a_broken_property_is_reported_by_name_and_in_words(slime_local_plugin):
    first = check_component("mine", kind=Kind.REWARD_MODEL, plugin=slime_local_plugin(REWARD))[0]
    assert isinstance(first, Finding)
    assert (first.component, first.property) == ("mine", "rewards_come_in_the_order_of_the_samples")
    assert "order of the samples" in first.message


def test_a_component_that_raises_is_a_finding_with_its_owner(slime_local_plugin):
    source = REWARD.replace("return sorted", "raise KeyError('label')\n        return sorted")
    found = check_component("mine", kind=Kind.REWARD_MODEL, plugin=slime_local_plugin(source))
    assert {one.property for one in found} >= {"every_sample_gets_one_finite_reward"}
    assert "KeyError: 'label'" in found[0].message


def test_properties_that_the_examples_cannot_show_are_skipped(slime_local_plugin):
    source = REWARD.replace("return sorted(len(sample.response) for sample in samples)", "return [0.0] * len(samples)")
    (found,) = check_component("mine", kind=Kind.REWARD_MODEL, plugin=slime_local_plugin(source))
    assert (found.property, found.skipped) == ("the_examples_get_different_rewards", True)
    assert "same reward, [0.0]" in found.message


def test_an_unknown_component_is_an_error():
    with pytest.raises(PluginError, match="called 'nothing'"):
        check_component("nothing", kind=Kind.REWARD_MODEL, plugin="core")


def test_hooks_that_are_none_are_a_finding():
    assert [one.property for one in check_lifecycle("grpo")] == ["the_plugin_implements_hooks_that_slime_calls"]


def test_every_suite_can_be_imported_by_its_public_name():
    for name in testing.__all__:
        assert properties(getattr(testing, name))
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = testing.Nothing


def test_a_class_without_a_component_says_so():
    with pytest.raises(PluginError, match="TestMine"):
        type("TestMine", (RewardModelSuite,), {}).subject()


def test_every_subclass_has_properties_of_its_own():
    first, second = (type("TestMine", (RewardModelSuite,), {"component": "random"}) for _ in range(2))
    name = "test_rewards_come_in_the_order_of_the_samples"
    assert vars(first)[name] is not vars(second)[name]


def test_the_pytest_plugin_and_the_conformance_module_load_nothing_heavy():
    program = "import sys, slime_testing.pytest_plugin, slime_testing.conformance; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "ray", "numpy", "megatron", "transformers", "hypothesis", "aiohttp"}


def test_discovery_can_be_switched_off(slime_discovery_off):
    assert {plugin.distribution for plugin in installed()} == {"slime-rl"}


def test_the_recorder_has_every_hook_and_writes_down_its_arguments(slime_hook_recorder):
    slime_hook_recorder.slime_after_weight_sync(version=3, options=None)
    assert slime_hook_recorder.calls == [("slime_after_weight_sync", {"version": 3, "options": None})]
    assert slime_hook_recorder.names == ["slime_after_weight_sync"]
    assert all(hasattr(slime_hook_recorder, hook) for hook in LIFECYCLE_HOOKS)


def test_the_fake_engine_is_up(slime_fake_engine):
    assert slime_fake_engine.url.startswith("http://127.0.0.1:")
