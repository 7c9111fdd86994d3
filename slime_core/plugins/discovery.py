"""Finds the installed plugins and their claims in the metadata of distributions; imports no plugin.

Entry points in slime's groups:

    slime             grpo = "slime_grpo.plugin"         a plugin, and the module that holds its hooks
    slime.models      Qwen3ForCausalLM = "models"        checkpoints of this architecture need that plugin
    slime.requires    grpo = "searchr1"                  plugin searchr1 of this distribution requires plugin grpo
    slime.commands    "plugins.new" = "package.module:function"    the command slime plugins new
    slime.corrections tis = "offpolicy"                  a run that names correction tis activates plugin offpolicy
    slime.flags       tis-clip = "offpolicy"             the flag --tis-clip is an option of plugin offpolicy; a file
                                                         that gives it activates the plugin
    slime.flags       buffer-data = "datasets:activates" giving --buffer-data activates plugin datasets

:data:`KIND_GROUPS` lists the groups of component names, :data:`OUR_DISTRIBUTIONS` what our own distributions have, for
messages where such a distribution is not installed; a test compares it with their claims. A claim counts only for a
plugin of the same distribution. So installing a distribution cannot make a run load, or fail to load, the plugin of
another distribution. Of two copies of a distribution on the path only the first counts, as in an import.

Where two distributions declare one plugin name, a run writes ``distribution:name``. It may also name a file
(``./mine.py``) or a module (``my_lab.plugin``) that no distribution declares.

A distribution's own ``Requires-Dist`` is evaluated against the versions that the plugin runs with. An installer checks
these once, and not at all with ``--no-deps``, after a later upgrade of the core alone, or for a distribution on
the path that was not installed.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import importlib_metadata as metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slime_core.config.options import KIND_NAMED_BY
from slime_core.errors import PluginError
from slime_core.plugins.component import Kind

OUR_DISTRIBUTIONS: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(
    Path(__file__).with_name("our_distributions.json").read_text(encoding="utf-8")
)
"""Distribution -> group of its entry points -> their names."""

PLUGIN_GROUP = "slime"
ARCHITECTURE_GROUP = "slime.models"
REQUIRES_GROUP = "slime.requires"
COMMAND_GROUP = "slime.commands"
FLAG_GROUP = "slime.flags"

KIND_GROUPS: Mapping[str, str] = {
    kind: f"slime.{kind.plural}" for kind in Kind if kind not in (Kind.MODEL_SPEC, Kind.TRACKER)
}
"""Kind of component -> the group in which distributions claim the names of such components:
``slime.advantage_estimators``. A run names neither model specs nor trackers."""

LOCAL_MODULE = "slime_local_"
"""Start of the module name of a single-file plugin; the first characters of the file's hash follow."""

_BROKEN = (OSError, ValueError, TypeError, AttributeError, LookupError, metadata.PackageNotFoundError)
"""What ``importlib_metadata`` raises on files that are cut short, in another encoding, no metadata at all, or under
another name than that of their folder."""


# --- What distributions declare ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Declaration:
    """One entry point: ``group``, ``name = value``, and the distribution that has it.

    In the groups of claims ``name`` is what the distribution says that one of its plugins has: a component, a
    checkpoint's architecture, a prompt format, a flag.
    """

    group: str
    name: str
    value: str
    distribution: str
    version: str

    @property
    def plugin(self) -> str:
        """The plugin that a claim is made for."""
        return self.value.partition(":")[0]

    @property
    def activates(self) -> bool:
        """Whether giving the claimed flag activates the plugin; claims of other groups always do."""
        return self.value.endswith(":activates")


@dataclass(frozen=True, slots=True)
class Declared:
    """Everything that is declared for slime.

    Arguments:
        entries: unordered.
        unreadable: one line for each distribution that seems to declare something but cannot be read.
    """

    entries: tuple[Declaration, ...] = ()
    unreadable: tuple[str, ...] = ()

    def group(self, name: str) -> list[Declaration]:
        """The entries of one group, by name, then distribution."""
        found = [entry for entry in self.entries if entry.group == name]
        return sorted(found, key=lambda entry: (entry.name, entry.distribution, entry.value))


def scan() -> Declared:
    """Read the declarations of all distributions on ``sys.path``."""
    entries: list[Declaration] = []
    unreadable: list[str] = []
    for distribution in metadata.Distribution.discover():
        try:
            if "[slime" in (distribution.read_text("entry_points.txt") or ""):
                entries += _entries(distribution)
        except _BROKEN as problem:
            where = distribution.locate_file("")
            unreadable.append(f"a distribution in {where} ({type(problem).__name__}: {problem})")
    return Declared(tuple(entries), tuple(unreadable))


