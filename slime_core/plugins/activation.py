"""Activates the plugins that a run names and those that it needs without naming them, and no others: the driver's side;
other processes use ``manifest.attach``.

A plugin requires others by entry points of its own distribution (``slime.requires``). A name that exactly one plugin
claims (:mod:`slime_core.plugins.discovery`) activates that plugin: an architecture, a component, a prompt format. So
does a claimed setting in a file, because the ``config.toml`` of a run holds every setting; on the command line a flag
does where its claim ends with ``:activates``. Rows of data never activate a plugin. Reasons are printed at start and
recorded in the manifest. ``--no-plugin`` takes plugins away, by name, in any form in which ``--plugin`` names one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from pydantic import BaseModel

from slime_core.config.load import Choice, Derive, NamedCode
from slime_core.config.settings import core_settings
from slime_core.errors import PluginError
from slime_core.plugins.component import Kind
from slime_core.plugins.discovery import (
    ARCHITECTURE_GROUP,
    CORE,
    FLAG_GROUP,
    KIND_GROUPS,
    Declaration,
    Declared,
    PluginIdentity,
    PluginSource,
    Source,
    check_bounds,
    claimants,
    claimed_by_several,
    claimed_names,
    distribution_of,
    inactive_flags,
    installed,
    required_by,
    resolve,
    scan,
    similar,
)
from slime_core.plugins.loading import FunctionSource, find_function
from slime_core.plugins.manifest import Manifest, record
from slime_core.plugins.registry import Registry, register

Admit = Callable[[Manifest], None]
"""Checks the code that is about to be imported; raises if it must not be."""

Choices = Callable[[Registry], Sequence[Choice]]
"""The components and prompt formats that a run's settings name, which depend on what active plugins offer."""

Code = Callable[[Registry], Sequence[NamedCode]]
"""The functions that options of active plugins name by path."""


