"""Which plugins are installed, from metadata alone: nothing here imports a plugin.

What distributions declare is read by :mod:`slime_core.plugins.declared`. Where two of them claim one plugin name, a run
writes ``distribution:name``. It may also name a file (``./mine.py``) or a module (``my_lab.plugin``) that no
distribution declares.

A distribution's own ``Requires-Dist`` is evaluated against the versions that the plugin runs with. An installer checks
these once, and not at all with ``--no-deps``, after a later upgrade of the core alone, or for what stands on the path
without having been installed.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import importlib_metadata as metadata
from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement

from slime_core.config.options import KIND_NAMED_BY
from slime_core.errors import PluginError
from slime_core.plugins.declared import (
    ARCHITECTURE_GROUP,
    FLAG_GROUP,
    KIND_GROUPS,
    PLUGIN_GROUP,
    REQUIRES_GROUP,
    Declaration,
    Declared,
    canonical,
    distribution_of,
    entry_point_of,
    required_lines,
    scan,
)

LOCAL_MODULE = "slime_local_"
"""Start of the module name of a single-file plugin; the first characters of the file's hash follow."""

MANY_WAYS = 4
"""Ways to activate a plugin that a message lists."""


@dataclass(frozen=True, slots=True)
class PluginIdentity:
    """Who a plugin is, for messages and records.

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


CORE = PluginIdentity("core", "slime-rl", "0.1.0", entry_point_of("slime-rl", PLUGIN_GROUP, "core"))
"""slime itself, whose entry point says where its hooks are; a test compares the version with ``pyproject.toml``."""


class UnknownPlugin(PluginError):
    """No plugin is called ``name``, or the file of that name does not exist."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, name)
        self.name = name

    def __str__(self) -> str:
        return str(self.args[0])


class Source(StrEnum):
    """The origin of a plugin's code: an installed distribution, an importable module, or one file's bytes."""

    INSTALLED = "installed"
    MODULE = "module"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class PluginSource:
    """A plugin that is about to be imported; ``content`` holds the bytes of a single-file plugin."""

    plugin: PluginIdentity
    source: Source = Source.INSTALLED
    content: bytes = b""


def installed(declared: Declared | None = None) -> list[PluginIdentity]:
    """Every plugin that installed metadata declares, and ``core``, by name; two claims of one name are both listed.

    Arguments:
        declared: an earlier scan; None: scan now.
    """
    found = [
        PluginIdentity(entry.name, entry.distribution, entry.version, entry.value)
        for entry in (declared or scan()).group(PLUGIN_GROUP)
        if entry.value != CORE.entry_point
    ]
    return sorted([CORE, *found], key=lambda plugin: (plugin.name, plugin.distribution))


def claimants(name: str, declared: Declared | None = None, *, group: str = ARCHITECTURE_GROUP) -> list[PluginIdentity]:
    """The plugins that have ``name`` by a claim of their own distribution, sorted.

    Arguments:
        name: an architecture (the first of ``architectures`` in a ``config.json``), or a name of another ``group`` of
            claims.
    """
    declared = declared or scan()
    return own_plugins([entry for entry in declared.group(group) if entry.name == name], declared)


def own_plugins(claims: Iterable[Declaration], declared: Declared) -> list[PluginIdentity]:
    """The plugins that the claims mean, sorted; what a distribution claims for another's plugin does not count, so that
    none can make a run load a plugin, or stop one."""
    plugins = installed(declared)
    found = {plugin for claim in claims for plugin in plugins if is_for(claim, plugin)}
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution))


def claims_for(plugin: PluginIdentity, declared: Declared) -> dict[str, list[Declaration]]:
    """Group -> what the distribution of ``plugin`` claims for it, by name; groups without a claim are left out."""
    groups = (ARCHITECTURE_GROUP, *KIND_GROUPS.values(), FLAG_GROUP)
    found = {group: [claim for claim in declared.group(group) if is_for(claim, plugin)] for group in groups}
    return {group: claims for group, claims in found.items() if claims}


