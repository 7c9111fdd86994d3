from __future__ import annotations

import sys

import pytest

from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.discovery import CORE, PluginIdentity, check_bounds, installed


@pytest.fixture
def acme(install):
    def make(*dependencies: str) -> PluginIdentity:
        files = {"acme.py": "from slime_core import *\n@hookimpl\ndef slime_register_trackers(): return []\n"}
        install("acme-tree", "2.1", plugins={"acme": "acme"}, dependencies=dependencies, files=files)
        return next(plugin for plugin in installed() if plugin.name == "acme")

    return make


def test_a_core_outside_the_bound_is_named_with_distribution_bound_and_next_step(acme):
    acme("numpy>=1", "slime-rl>=0.2,<0.3")
    with pytest.raises(PluginError, match=r"acme-tree 2\.1 .*slime-rl>=0\.2,<0\.3, .*slime-rl 0\.1\.0 "):
        activate(["acme"])
    assert "acme" not in sys.modules


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("numpy>=1",),
        ("slime-rl>=0.1,<0.2",),
        ("Slime_RL ~= 0.1.0",),
        ("slime-rl>=9; python_version < '3'",),
        ("slime-rl>=9; extra == 'next'",),
        ("slime-rl",),
    ],
)
def test_a_bound_that_holds_or_does_not_apply_is_accepted(acme, lines):
    acme(*lines)
    assert [entry.plugin for entry in activate(["acme"]).manifest.entries] == ["core", "acme"]


def test_a_pre_release_of_the_core_is_within_a_bound_that_it_fits(acme):
    check_bounds(acme("slime-rl>=0.1,<0.2"), {"slime-rl": "0.1.5.dev3"})


def test_every_bound_that_applies_has_to_hold(acme):
    plugin = acme("slime-rl>=0.1", "slime-rl<0.1; python_version > '3'")
    with pytest.raises(PluginError, match=r"acme-tree 2\.1 requires slime-rl<0\.1; python_version > '3', and "):
        check_bounds(plugin, {"slime-rl": "0.1.0"})


def test_the_bound_on_another_active_plugin_has_to_hold_too(acme):
    plugin = acme("slime-rl>=0.1,<0.2", "slime-grpo>=0.2")
    check_bounds(plugin, {"slime-rl": "0.1.0"})
    with pytest.raises(PluginError, match=r" slime-grpo>=0\.2, .*slime-grpo 0\.1\.0 "):
        activate(["acme", "grpo"])


@pytest.mark.parametrize("line", ["slime-rl >> 0.1", "slime-rl<0.2; sys_platform ~= 'linux'"])
def test_a_bound_that_cannot_be_read_is_refused(acme, line):
    with pytest.raises(PluginError, match=rf"'acme' \(acme-tree 2\.1.*['\"]{line}['\"]"):
        check_bounds(acme(line), {"slime-rl": "0.1.0"})


def test_the_core_needs_no_bound_on_itself_and_need_not_be_installed():
    check_bounds(CORE, {CORE.distribution: CORE.version})
