"""A plugin under test, loaded as in a run that names it alone, and arguments for its components and hooks.

Errors are those of a run, with the same messages.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from pydantic import BaseModel

from slime_core.components.construction import construct, load, refusals, run_view
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.config.settings import core_values
from slime_core.contracts import LearnerInfo, Optimizer, Place, RunInfo, RunView
from slime_core.errors import PluginError
from slime_core.plugins import discovery, hooks
from slime_core.plugins.discovery import CORE, Plugin
from slime_core.plugins.lifecycle import Hooks
from slime_core.plugins.manifest import Manifest, attach, record
from slime_core.plugins.registration import Component, Kind, Registration
from slime_core.plugins.registry import Registry, load_plugins, register

if TYPE_CHECKING:
    import torch

__all__ = [
    "ActivePlugin",
    "activate",
    "core_sections",
    "default_run_view",
    "find_plugin",
    "hook_parameters",
    "installed_plugins",
    "learner_info",
    "only_core_installed",
    "owner_of",
    "run_info",
]


def default_run_view(options: Mapping[str, BaseModel] | None = None) -> RunView:
    """Return the view of a run of the built-in model with every setting at its default, for building a component.

    Arguments:
        options: plugin name -> its options object, for ``settings``.
    """
    return run_view(RunConfig(), options, model_folder=ARITHMETIC / "model")


def run_info(folder: Path, *, step: int = 0, num_rollout: int = 2) -> RunInfo:
    """Return the argument of ``slime_run_start`` and ``slime_run_end``.

    Arguments:
        folder: of the run; it must exist.
        step: training steps done when the run started.
        num_rollout: training steps that the run will have done at its end.
    """
    return RunInfo(folder, core_values(RunConfig()), step=step, num_rollout=num_rollout)


def learner_info(
    rank: int, world_size: int, *, model: Sequence[torch.nn.Module] = (), optimizer: Optimizer | None = None
) -> LearnerInfo:
    """Return the argument of the hooks of learner rank ``rank`` of ``world_size``.

    Arguments:
        model: the chunks of the model on this rank; empty if it is not built yet.
        optimizer: None if it is not built yet.
    """
    return LearnerInfo(rank, world_size, core_values(RunConfig()), model=tuple(model), optimizer=optimizer)


@dataclass(frozen=True, slots=True)
class ActivePlugin:
    """A plugin that takes part together with ``core``. :func:`activate` returns it.

    Example::

        grpo = activate("grpo")
        [component.name for component in grpo.components]            # ["grpo", ...]
        estimator = grpo.build(Kind.ADVANTAGE_ESTIMATOR, "grpo")     # built as in a run
    """

    plugin: Plugin
    _registry: Registry

    @property
    def added(self) -> Registration:
        """Components that its ``slime_register`` added."""
        return self._registry.loaded[self.plugin.name].added

    @property
    def components(self) -> list[Component]:
        """Its components, by kind, then name."""
        return sorted(self.added.components, key=lambda component: (component.kind, component.name))

    @property
    def lifecycle(self) -> tuple[str, ...]:
        """The lifecycle hooks that it implements, in the order of a run."""
        implemented = Hooks(self._registry).implementations
        return tuple(hook for hook in hooks.PLACES if any(name == self.plugin.name for name, _ in implemented(hook)))

    def component(self, kind: Kind, name: str) -> Component:
        """Return the component without importing its target.

        Raises:
            PluginError: neither the plugin nor ``core`` offers it.
        """
        return self._registry.find(kind, name)[1]

    def load(self, kind: Kind, name: str) -> object:
        """Return the target of the component, imported and checked against the contract of its kind.

        Raises:
            PluginError: there is no such component, the import failed, or the target does not fit its contract.
        """
        target: object = load(self._registry, kind, name)
        return target

    def build(self, kind: Kind, name: str, *, options: BaseModel | None = None, run: RunView | None = None) -> object:
        """Build the component as a run does.

        Arguments:
            options: of this plugin; None means their defaults.
            run: None: a run of the built-in model with every setting at its default.

        Raises:
            PluginError: as :meth:`load`, or its constructor failed.
        """
        values = {} if options is None else {self.plugin.name: options}
        component: object = construct(self._registry, kind, name, values, run or default_run_view(values))
        return component

    def default_options(self) -> BaseModel | None:
        """Return the plugin's options with their defaults; None if it has none."""
        options: BaseModel | None = self._registry.options_of(self.plugin.name)
        return options

    def hooks(self, place: Place, options: BaseModel | None = None, *, where: str | None = None) -> Hooks:
        """Return the hooks of the plugin and of ``core``, as the run's process at ``place`` calls them.

        Arguments:
            options: of this plugin; None means their defaults.
            where: the process in words, for messages, such as ``rank 0``; None means the place.
        """
        return Hooks(self._registry, place=place, options={self.plugin.name: options}, where=where)

    def refusals(self, architecture: str, config: Mapping[str, object]) -> list[str]:
        """Return a text for each part of a checkpoint that its model spec does not build, as known before the start.

        Arguments:
            config: the object of the checkpoint's ``config.json``.

        Raises:
            PluginError: the function in the spec's ``unsupported`` failed.
        """
        return refusals(self._registry, architecture, config, RunView())

    def to_json(self, options: BaseModel | None) -> str:
        """Return the plugin, the digest of its files and its options, for :meth:`from_json` in another process.

        Raises:
            PluginError: its files cannot be found.
        """
        values = {
            "manifest": record(self._registry.plugins).to_json(),
            "options": "" if options is None else options.model_dump_json(),
        }
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> tuple[ActivePlugin, BaseModel | None]:
        """Return the same plugin, loaded in this process, and its options.

        Raises:
            ManifestMismatch: this process has other code than the one that wrote ``text``.
            PluginError: the plugin fails while it is imported.
        """
        values = json.loads(text)
        registry = attach(Manifest.from_json(values["manifest"]))
        plugin = registry.plugins[-1]
        options = registry.options.get(plugin.name)
        if options is None or not values["options"]:
            return cls(plugin, registry), None
        return cls(plugin, registry), options.model_validate_json(values["options"])


