"""PUBLIC. Building blocks of test kits, for slime-testing and for your own tests.

    plugins        activate a plugin as a run does: its components, options and hooks; again in another process
    engines        a real SGLang server, and the client with which a run calls engines, real or fake
                   (``slime_testing.fake_engine``)
    megatron       Megatron in the process of a test; a small shard and its micro-batches, as hooks on ranks get them
    learner        one optimizer step on given samples, on real learner ranks

The names below are imported from here; ``engines``, ``megatron`` and ``learner`` by their modules, because they load
aiohttp, numpy or torch.

Also of the core: ``installed`` and ``find_plugin`` (installed plugins, and the plugin of ``--plugin NAME``),
``check_bounds`` (version constraints of a plugin), ``editable_source``, ``boundary`` (a plugin's
failure as a PluginError that names it), ``import_plugin`` and ``check_hooks`` (the first two steps of ``activate``
alone, for kits that report on each step), ``LIFECYCLE_HOOKS`` with ``STATE`` and ``RESTORE``, ``LifecycleHooks``.
"""

from slime_core.harness.plugins import (
    ActivePlugin,
    activate,
    core_sections,
    default_run_view,
    hook_parameters,
    learner_info,
    only_core_installed,
    run_info,
)
from slime_core.plugins.discovery import (
    CORE,
    PLUGIN_GROUP,
    PluginIdentity,
    PluginSource,
    Source,
    check_bounds,
    installed,
)
from slime_core.plugins.discovery import resolve as find_plugin
from slime_core.plugins.hooks import LIFECYCLE_HOOKS, RESTORE, STATE
from slime_core.plugins.lifecycle import LifecycleHooks, PlaceStates
from slime_core.plugins.loading import boundary
from slime_core.plugins.loading import load_plugin as import_plugin
from slime_core.plugins.manifest import editable_source
from slime_core.plugins.validation import check_hooks

__all__ = [
    "CORE",
    "LIFECYCLE_HOOKS",
    "PLUGIN_GROUP",
    "RESTORE",
    "STATE",
    "ActivePlugin",
    "LifecycleHooks",
    "PlaceStates",
    "PluginIdentity",
    "PluginSource",
    "Source",
    "activate",
    "boundary",
    "check_bounds",
    "check_hooks",
    "core_sections",
    "default_run_view",
    "editable_source",
    "find_plugin",
    "hook_parameters",
    "import_plugin",
    "installed",
    "learner_info",
    "only_core_installed",
    "run_info",
]
