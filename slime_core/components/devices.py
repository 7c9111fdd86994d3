"""Devices other than GPUs, which plugins add. A device has the name of its plugin (provisional)."""

from __future__ import annotations

from functools import cache
from typing import Protocol

from slime_core.errors import PluginError
from slime_core.plugins.discovery import installed, unknown_plugin
from slime_core.plugins.loading import load_attribute, next_step
from slime_core.plugins.registry import register
from slime_core.user_code.failures import boundary


class Device(Protocol):
    """The module that a plugin adds with :meth:`~slime_core.plugins.registration.Registration.device`."""

    SERVER: str
    """Module that ``python -m`` starts instead of ``sglang.launch_server``."""

    def prepare_megatron(self) -> None:
        """Called in every process that trains, before it imports Megatron-core; may be called again."""

    def server_arguments(self) -> list[str]:
        """Return the arguments of an inference server, before those of the run."""

    def server_environment(self, *, threads: int, processes: int) -> dict[str, str]:
        """Return the environment variables of an inference server.

        Arguments:
            threads: of each process of the server.
            processes: of the server (its tensor parallel size).
        """


@cache
def find_device(name: str) -> Device:
    """Return the device that the installed plugin ``name`` adds; load no other plugin.

    Raises:
        PluginError: there is no such plugin, it cannot be loaded, or it adds no device.
    """
    plugins = installed()[0]
    registry = register((plugin for plugin in plugins if plugin.name == name), options=False)
    if name not in registry.loaded:
        raise unknown_plugin(name, [plugin.name for plugin in plugins], flag="--device")
    plugin, target = registry.loaded[name].plugin, registry.loaded[name].added.device_target
    if target is None:
        raise PluginError(f"device = {name}: {plugin} adds no device.")
    with boundary(plugin, f"importing {target}", next_step=next_step(plugin), locate=True):
        device: Device = load_attribute(target)
        return device