def _entries(distribution: metadata.Distribution) -> Iterator[Declaration]:
    about = _about(distribution)
    name, version = _field("Name", about), _field("Version", about)
    first = metadata.Distribution.from_name(name)
    if first.locate_file("") != distribution.locate_file("") or _about(first) != about:
        return  # an import would find another copy of it
    for point in distribution.entry_points:
        if point.group == PLUGIN_GROUP or point.group.startswith(f"{PLUGIN_GROUP}."):
            yield Declaration(point.group, point.name, point.value, name, version)


def _about(distribution: metadata.Distribution) -> str:
    """The headers of its METADATA, without the description that follows them."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    return text.partition("\n\n")[0]


def _field(name: str, about: str) -> str:
    # The parser of importlib_metadata takes several times as long, and hundreds of plugins may be installed.
    found = re.search(rf"^{name}:[ \t]*(\S.*?)[ \t]*$", about, flags=re.MULTILINE | re.IGNORECASE)
    if found is None:
        raise ValueError(f"its METADATA has no {name}")
    return found[1]


def entry_point_of(distribution: str, group: str, name: str) -> str:
    """The module, or ``module:attribute``, that an entry point of an installed distribution names.

    Raises:
        PluginError: the distribution is not installed, or does not declare the entry point.
    """
    for one in metadata.distributions(name=distribution):
        for point in one.entry_points:
            if (point.group, point.name) == (group, name):
                return str(point.value)
    raise PluginError(
        f"{distribution} is not installed here: no metadata of it declares {name!r} in group {group!r}.\n"
        f"Install {distribution} into this environment, from its wheel or with pip install -e of its repository."
    )


# --- Plugins ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PluginIdentity:
    """The identity of a plugin, for messages and records.

    Example: ``PluginIdentity("grpo", "slime-grpo", "0.1.0", "slime_grpo.plugin")`` prints as
    ``plugin 'grpo' (slime-grpo 0.1.0, entry point slime_grpo.plugin)``.

    Arguments:
        name: what a run writes after ``--plugin``.
        distribution: the installed distribution, or the path or module that the run named.
        version: the distribution's version; for local code, the start of its content hash.
        entry_point: the module, or ``module:attribute``, that holds the hooks.
    """

    name: str
    distribution: str
    version: str
    entry_point: str

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.distribution} {self.version}, entry point {self.entry_point})"

    def is_of(self, distribution: str) -> bool:
        """Whether the distribution of that name, in any spelling, has the plugin."""
        return canonicalize_name(self.distribution) == canonicalize_name(distribution)


CORE = PluginIdentity("core", "slime-rl", "0.1.0", entry_point_of("slime-rl", PLUGIN_GROUP, "core"))
"""slime itself, whose entry point says where its hooks are; a test compares the version with ``pyproject.toml``."""


class Source(StrEnum):
    """The origin of a plugin's code: an installed distribution, an importable module, or one file's bytes."""

    INSTALLED = "installed"
    MODULE = "module"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class PluginSource:
    """A plugin that is about to be imported; ``content`` holds the bytes of a single-file plugin, ``neighbours`` the
    modules that it imports from its folder: dotted name, path and bytes of each."""

    plugin: PluginIdentity
    source: Source = Source.INSTALLED
    content: bytes = b""
    neighbours: tuple[tuple[str, str, bytes], ...] = ()


def installed(declared: Declared | None = None) -> list[PluginIdentity]:
    """Return ``core`` and every plugin that installed metadata declares, sorted by name; names may repeat.

    Arguments:
        declared: an earlier scan; None: scan now.
    """
    found = [
        PluginIdentity(entry.name, entry.distribution, entry.version, entry.value)
        for entry in (declared or scan()).group(PLUGIN_GROUP)
        if entry.value != CORE.entry_point
    ]
    return sorted([CORE, *found], key=lambda plugin: (plugin.name, plugin.distribution))


def resolve(name: str, declared: Declared | None = None) -> PluginSource:
    """Find the plugin of ``--plugin NAME``: an installed one (``name`` or ``distribution:name``), a ``.py`` file, or a
    dotted module; imports nothing.

    Raises:
        PluginError: no such plugin or file, or two distributions declare the name.
    """
    if name.endswith(".py"):
        return local_file(read_code(Path(name), flag=f"--plugin {Path(name)}"), path=os.fspath(Path(name)))
    declared = declared or scan()
    distribution, colon, plugin = name.rpartition(":")
    candidates = [one for one in installed(declared) if not colon or one.is_of(distribution)]
    found = [one for one in candidates if one.name == plugin]
    if len(found) > 1:
        raise PluginError(f"--plugin {name}: {claimed_by_several(found)}")
    if found:
        return PluginSource(found[0])
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return PluginSource(module_identity(name, name=name.replace(".", "_")), Source.MODULE)
    names = sorted({f"{one.distribution}:{one.name}" if colon else one.name for one in candidates})
    known = f"Installed plugins: {', '.join(names)}" if names else f"{distribution!r} is no distribution with a plugin"
    broken = f" Could not read: {'; '.join(declared.unreadable)}." if declared.unreadable else ""
    raise PluginError(
        f"--plugin {name}: no installed plugin is called that{similar(name, names)}. "
        f"{known}.{broken}\n"
        f"Install {distribution_of(PLUGIN_GROUP, name) or 'the distribution that has it'}, or give a file "
        "(./mine.py) or a dotted module (my_lab.plugin). --no-plugin leaves out one that a file or a run names."
    )


def claimed_by_several(found: Sequence[PluginIdentity]) -> str:
    """Return the end of a message about a name that several plugins have: how to name the plugin that is meant."""
    forms = " or ".join(f"--plugin {plugin.distribution}:{plugin.name}" for plugin in found)
    return f"{' and '.join(map(str, found))} claim one name.\nName the one that is meant: {forms}."


def read_code(path: Path, *, flag: str) -> bytes:
    """Read the bytes of a Python file that a run names.

    Arguments:
        flag: how the run names it, for messages.

    Raises:
        PluginError: there is no such file, or it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as problem:
        message = f"{flag}: cannot be read in {Path.cwd()} ({problem.strerror}); give a Python file that can."
        raise PluginError(message) from problem


