"""Devices that plugins add, and runs that choose one."""

from __future__ import annotations

import pytest

from slime_core.cli.activation import activate_peeked
from slime_core.components.devices import find_device
from slime_core.config.load import peek
from slime_core.errors import PluginError
from tests.plugin_files import Site


def test_a_plugin_takes_part_if_its_device_is_chosen() -> None:
    plugins = activate_peeked(peek(["--device", "cpu"]), builds_model=False).registry.plugins
    assert "cpu" in [plugin.name for plugin in plugins]


@pytest.mark.parametrize("name", ["tpu", "grpo"])
def test_a_device_that_no_plugin_adds_is_an_error(name: str) -> None:
    with pytest.raises(PluginError, match=name):
        find_device(name)


def test_a_device_whose_module_is_missing_names_its_plugin(site: Site) -> None:
    site.install("acme", '@hookimpl\ndef slime_register(add: Registration) -> None:\n    add.device("acme_p.none")\n')
    with pytest.raises(PluginError, match="acme"):
        find_device("acme")
