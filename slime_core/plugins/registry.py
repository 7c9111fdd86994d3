"""Activates the plugins that a run names, and no others: the driver's side; other processes use ``manifest.attach``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from slime_core.errors import PluginError
from slime_core.plugins.bounds import check_bounds
from slime_core.plugins.declared import scan
from slime_core.plugins.discovery import COMPAT, CORE, PluginIdentity, PluginSource, Source, installed, resolve
from slime_core.plugins.functions import FunctionSource, find_function
from slime_core.plugins.manifest import Manifest, record
from slime_core.plugins.registration import Registry, register
from slime_core.plugins.requirements import Need, Withheld, architecture_source, with_required

__all__ = ["ActivePlugins", "Admit", "Need", "Registry", "activate"]

Admit = Callable[[Manifest], None]
"""Looks at what is about to be imported, and raises where that may not be."""


@dataclass(frozen=True, slots=True)
class ActivePlugins:
    """What a run's plugins offer, and the record that makes other processes load the same.

    Arguments:
        registry: the components.
        manifest: hand it to every actor, and to every checkpoint.
        by_need: the plugins that the run does not name, and why each is there; print them at start.
        functions: setting -> the functions that it names by path.
    """

    registry: Registry
    manifest: Manifest
    by_need: tuple[Need, ...] = ()
    functions: Mapping[str, tuple[FunctionSource, ...]] = field(default_factory=dict)

    @property
    def presets(self) -> Mapping[str, tuple[object, str]]:
        """Flag name -> (value, plugin that sets it)."""
        return self.registry.presets

    @property
    def options(self) -> Mapping[str, type[BaseModel]]:
        """Plugin -> its options class."""
        return self.registry.options


def activate(
    names: Sequence[str],
    *,
    architecture: str | None = None,
    paths: Mapping[str, Sequence[str]] | None = None,
    without: Sequence[str] = (),
    admit: Admit | None = None,
) -> ActivePlugins:
    """Load ``core``, the named plugins, what they require and, where needed, the one that claims the checkpoint's
    architecture.

    Arguments:
        names: installed plugins (``grpo``, ``slime-grpo:grpo``), files (``./mine.py``) or modules (``my_lab.plugin``);
            repeats are ignored.
        architecture: of the checkpoint's ``config.json``; None: no model is going to be built.
        paths: setting -> functions that it names by path; any of them activates plugin ``compat``.
        without: plugins to go without, named or needed.
        admit: called with the manifest before any of it is imported; None: everything may be.

    Raises:
        PluginError: a plugin cannot be found or loaded, two claim the same thing, no plugin fits the architecture, a
            bound does not hold, or something needs what ``without`` takes away.
    """
    functions = {
        setting: tuple(find_function(path, setting=setting) for path in found)
        for setting, found in (paths or {}).items()
    }
    start = _Start(Withheld(tuple(without)), [function.code for found in functions.values() for function in found])
    sources, needs = start.choose([*names, *([COMPAT] if functions else [])])
    registry, manifest = start.load(sources, needs, admit)
    if architecture is not None and registry.model_spec(architecture) is None:
        needed = start.claimant(architecture)
        if needed not in sources:
            why = Need(needed.plugin, f"the model's architecture {architecture} needs it")
            sources, more = start.with_required([*sources, needed])
            needs = [*needs, why, *more]
            registry, manifest = start.load(sources, needs, admit)
        if registry.model_spec(architecture) is None:
            raise PluginError(_empty_claim(needed.plugin, architecture))
    return ActivePlugins(registry, manifest, by_need=tuple(needs), functions=functions)


class _Start:
    """The steps of one activation, over one look at the metadata."""

    def __init__(self, withheld: Withheld, code: Sequence[PluginSource]) -> None:
        self._withheld, self._code, self._declared = withheld, code, scan()

    def choose(self, names: Sequence[str]) -> tuple[list[PluginSource], list[Need]]:
        """``core``, the named plugins that are not withheld, and what they require."""
        if self._code:
            self._refuse_functions()
        found = [resolve(name, self._declared) for name in dict.fromkeys(names)]
        named = [source for source in dict.fromkeys(found) if source.plugin != CORE]
        self._withheld.check(named, self._declared)
        left = [source for source in named if source.plugin not in self._withheld]
        return self.with_required([PluginSource(CORE), *left])

    def _refuse_functions(self) -> None:
        """Return if the plugin that runs functions by path is there.

        Raises:
            PluginError: it is not installed, or withheld.
        """
        settings = " and ".join(sorted({f"--{source.plugin.name.replace('_', '-')}" for source in self._code}))
        found = [plugin for plugin in installed(self._declared) if plugin.name == COMPAT]
        if not found:
            raise PluginError(
                f"plugin {COMPAT!r} runs the functions that {settings} names, and it is not installed.\n"
                f"Install the distribution slime-compat, or leave out {settings}."
            )
        if any(plugin in self._withheld for plugin in found):
            raise PluginError(
                f"plugin {COMPAT!r} runs the functions that {settings} names, and --no-plugin takes it away.\n"
                f"Leave out --no-plugin {COMPAT}, or {settings}."
            )

    def with_required(self, sources: Sequence[PluginSource]) -> tuple[list[PluginSource], list[Need]]:
        """``sources`` and what they require, and why each of the latter is there."""
        return with_required(sources, withheld=self._withheld, declared=self._declared)

    def claimant(self, architecture: str) -> PluginSource:
        """The plugin that claims ``architecture``."""
        return architecture_source(architecture, withheld=self._withheld, declared=self._declared)

    def load(
        self, sources: Sequence[PluginSource], needs: Sequence[Need], admit: Admit | None
    ) -> tuple[Registry, Manifest]:
        """Check what can be checked from outside, then import."""
        of_distributions = [source.plugin for source in sources if source.source is Source.INSTALLED]
        versions = {plugin.distribution: plugin.version for plugin in of_distributions}
        for plugin in of_distributions:
            check_bounds(plugin, versions)
        manifest = record(sources, self._code, needs={need.plugin.name: need.why for need in needs})
        if admit is not None:
            admit(manifest)
        return register(sources), manifest


def _empty_claim(plugin: PluginIdentity, architecture: str) -> str:
    return (
        f"{plugin} claims architecture {architecture}, but declares no model spec for it.\n"
        f"Report this to the author of {plugin.distribution}, or name another plugin with --plugin."
    )