@dataclass(frozen=True, slots=True)
class Need:
    """A plugin that a run needs without naming it; prints as ``grpo is active because searchr1 requires it``."""

    plugin: PluginIdentity
    why: str
    tracks: bool = False
    """Its trackers are meant too."""

    def __str__(self) -> str:
        return f"{self.plugin.name} is active because {self.why}"


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
        manifest: to be passed to every actor and stored in every checkpoint.
        by_need: the plugins that the run does not name, and why each is active; printed at start.
        functions: plugin -> option -> the functions that it names by path.
        withheld: names of the plugins that ``--no-plugin`` takes away.
        declared: the installed metadata, as the activation found it.
    """

    registry: Registry
    manifest: Manifest
    by_need: tuple[Need, ...] = ()
    functions: Mapping[str, Mapping[str, tuple[FunctionSource, ...]]] = field(default_factory=dict)
    withheld: frozenset[str] = frozenset()
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
        """Messages about the settings of plugins that are not active; see :func:`~.discovery.inactive_flags`."""
        return inactive_flags(self.registry.plugins, self.declared, withheld=self.withheld)


def table_of(name: str) -> str:
    """Return the name of the plugin ``name``, which is also that of its table in a file: ``grpo`` for
    ``slime-grpo:grpo``, ``./grpo.py`` and ``grpo``."""
    return Path(name).stem if name.endswith(".py") else name.rpartition(":")[2].replace(".", "_")


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

    A plugin that is active for a component, a prompt format or a setting brings no presets: those are for runs that
    name it. It brings its trackers only if a setting activates it that has ``:activates``, as ``--use-wandb`` does, or
    if it offers no component that a run could have meant instead.

    Arguments:
        names: installed plugins (``grpo``, ``slime-grpo:grpo``), files (``./mine.py``) or modules (``my_lab.plugin``);
            repeats are ignored.
        architecture: of the checkpoint's ``config.json``; None: no model is going to be built.
        choices: the components and prompt formats that the settings name; None: none.
        flags: the settings that are given: flag without dashes -> where it is given, the flag itself or a place in a
            file.
        code: the functions that options name by path, which the manifest holds too; None: none.
        without: plugins to go without, named or needed.
        admit: called with the manifest before any of it is imported; None: everything may be.

    Raises:
        PluginError: a plugin cannot be found or loaded, two claim the same name, no plugin fits the architecture, a
            version constraint is violated, or something needs a plugin that ``without`` takes away.
    """
    start = _Start(names, without)
    start.add(start.needed_by_flags(flags or {}), claimed=True)
    registry, manifest = start.load(admit)
    while start.add(start.needed_by_choices(_chosen(choices, registry), registry), claimed=True) | start.add(
        start.needed_by_architecture(architecture, registry)
    ):
        registry, manifest = start.load(admit)
    functions: dict[str, dict[str, tuple[FunctionSource, ...]]] = {}
    for named in code(registry) if code is not None else ():
        source = find_function(named.path, setting=named.flag.removeprefix("--").replace("-", "_"))
        own = functions.setdefault(named.plugin, {})
        own[named.option] = (*own.get(named.option, ()), source)
    if functions:
        sources = [one for own in functions.values() for found in own.values() for one in found]
        # Two functions may share a neighbour.
        neighbours = {code.plugin: code for one in sources for code in one.neighbours.values()}
        manifest = start.record([*(one.code for one in sources), *neighbours.values()])
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
    """The steps of one activation, with one scan of the metadata.

    Starts with ``core``, the named plugins that are not withheld, and what they require.
    """

    def __init__(self, names: Sequence[str], without: Sequence[str]) -> None:
        self.declared = scan()
        self.withheld = frozenset(map(table_of, without))
        self.needs: list[Need] = []
        self._claimed: set[str] = set()
        self._tracking: set[str] = set()
        named = [resolve(name, self.declared) for name in dict.fromkeys(names) if table_of(name) not in self.withheld]
        self._sources = list(dict.fromkeys([PluginSource(CORE), *named]))
        self._check_withheld(names, without)
        self._take_required(claimed=False)

    def _check_withheld(self, names: Sequence[str], without: Sequence[str]) -> None:
        """Raise PluginError if a plugin to go without is ``core``, or is neither installed nor named."""
        known = {*(plugin.name for plugin in installed(self.declared)), *map(table_of, names)} - {CORE.name}
        for name in without:
            if table_of(name) not in known:
                raise PluginError(
                    f"--no-plugin {name}: no such plugin is named or installed{similar(name, known)}, or it is core, "
                    f"which every run has. Accepted are: {', '.join(sorted(known))}."
                )

    def add(self, needs: Iterable[Need], *, claimed: bool = False) -> bool:
        """Add the plugins of ``needs`` that are missing, and what they require; return whether any was missing.

        Arguments:
            claimed: the added plugins bring no presets, and trackers only if the need says so.
        """
        before = len(self._sources)
        for need in needs:
            if need.tracks:
                self._tracking.add(need.plugin.name)
            if all(source.plugin != need.plugin for source in self._sources):
                self._take(need, claimed=claimed)
                self._take_required(claimed=claimed)
        return len(self._sources) > before

    def needed_by_flags(self, flags: Mapping[str, str]) -> Iterator[Need]:
        """Yield the plugins that flags, and settings of a file, activate by themselves."""
        for flag, where in flags.items():
            is_flag = where == f"--{flag}"
            claims = self._activating(flag, in_file=not is_flag)
            found = claimants(claims, self.declared)
            if not is_flag and all(plugin.name in self.withheld for plugin in found):
                continue  # the config.toml of a run holds every setting
            plugin = self._the_one(found, where)
            if plugin is not None:
                activates = any(claim.activates and claim.plugin == plugin.name for claim in claims)
                tracks = activates or not self._offers_components(plugin)
                yield Need(plugin, f"{where} is one of its settings", tracks=tracks)

    def _offers_components(self, plugin: PluginIdentity) -> bool:
        """Return whether the plugin claims a component or an architecture; trackers have no names to claim."""
        groups = (*KIND_GROUPS.values(), ARCHITECTURE_GROUP)
        return any(claim.plugin == plugin.name for group in groups for claim in self.declared.group(group))

    def _activating(self, flag: str, *, in_file: bool) -> list[Declaration]:
        """The claims by which ``flag``, or ``PLUGIN.flag`` of a table ``[PLUGIN]``, activates a plugin."""
        table, _, name = flag.rpartition(".")
        of_flags = self.declared.group(FLAG_GROUP)
        claims = [claim for claim in of_flags if claim.name == name]
        if table:  # a file has the option's own name, which is not always that of its flag
            own = [claim for claim in of_flags if claim.plugin == table]
            # A table that no plugin has may be the core section in which an option was before it moved to a plugin.
            return (own or [claim for claim in claims if claim.activates]) if in_file else []
        is_of_core = name.replace("-", "_") in core_settings()
        return [claim for claim in claims if claim.activates or (in_file and not is_of_core)]

    def needed_by_choices(self, choices: Iterable[Choice], registry: Registry) -> Iterator[Need]:
        """Yield the plugins that claim a chosen component that no active plugin offers."""
        for choice in choices:
            if registry.offers(Kind(choice.kind), choice.name):
                continue
            named, _, component = choice.name.rpartition(":")
            why = f"{choice.where} names {choice.name}"
            if named:
                found = [plugin for plugin in installed(self.declared) if plugin.name == named]
                if not found:
                    raise PluginError(f"{why}, and no plugin {named!r} is installed.\nInstall it, or name another.")
            else:
                found = claimed_names(KIND_GROUPS[choice.kind], self.declared).get(component, [])
            if (plugin := self._the_one(found, f"{choice.name} ({choice.where})")) is not None:
                yield Need(plugin, why)

    def needed_by_architecture(self, architecture: str | None, registry: Registry) -> Iterator[Need]:
        """Yield the plugin that claims the architecture, if no active plugin has a model spec for it."""
        if architecture is None or registry.model_spec(architecture) is not None:
            return
        claimed = claimed_names(ARCHITECTURE_GROUP, self.declared)
        plugin = self._the_one(claimed.get(architecture, []), f"architecture {architecture}")
        if plugin is None:
            ours = distribution_of(ARCHITECTURE_GROUP, architecture) or "the distribution that has it"
            raise PluginError(
                f"no active plugin has a model spec for architecture {architecture}, and no installed one claims "
                f"it. Claimed architectures: {', '.join(claimed) or 'none'}.\n"
                f"Install {ours}, or write a plugin with a model spec for it (docs/models.md) and name it: "
                "--plugin ./mine.py"
            )
        if plugin in registry.plugins:
            raise PluginError(
                f"{plugin} claims architecture {architecture}, but declares no model spec for it.\n"
                f"Report this to the author of {plugin.distribution}, or name another plugin with --plugin."
            )
        yield Need(plugin, f"the model's architecture {architecture} needs it")

    def _the_one(self, found: Sequence[PluginIdentity], what: str) -> PluginIdentity | None:
        """Return the one plugin of ``found`` that is not withheld; None if ``found`` is empty.

        Arguments:
            what: what needs the plugin, for messages.

        Raises:
            PluginError: several are left, or all of ``found`` are withheld.
        """
        left = [plugin for plugin in found if plugin.name not in self.withheld]
        if len(left) > 1:
            raise PluginError(f"{what}: {claimed_by_several(left)}")
        if found and not left:
            raise PluginError(
                f"{what} needs {' or '.join(map(str, found))}, and --no-plugin takes that away.\n"
                "Leave one of the two out."
            )
        return left[0] if left else None

    def load(self, admit: Admit | None) -> tuple[Registry, Manifest]:
        """Check versions and consent, then import the plugins."""
        of_distributions = [source.plugin for source in self._sources if source.source is Source.INSTALLED]
        versions = {plugin.distribution: plugin.version for plugin in of_distributions}
        for plugin in of_distributions:
            check_bounds(plugin, versions)
        manifest = self.record()
        if admit is not None:
            admit(manifest)
        return register(self._sources, claimed=self._claimed, tracking=self._tracking), manifest

    def record(self, code: Sequence[PluginSource] = ()) -> Manifest:
        """Make the manifest of the active plugins and of ``code`` that options name."""
        needs = {need.plugin.name: need.why for need in self.needs}
        return record(self._sources, code, needs=needs, claimed=self._claimed)

    def _take_required(self, *, claimed: bool) -> None:
        """Add the plugins that the active plugins require, directly or not."""
        for source in self._sources:  # grows while it is walked
            for name in required_by(source.plugin, self.declared):
                if any(one.plugin.name == name for one in self._sources):
                    continue
                found = [plugin for plugin in installed(self.declared) if plugin.name == name]
                required = self._the_one(found, str(source.plugin))
                if required is None:
                    raise PluginError(
                        f"{source.plugin} requires plugin {name!r}, and none of that name is installed.\n"
                        f"Reinstall {source.plugin.distribution} with what it depends on."
                    )
                self._take(Need(required, f"{source.plugin.name} requires it"), claimed=claimed)

    def _take(self, need: Need, *, claimed: bool) -> None:
        self._sources.append(PluginSource(need.plugin))
        self.needs.append(need)
        if claimed:
            self._claimed.add(need.plugin.name)
