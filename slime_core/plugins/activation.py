"""Activates the plugins that a run names, and no others: the driver's side; other processes use ``manifest.attach``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from pydantic import BaseModel

from slime_core.config.choices import Choice, NamedCode
from slime_core.config.load import Derive
from slime_core.errors import PluginError
from slime_core.plugins.claims import (
    Need,
    Withheld,
    architecture_need,
    claimed_by,
    flag_needs,
    inactive_flags,
    with_required,
)
from slime_core.plugins.component import Kind
from slime_core.plugins.declared import Declared, scan
from slime_core.plugins.discovery import CORE, PluginIdentity, PluginSource, Source, check_bounds, resolve
from slime_core.plugins.loading import FunctionSource, find_function
from slime_core.plugins.manifest import Manifest, record
from slime_core.plugins.registry import Registry, register

Admit = Callable[[Manifest], None]
"""Looks at what is about to be imported, and raises where that may not be."""


Choices = Callable[[Registry], Sequence[Choice]]
"""The components and prompt formats that a run's settings name, which depend on what active plugins offer."""

Code = Callable[[Registry], Sequence[NamedCode]]
"""The functions that options of active plugins name by path."""


class ForSettings(TypedDict):
    """The parts of plugins that are needed to read a run's settings."""

    presets: Mapping[str, tuple[object, str]]
    plugin_options: Mapping[str, type[BaseModel]]
    inactive: Mapping[str, str]
    derive: Derive


@dataclass(frozen=True, slots=True)
class ActivePlugins:
    """The components, hooks and settings of a run's plugins, and the record by which other processes load the same.

    Arguments:
        registry: the components.
        manifest: hand it to every actor, and to every checkpoint.
        by_need: the plugins that the run does not name, and why each is active; print them at start.
        functions: plugin -> option -> the functions that it names by path.
        withheld: what ``--no-plugin`` takes away.
        declared: the installed metadata, as the activation found it.
    """

    registry: Registry
    manifest: Manifest
    by_need: tuple[Need, ...] = ()
    functions: Mapping[str, Mapping[str, tuple[FunctionSource, ...]]] = field(default_factory=dict)
    withheld: Withheld = field(default_factory=Withheld)
    declared: Declared = field(default_factory=Declared)

    @property
    def presets(self) -> Mapping[str, tuple[object, str]]:
        """Flag name -> (value, plugin that sets it)."""
        return self.registry.presets

    @property
    def options(self) -> Mapping[str, type[BaseModel]]:
        """Plugin -> its options class."""
        return self.registry.options

    @property
    def for_settings(self) -> ForSettings:
        """The parts of the plugins that :func:`slime_core.config.load.load` needs."""
        return {
            "presets": self.presets,
            "plugin_options": self.options,
            "inactive": self.inactive,
            "derive": self.registry.derived,
        }

    @property
    def inactive(self) -> Mapping[str, str]:
        """Messages about the settings of plugins that are not active; see :func:`~.claims.inactive_flags`."""
        return inactive_flags(self.registry.plugins, self.declared, withheld=self.withheld)


def activate(
    names: Sequence[str],
    *,
    architecture: str | None = None,
    choices: Choices | None = None,
    flags: Mapping[str, str] | None = None,
    code: Code | None = None,
    without: Sequence[str] = (),
    admit: Admit | None = None,
) -> ActivePlugins:
    """Load ``core``, the named plugins, what they require, and the plugins that claim what the run names and none of
    these offers: components, prompt formats, flags, and the checkpoint's architecture.

    A plugin that is active for a component, a prompt format or a flag brings no presets and no trackers: those are for
    runs that name it.

    Arguments:
        names: installed plugins (``grpo``, ``slime-grpo:grpo``), files (``./mine.py``) or modules (``my_lab.plugin``);
            repeats are ignored.
        architecture: of the checkpoint's ``config.json``; None: no model is going to be built.
        choices: the components and prompt formats that the settings name; None: none.
        flags: the settings that are given, as flags without dashes -> where each stands; see
            :func:`~.claims.flag_needs`.
        code: the functions that options name by path, which the manifest holds too; None: none.
        without: plugins to go without, named or needed.
        admit: called with the manifest before any of it is imported; None: everything may be.

    Raises:
        PluginError: a plugin cannot be found or loaded, two claim the same thing, no plugin fits the architecture, a
            bound does not hold, or something needs what ``without`` takes away.
    """
    start = _Start(Withheld(tuple(without)))
    start.choose(names)
    start.add(flag_needs(flags or {}, withheld=start.withheld, declared=start.declared), claimed=True)
    registry, manifest = start.load(admit)
    while start.add(start.claimed(_chosen(choices, registry), registry), claimed=True) | start.add(
        start.built(architecture, registry)
    ):
        registry, manifest = start.load(admit)
    if architecture is not None and registry.model_spec(architecture) is None:
        raise PluginError(_empty_claim(start.claimant(architecture).plugin, architecture))
    functions: dict[str, dict[str, tuple[FunctionSource, ...]]] = {}
    for named in code(registry) if code is not None else ():
        source = find_function(named.path, setting=named.flag.removeprefix("--").replace("-", "_"))
        own = functions.setdefault(named.plugin, {})
        own[named.option] = (*own.get(named.option, ()), source)
    if functions:
        manifest = start.record([one.code for own in functions.values() for found in own.values() for one in found])
        if admit is not None:
            admit(manifest)
    return ActivePlugins(
        registry, manifest, tuple(start.needs), functions, withheld=start.withheld, declared=start.declared
    )