def local_file(content: bytes, *, path: str) -> PluginSource:
    """A single-file plugin of these bytes; its module name is made from their hash, the same in every process."""
    return PluginSource(local_identity(hashlib.sha256(content).hexdigest(), path=path), Source.FILE, content)


def local_identity(digest: str, *, path: str) -> PluginIdentity:
    """The identity of a single-file plugin whose content has this SHA-256."""
    return PluginIdentity(Path(path).stem, path, f"sha256:{digest[:12]}", f"{LOCAL_MODULE}{digest[:16]}")


def module_identity(module: str, *, name: str) -> PluginIdentity:
    """The identity of a module that no distribution declares."""
    return PluginIdentity(name, f"module {module}", "(local)", module)


def similar(name: str, names: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` where one of ``names`` is close to ``name``, else nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_bounds(plugin: PluginIdentity, versions: Mapping[str, str]) -> None:
    """Raise PluginError if a version constraint of the plugin's distribution is violated.

    Arguments:
        plugin: of an installed distribution.
        versions: distribution -> version, of ``slime-rl`` and of the other active plugins.

    Raises:
        PluginError: a version violates a constraint, or a requirement of the distribution cannot be read.
    """
    found = {canonicalize_name(name): (name, version) for name, version in versions.items()}
    try:
        lines = metadata.requires(plugin.distribution) or []
    except metadata.PackageNotFoundError:  # core, where it was not installed
        return
    for line in lines:
        try:
            wanted = Requirement(line)
            name, version = found.get(canonicalize_name(wanted.name), ("", ""))
            applies = bool(name) and (wanted.marker is None or wanted.marker.evaluate({"extra": ""}))
            fits = not applies or wanted.specifier.contains(version, prereleases=True)
        except ValueError as mistake:  # packaging's errors are, those of a marker that cannot be evaluated too
            raise PluginError(
                f"{plugin}: its metadata requires {line!r}, which is not a requirement: "
                f"{str(mistake).splitlines()[0]}.\n"
                f"Report it to the author of {plugin.distribution}, or run without --plugin {plugin.name}."
            ) from None
        if not fits:
            raise PluginError(
                f"{plugin}: {plugin.distribution} {plugin.version} requires {line}, and {name} {version} is installed."
                f"\nInstall a version of {plugin.distribution} that was made for {name} {version}, or a {name} within "
                f"the bound: pip install '{wanted.name}{wanted.specifier}'"
            )


# --- What they claim --------------------------------------------------------------------------------------------------


def distribution_of(group: str, name: str) -> str | None:
    """Return our distribution that has ``name`` in a group of entry points, or None.

    Example: ``distribution_of("slime.models", "LlamaForCausalLM")`` is ``"slime-models"``.
    """
    return next((one for one, groups in OUR_DISTRIBUTIONS.items() if name in groups.get(group, ())), None)


def is_for(claim: Declaration, plugin: PluginIdentity) -> bool:
    """Return whether the distribution of ``plugin`` itself makes the claim for it; other claims do not count."""
    return claim.plugin == plugin.name and plugin.is_of(claim.distribution)


def claimants(claims: Iterable[Declaration], declared: Declared) -> list[PluginIdentity]:
    """Return the plugins that the claims are made for, by name, then distribution."""
    wanted = list(claims)
    return [plugin for plugin in installed(declared) if any(is_for(claim, plugin) for claim in wanted)]


def claimed_names(group: str, declared: Declared) -> dict[str, list[PluginIdentity]]:
    """Name -> the plugins that claim it in ``group``, sorted."""
    claims: dict[str, list[Declaration]] = {}
    for claim in declared.group(group):
        claims.setdefault(claim.name, []).append(claim)
    found = {name: claimants(own, declared) for name, own in claims.items()}
    return {name: plugins for name, plugins in found.items() if plugins}


def claims_for(plugin: PluginIdentity, declared: Declared) -> dict[str, list[Declaration]]:
    """Return group -> the claims that the distribution of ``plugin`` makes for it, by name; only groups with claims."""
    groups = (ARCHITECTURE_GROUP, *KIND_GROUPS.values(), FLAG_GROUP)
    found = {group: [claim for claim in declared.group(group) if is_for(claim, plugin)] for group in groups}
    return {group: claims for group, claims in found.items() if claims}


def required_by(plugin: PluginIdentity, declared: Declared) -> list[str]:
    """Return the names of the plugins that ``plugin`` requires, sorted."""
    return [entry.name for entry in declared.group(REQUIRES_GROUP) if is_for(entry, plugin)]


def activated_by(claims: Mapping[str, Sequence[Declaration]]) -> Iterator[str]:
    """Yield the settings that activate the plugin of these claims: ``--corrections tis, icepop``, ``--buffer-data``."""
    flags = [claim.name for claim in claims.get(FLAG_GROUP, ()) if claim.activates]
    for setting, kind in KIND_NAMED_BY.items():
        names = [claim.name for claim in claims.get(KIND_GROUPS[kind], ())]
        if names := [name for name in names if name.replace("_", "-") not in flags]:  # a flag of its own chooses it
            yield f"--{setting.replace('_', '-')} {', '.join(names)}"
    if names := [claim.name for claim in claims.get(KIND_GROUPS[Kind.PROMPT_FORMAT], ())]:
        yield f"prompt files of format {', '.join(names)}"
    yield from (f"--{name}" for name in flags)


def how_to_get(kind: str, name: str) -> str | None:
    """Return the next step for a component or prompt format that no active plugin offers; None if no plugin is known.

    Example: ``Install slime-rewards, which has it``.
    """
    if (group := KIND_GROUPS.get(kind)) is None:
        return None
    if plugins := claimed_names(group, scan()).get(name):
        return f"Add --plugin {plugins[0].name}: {plugins[0]} has it"
    distribution = distribution_of(group, name)
    return None if distribution is None else f"Install {distribution}, which has it"


def inactive_flags(
    active: Collection[PluginIdentity], declared: Declared, *, withheld: Collection[str] = ()
) -> dict[str, str]:
    """Return messages about the settings of plugins that are not ``active``. The key is the flag without dashes, or
    ``[plugin]`` for a table; the message names the plugin, its distribution and how to activate it. The message for the
    table of a withheld plugin is empty.

    Arguments:
        withheld: names of the plugins that ``--no-plugin`` takes away.
    """
    found = {}
    for distribution, groups in OUR_DISTRIBUTIONS.items():
        for flag in groups.get(FLAG_GROUP, ()):
            found[flag] = f"a setting of {distribution}, which is not installed; install it"
    for plugin in installed(declared):
        claims = claims_for(plugin, declared)
        if plugin not in active and claims:
            reported = f"{plugin}, which is not active; add --plugin {plugin.name}, or leave this out"
            found[f"[{plugin.name}]"] = f"settings of {reported}"
            found |= {claim.name: f"a setting of {reported}" for claim in claims.get(FLAG_GROUP, ())}
    for plugin in active:
        for claim in claims_for(plugin, declared).get(FLAG_GROUP, ()):
            found.pop(claim.name, None)
    return found | {f"[{table}]": "" for table in withheld}