def activated_by(claims: Mapping[str, Sequence[Declaration]]) -> Iterator[str]:
    """The settings that activate the plugin of these claims: ``--corrections tis, icepop``, ``--buffer-data``."""
    flags = [claim.name for claim in claims.get(FLAG_GROUP, ()) if claim.activates]
    for setting, kind in KIND_NAMED_BY.items():
        names = [claim.name for claim in claims.get(KIND_GROUPS[kind], ())]
        if names := [name for name in names if name.replace("_", "-") not in flags]:  # a flag of its own chooses it
            yield f"--{setting.replace('_', '-')} {', '.join(names)}"
    if names := [claim.name for claim in claims.get(KIND_GROUPS["prompt_format"], ())]:
        yield f"prompt files of format {', '.join(names)}"
    yield from (f"--{name}" for name in flags)


def few_ways(ways: Sequence[str], plugin: str) -> list[str]:
    """The settings of :func:`activated_by`, for a message: of many only the first."""
    if len(ways) <= MANY_WAYS:
        return list(ways)
    return [*ways[:MANY_WAYS], f"{len(ways) - MANY_WAYS} other settings (slime plugins show {plugin})"]


def is_for(claim: Declaration, plugin: PluginIdentity) -> bool:
    """Whether the claim is made for ``plugin`` by its own distribution: no other one's counts."""
    return claim.plugin == plugin.name and canonical(claim.distribution) == canonical(plugin.distribution)


def required_by(plugin: PluginIdentity, declared: Declared | None = None) -> list[str]:
    """The names of the plugins that ``plugin`` requires, sorted.

    Only its own distribution counts: another one cannot make a run load a plugin by declaring that this one needs it.
    """
    return [
        entry.name
        for entry in (declared or scan()).group(REQUIRES_GROUP)
        if entry.value == plugin.name and canonical(entry.distribution) == canonical(plugin.distribution)
    ]


def resolve(name: str, declared: Declared | None = None) -> PluginSource:
    """The plugin of ``--plugin NAME``: an installed one, alone or as ``distribution:name``, a ``.py`` file, or a dotted
    module; imports nothing.

    Raises:
        PluginError: no such plugin or file, or two distributions claim the name.
    """
    if name.endswith(".py"):
        return _read_file(Path(name))
    declared = declared or scan()
    distribution, _, plugin = name.rpartition(":")
    found = [one for one in installed(declared) if one.name == plugin and _is_of(one, distribution)]
    if len(found) > 1:
        raise PluginError(_collision(name, found))
    if found and not name.startswith(":"):
        return PluginSource(found[0])
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return PluginSource(PluginIdentity(name.replace(".", "_"), f"module {name}", "(local)", name), Source.MODULE)
    raise UnknownPlugin(_unknown(name, declared), name)


def read_code(path: Path, *, flag: str) -> bytes:
    """The bytes of a Python file that a run names.

    Arguments:
        flag: how the run names it, for messages.

    Raises:
        PluginError: there is no such file, or it cannot be read.
    """
    try:
        if path.is_file():
            return path.read_bytes()
    except OSError as problem:
        found = f"{type(problem).__name__}: {problem.strerror}"
        raise PluginError(f"{flag}: cannot be read ({found}); give a Python file that can.") from problem
    raise PluginError(f"{flag}: there is no such file in {Path.cwd()}; give the path of a Python file.")


def local_file(content: bytes, *, path: str) -> PluginSource:
    """A single-file plugin of these bytes; its module name is made from their hash, the same in every process."""
    digest = hashlib.sha256(content).hexdigest()
    identity = PluginIdentity(Path(path).stem, path, f"sha256:{digest[:12]}", f"{LOCAL_MODULE}{digest[:16]}")
    return PluginSource(identity, Source.FILE, content)


def _read_file(path: Path) -> PluginSource:
    try:
        content = read_code(path, flag=f"--plugin {path}")
    except PluginError as problem:
        raise UnknownPlugin(str(problem), os.fspath(path)) from problem.__cause__
    return local_file(content, path=os.fspath(path))


def _is_of(plugin: PluginIdentity, distribution: str) -> bool:
    return not distribution or canonical(plugin.distribution) == canonical(distribution)