def _chosen(choices: Choices | None, registry: Registry) -> Iterator[Choice]:
    """The components that the settings name, and the policy losses of the advantage estimators among them."""
    found = list(choices(registry)) if choices is not None else []
    yield from found
    if any(choice.kind == Kind.POLICY_LOSS for choice in found):
        return
    for name in (choice.name for choice in found if choice.kind == Kind.ADVANTAGE_ESTIMATOR):
        if registry.offers(Kind.ADVANTAGE_ESTIMATOR, name):
            loss = registry.traits(Kind.ADVANTAGE_ESTIMATOR, name).policy_loss
            yield Choice(Kind.POLICY_LOSS, loss, f"advantage estimator {name}")


class _Start:
    """The steps of one activation, over one look at the metadata."""

    def __init__(self, withheld: Withheld) -> None:
        self.withheld = withheld
        self.declared = scan()
        self.needs: list[Need] = []
        self._sources: list[PluginSource] = []
        self._claimed: set[str] = set()

    def choose(self, names: Sequence[str]) -> None:
        """Take ``core``, the named plugins that are not withheld, and what they require."""
        gone = [name for name in names if self.withheld.leaves_out(name)]
        found = [resolve(name, self.declared) for name in dict.fromkeys(names) if name not in gone]
        named = [source for source in dict.fromkeys(found) if source.plugin != CORE]
        self.withheld.check(named, self.declared, gone=gone)
        left = [source for source in named if source.plugin not in self.withheld]
        self._sources = [PluginSource(CORE), *left]
        self._take_required(claimed=False)

    def add(self, needs: Iterable[Need], *, claimed: bool = False) -> bool:
        """Take the plugins of ``needs``, and what they require, as far as they are not there; whether any was not.

        Arguments:
            claimed: they, and what they require, bring neither presets nor trackers.
        """
        before = len(self._sources)
        for need in needs:
            if all(source.plugin != need.plugin for source in self._sources):
                self._sources.append(PluginSource(need.plugin))
                self._note(need, claimed)
                self._take_required(claimed=claimed)
        return len(self._sources) > before

    def claimed(self, choices: Iterable[Choice], registry: Registry) -> Iterator[Need]:
        """The plugins that claim what is chosen and not offered."""
        for choice in choices:
            if not registry.offers(Kind(choice.kind), choice.name):
                need = claimed_by(choice, withheld=self.withheld, declared=self.declared)
                if need is not None:
                    yield need

    def built(self, architecture: str | None, registry: Registry) -> Iterator[Need]:
        """The plugin that claims the architecture, where no active one has a model spec for it."""
        if architecture is not None and registry.model_spec(architecture) is None:
            yield self.claimant(architecture)

    def claimant(self, architecture: str) -> Need:
        """The plugin that claims ``architecture``."""
        return architecture_need(architecture, withheld=self.withheld, declared=self.declared)

    def load(self, admit: Admit | None) -> tuple[Registry, Manifest]:
        """Check what can be checked from outside, then import."""
        sources = self._sources
        of_distributions = [source.plugin for source in sources if source.source is Source.INSTALLED]
        versions = {plugin.distribution: plugin.version for plugin in of_distributions}
        for plugin in of_distributions:
            check_bounds(plugin, versions)
        manifest = self.record()
        if admit is not None:
            admit(manifest)
        return register(sources, claimed=self._claimed), manifest

    def record(self, code: Sequence[PluginSource] = ()) -> Manifest:
        """The manifest of what is active, and of ``code`` that options name."""
        needs = {need.plugin.name: need.why for need in self.needs}
        return record(self._sources, code, needs=needs, claimed=self._claimed)

    def _take_required(self, *, claimed: bool) -> None:
        self._sources, needs = with_required(self._sources, withheld=self.withheld, declared=self.declared)
        for need in needs:
            self._note(need, claimed)

    def _note(self, need: Need, claimed: bool) -> None:
        self.needs.append(need)
        if claimed:
            self._claimed.add(need.plugin.name)


def _empty_claim(plugin: PluginIdentity, architecture: str) -> str:
    return (
        f"{plugin} claims architecture {architecture}, but declares no model spec for it.\n"
        f"Report this to the author of {plugin.distribution}, or name another plugin with --plugin."
    )
