"""A plugin under test, activated as in a run that names it alone; and what its components and hooks are given.

    activate       the plugin together with ``core``; a PluginError where a run would refuse it
    ActivePlugin   what it offers, its options, its hooks; its JSON activates the same code in another process
    only_core_installed           a block in which no installed plugin but ``core`` is found
    default_run_view              the run of a component under test: the built-in model, every setting at its default
    run_info, learner_info        what lifecycle hooks are given, without a run

Everything here raises what a run would raise, with the same messages.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from pydantic import BaseModel

from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.config.settings import core_values
from slime_core.errors import PluginError
from slime_core.plugins import discovery, hooks
from slime_core.plugins.component import Component, Kind
from slime_core.plugins.construction import construct, refusals, run_view
from slime_core.plugins.contracts import LearnerInfo, Optimizer, Place, RunInfo, RunView
from slime_core.plugins.discovery import CORE, Declared, PluginIdentity, PluginSource, resolve
from slime_core.plugins.hooks import LIFECYCLE_HOOKS
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.plugins.manifest import Manifest, attach, record, source_of
from slime_core.plugins.registry import Registry, register

if TYPE_CHECKING:
    import torch

__all__ = [
    "ActivePlugin",
    "activate",
    "core_sections",
    "default_run_view",
    "hook_parameters",
    "learner_info",
    "only_core_installed",
    "run_info",
]


def default_run_view(options: Mapping[str, BaseModel] | None = None) -> RunView:
    """The view of a run of the built-in model with every setting at its default, for making a component.

    Arguments:
        options: plugin name -> its options object, for ``settings``.
    """
    return run_view(RunConfig(), options, model_folder=ARITHMETIC / "model")


def run_info(folder: Path, *, step: int = 0, num_rollout: int = 2) -> RunInfo:
    """The argument of ``slime_run_start`` and ``slime_run_end``.

    Arguments:
        folder: of the run; has to exist.
        step: training steps done when it started.
        num_rollout: training steps that it will have done at its end.
    """
    return RunInfo(folder, core_values(RunConfig()), step=step, num_rollout=num_rollout)


def learner_info(
    rank: int, world_size: int, *, model: Sequence[torch.nn.Module] = (), optimizer: Optimizer | None = None
) -> LearnerInfo:
    """The argument of the hooks of learner rank ``rank`` of ``world_size``.

    Arguments:
        model: the chunks of the model on this rank; empty: it is not built yet.
        optimizer: None: it is not built yet.
    """
    return LearnerInfo(rank, world_size, core_values(RunConfig()), model=tuple(model), optimizer=optimizer)


@dataclass(frozen=True, slots=True)
class ActivePlugin:
    """A plugin that is active together with ``core``; made by :func:`activate`.

    Example::

        grpo = activate("grpo")
        grpo.offers                                                  # ((Kind.ADVANTAGE_ESTIMATOR, "grpo"), ...)
        estimator = grpo.build(Kind.ADVANTAGE_ESTIMATOR, "grpo")     # as a run makes it

    Arguments:
        source: the plugin, as another process can load it again.
    """

    source: PluginSource
    _registry: Registry

    @property
    def identity(self) -> PluginIdentity:
        """Name, distribution and version of the plugin, for messages."""
        return self.source.plugin

    @property
    def offers(self) -> tuple[tuple[Kind, str], ...]:
        """Kind and name of each of its components, by kind, then name; without those of ``core``."""
        named = ((kind, name) for kind in Kind for name in self._registry.names(kind))
        return tuple((kind, name) for kind, name in named if self._registry.owner(kind, name) == self.identity)

    @property
    def lifecycle(self) -> tuple[str, ...]:
        """The lifecycle hooks that it implements, in the order of a run."""
        found = self._registry.lifecycle
        return tuple(hook for hook in LIFECYCLE_HOOKS if any(one.plugin == self.identity for one in found[hook]))

    def component(self, kind: Kind, name: str) -> Component:
        """The component, its traits filled in; its code is not imported.

        Raises:
            PluginError: neither the plugin nor ``core`` offers it.
        """
        return self._registry.find(kind, name)

    def load(self, kind: Kind, name: str) -> object:
        """The object at the component's target, imported and checked against the contract of its kind.

        Raises:
            PluginError: there is no such component, the import failed, or the target does not fit its contract.
        """
        loaded: object = self._registry.load(kind, name)
        return loaded

    def build(self, kind: Kind, name: str, *, options: BaseModel | None = None, run: RunView | None = None) -> object:
        """An object of the component, made as a run makes it.

        Arguments:
            options: of this plugin; None: their defaults.
            run: None: a run of the built-in model with every setting at its default.

        Raises:
            PluginError: as :meth:`load`, or its constructor failed.
        """
        given = {} if options is None else {self.identity.name: options}
        built: object = construct(self._registry, kind, name, given, run or default_run_view(given))
        return built

    def default_options(self) -> BaseModel | None:
        """The plugin's options with their defaults; None: it has none."""
        options = self._registry.options.get(self.identity.name)
        return None if options is None else options()

    def hooks(self, place: Place, options: BaseModel | None, *, where: str | None = None) -> LifecycleHooks:
        """Its lifecycle hooks, as the run's process at ``place`` calls them.

        Arguments:
            options: the plugin's options, or None where it has none.
            where: the place in words, for messages; None: the place's name.
        """
        return LifecycleHooks(self._registry, place=place, options={self.identity.name: options}, where=where)

    def refusals(self, architecture: str, config: Mapping[str, object]) -> list[str]:
        """The parts of a checkpoint that its model spec does not build, known before the start; empty: none.

        Arguments:
            config: the object of the checkpoint's ``config.json``.

        Raises:
            PluginError: the spec's own check failed.
        """
        return refusals(self._registry, architecture, config)

    def to_json(self, options: BaseModel | None) -> str:
        """The plugin's identity, the digests of its files and its options, for :meth:`from_json` in another process.

        Raises:
            PluginError: its files cannot be found.
        """
        sources = [PluginSource(CORE), *([] if self.identity == CORE else [self.source])]
        found = {
            "manifest": record(sources).to_json(),
            "options": "" if options is None else options.model_dump_json(),
        }
        return json.dumps(found)

    @classmethod
    def from_json(cls, text: str) -> tuple[ActivePlugin, BaseModel | None]:
        """The same plugin, activated in this process, and its options.

        Raises:
            ManifestMismatch: this process has other code than the one that wrote ``text``.
            PluginError: the plugin fails while it is imported.
        """
        given = json.loads(text)
        manifest = Manifest.from_json(given["manifest"])
        active = cls(source_of(manifest.entries[-1]), attach(manifest))
        options = active._registry.options.get(active.identity.name)
        has_options = options is not None and given["options"]
        return active, options.model_validate_json(given["options"]) if options and has_options else None


