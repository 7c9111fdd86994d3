"""Parts of test kits, for the suites and for your tests. They import private modules of the core.

    plugins        load a plugin as a run does: its components, options and hooks; load it again in another process
    engines        a real SGLang server, and the client with which a run calls engines, real or fake
                   (``slime_testing.fake_engine``)
    megatron       Megatron in the process of a test; a small shard and its micro-batches, as hooks on ranks get them
    learner        one optimizer step on your samples, on real learner ranks

The names below are imported from here; ``engines``, ``megatron`` and ``learner`` by their modules, because they load
aiohttp, numpy or torch.
"""

from slime_core.plugins.discovery import CORE, GROUP, Plugin, Source
from slime_core.plugins.hooks import PLACES
from slime_core.plugins.lifecycle import RESTORE, STATE, Hooks, PlaceStates
from slime_core.plugins.loading import import_plugin
from slime_core.plugins.registration import Component, Kind
from slime_testing.harness.plugins import (
    ActivePlugin,
    activate,
    core_sections,
    default_run_view,
    find_plugin,
    hook_parameters,
    installed_plugins,
    learner_info,
    only_core_installed,
    owner_of,
    run_info,
)

__all__ = [
    "CORE",
    "GROUP",
    "PLACES",
    "RESTORE",
    "STATE",
    "ActivePlugin",
    "Component",
    "Hooks",
    "Kind",
    "PlaceStates",
    "Plugin",
    "Source",
    "activate",
    "core_sections",
    "default_run_view",
    "find_plugin",
    "hook_parameters",
    "import_plugin",
    "installed_plugins",
    "learner_info",
    "only_core_installed",
    "owner_of",
    "run_info",
]