def _collision(name: str, found: Sequence[PluginIdentity]) -> str:
    claims = " and ".join(f"{plugin.distribution} {plugin.version} ({plugin.entry_point})" for plugin in found)
    if len({canonical(plugin.distribution) for plugin in found}) == 1:
        who = found[0].distribution
        return f"--plugin {name}: one distribution claims this name twice: {claims}.\nReport it to the author of {who}."
    forms = " or ".join(f"--plugin {plugin.distribution}:{plugin.name}" for plugin in found)
    count = "two" if len(found) == 2 else str(len(found))
    return (
        f"--plugin {name}: {count} distributions claim this name: {claims}.\n"
        f"slime prefers neither: say which one is meant, {forms}, or uninstall what is not."
    )


def _unknown(name: str, declared: Declared) -> str:
    plugins = installed(declared)
    names = sorted({plugin.name for plugin in plugins})
    distribution, _, plugin = name.rpartition(":")
    offered = [one.name for one in plugins if distribution and _is_of(one, distribution)]
    found = f"no installed plugin is called that{similar(name, names)}. Installed are: {', '.join(names)}."
    if distribution:
        has = f"offers no plugin {plugin!r}; it offers {', '.join(offered)}" if offered else "offers no plugin here"
        found = f"{distribution} {has}."
    if name.startswith(":"):
        found = "no distribution stands before the colon."
    broken = f" Unreadable is: {'; '.join(declared.unreadable)}." if declared.unreadable else ""
    file, ending, _ = name.rpartition(".py:")
    if ending or os.sep in name:
        written = f"{file}.py" if ending else f"{name}.py"
        return f"--plugin {name}: a file is named by its path alone, which ends with .py: --plugin {written}"
    ours = distribution_of(PLUGIN_GROUP, name) or "the distribution that has it"
    return (
        f"--plugin {name}: {found}{broken}\n"
        f"Install {ours}, or give a file (./mine.py) or a dotted module (my_lab.plugin)."
    )


def similar(name: str, names: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` where one of ``names`` is close to ``name``, else nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_bounds(plugin: PluginIdentity, versions: Mapping[str, str]) -> None:
    """Returns if the bounds of the plugin's distribution hold; one without bounds accepts everything.

    Arguments:
        plugin: of an installed distribution.
        versions: distribution -> version, of ``slime-rl`` and of the other active plugins.

    Raises:
        PluginError: a version is outside its bound, or a bound on one of these distributions cannot be read.
    """
    found = {canonical(name): (name, version) for name, version in versions.items()}
    for line in _required(plugin):
        name, version = found.get(canonical(_head(line)), ("", ""))
        if name and not _accepts(plugin, line, version):
            raise PluginError(_outside(plugin, line, name, version))


def _required(plugin: PluginIdentity) -> list[str]:
    try:
        return required_lines(plugin.distribution)
    except metadata.PackageNotFoundError:  # core, where it was not installed
        return []


def _head(line: str) -> str:
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line)
    return found[1] if found else ""


def _accepts(plugin: PluginIdentity, line: str, version: str) -> bool:
    try:
        wanted = Requirement(line)
        return not _applies(wanted) or wanted.specifier.contains(version, prereleases=True)
    except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName, ValueError) as mistake:
        raise PluginError(
            f"{plugin}: its metadata requires {line!r}, which is no requirement: {str(mistake).splitlines()[0]}.\n"
            f"Report it to the author of {plugin.distribution}, or run without --plugin {plugin.name}."
        ) from None


def _applies(wanted: Requirement) -> bool:
    return wanted.marker is None or wanted.marker.evaluate({"extra": ""})


def _outside(plugin: PluginIdentity, line: str, name: str, version: str) -> str:
    return (
        f"{plugin}: {plugin.distribution} {plugin.version} requires {line}, and {name} {version} is installed.\n"
        f"Install a version of {plugin.distribution} that was made for {name} {version}, or a {name} within the bound: "
        f"pip install '{Requirement(line).name}{Requirement(line).specifier}'"
    )