def activate(plugin: str | PluginSource) -> ActivePlugin:
    """The plugin together with ``core``, imported and registered as in a run that names it.

    Arguments:
        plugin: what a run writes after ``--plugin``, or what :func:`slime_core.harness.find_plugin` returned.

    Raises:
        PluginError: there is no such plugin, or a run would refuse it.
    """
    source = resolve(plugin) if isinstance(plugin, str) else plugin
    core = PluginSource(CORE)
    return ActivePlugin(source, register([core] if source.plugin.name == CORE.name else [core, source]))


def hook_parameters(hook: str) -> tuple[str, ...]:
    """The parameters that a lifecycle hook may take, by name, in the order of its specification.

    Raises:
        PluginError: there is no such hook.
    """
    if hook not in LIFECYCLE_HOOKS:
        raise PluginError(f"there is no lifecycle hook {hook!r}; there are {', '.join(LIFECYCLE_HOOKS)}")
    return tuple(inspect.signature(getattr(hooks, hook)).parameters)


def core_sections() -> Sequence[str]:
    """The sections of the core's settings, whose names no plugin may have."""
    return tuple(RunConfig.model_fields)


@contextmanager
def only_core_installed() -> Iterator[None]:
    """In this block no entry point is found: only ``core``, files and modules can be named as plugins.

    Changes the process while it lasts; not for concurrent use.
    """
    with patch.object(discovery, "scan", Declared):  # without arguments it is an empty scan
        yield