def activate(plugin: str | Plugin) -> ActivePlugin:
    """Load the plugin together with ``core``, as a run that names it does.

    Arguments:
        plugin: a word of ``--plugin``, or what :func:`find_plugin` returned.

    Raises:
        PluginError: there is no such plugin, or it cannot be loaded.
    """
    plugin = find_plugin(plugin) if isinstance(plugin, str) else plugin
    return ActivePlugin(plugin, register([CORE] if plugin.name == CORE.name else [CORE, plugin]))


def installed_plugins() -> list[Plugin]:
    """Return ``core`` and the installed plugins, sorted by name; imports none."""
    return discovery.installed()[0]


def find_plugin(name: str) -> Plugin:
    """Return the plugin of ``--plugin NAME``: an installed one, a file or a module; imports nothing.

    Raises:
        PluginError: there is no such plugin or file.
    """
    if discovery.is_path(name):
        return discovery.resolve(name)
    plugins = {plugin.name: plugin for plugin in installed_plugins()}
    if name not in plugins:
        raise discovery.unknown_plugin(name, list(plugins))
    return plugins[name]


def owner_of(kind: Kind, name: str, *, prefer: Iterable[str] = ()) -> Plugin:
    """Return the installed plugin that offers the component.

    Arguments:
        prefer: plugins that are meant if several offer it.

    Raises:
        PluginError: no plugin offers it, or several do.
    """
    registry = load_plugins()
    preferred = [plugin for plugin, _ in registry.offers(kind, name) if plugin.name in prefer]
    return preferred[0] if preferred else registry.owner(kind, name)


def hook_parameters(hook: str) -> tuple[str, ...]:
    """Return the names of the parameters that a lifecycle hook may take, in the order of its specification.

    Raises:
        PluginError: there is no such hook.
    """
    if hook not in hooks.PLACES:
        raise PluginError(f"there is no lifecycle hook {hook!r}. Lifecycle hooks are {', '.join(hooks.PLACES)}.")
    return tuple(inspect.signature(getattr(hooks, hook)).parameters)


def core_sections() -> Sequence[str]:
    """Return the names of the sections of the core's settings, which no plugin may have."""
    return tuple(RunConfig.model_fields)


@contextmanager
def only_core_installed() -> Iterator[None]:
    """Hide all installed plugins except ``core`` in the block; files and modules can still be named.

    Changes the process while the block runs; not for concurrent use.
    """
    with patch.object(discovery, "_declared", lambda distribution: ()):
        yield
