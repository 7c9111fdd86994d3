"""Which plugins are installed, from metadata alone: nothing here imports a plugin.

A distribution offers plugins in entry-point group ``slime`` (``grpo = "slime_grpo.plugin"``) and claims the
architectures of checkpoints in group ``slime.models`` (``Qwen3ForCausalLM = "models"``, the name of its plugin). A run
may also name a file (``./mine.py``) or a module (``my_lab.plugin``) that no distribution declares.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import slime_core
from slime_core.errors import PluginError

__all__ = [
    "ARCHITECTURE_GROUP",
    "CORE",
    "PATHS",
    "PLUGIN_GROUP",
    "Claim",
    "PluginIdentity",
    "PluginSource",
    "Source",
    "claimants",
    "claimed_architectures",
    "installed",
    "local_file",
    "nearest",
    "resolve",
]

PLUGIN_GROUP = "slime"
ARCHITECTURE_GROUP = "slime.models"


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


CORE = PluginIdentity("core", "slime-rl", slime_core.__version__, "slime_core.builtin.plugin")
PATHS = PluginIdentity("paths", CORE.distribution, CORE.version, "slime_core.adapters.plugin")
"""Runs the functions that ``[custom]`` names by path; active where there are any."""


class Source(StrEnum):
    """Where a plugin's code comes from: an installed distribution, an importable module, or one file's bytes."""

    INSTALLED = "installed"
    MODULE = "module"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class PluginSource:
    """A plugin that is about to be imported; ``content`` holds the bytes of a single-file plugin."""

    plugin: PluginIdentity
    source: Source = Source.INSTALLED
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Claim:
    """A distribution says that its plugin handles checkpoints of an architecture."""

    architecture: str
    plugin: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} ({self.distribution} {self.version})"


def installed() -> list[PluginIdentity]:
    """Every plugin that installed metadata declares, and ``core``, by name; two claims of one name are both listed."""
    found = [
        PluginIdentity(point.name, *_distribution(point), point.value)
        for point in metadata.entry_points(group=PLUGIN_GROUP)
        if point.value not in (CORE.entry_point, PATHS.entry_point)
    ]
    return sorted([CORE, PATHS, *found], key=lambda plugin: (plugin.name, plugin.distribution))


def claimants(architecture: str) -> list[Claim]:
    """Every installed claim of ``architecture`` (the first entry of ``architectures`` in a ``config.json``)."""
    found = [claim for claim in _claims() if claim.architecture == architecture]
    return sorted(found, key=lambda claim: (claim.plugin, claim.distribution))


def claimed_architectures() -> list[str]:
    """Every architecture that an installed plugin claims, sorted."""
    return sorted({claim.architecture for claim in _claims()})


def resolve(name: str) -> PluginSource:
    """What ``--plugin NAME`` means: an installed plugin, a ``.py`` file, or a dotted module; imports nothing.

    Raises:
        PluginError: no such plugin or file, or two distributions claim the name.
    """
    if name.endswith(".py"):
        return _read_file(Path(name))
    found = [plugin for plugin in installed() if plugin.name == name]
    if len(found) > 1:
        raise PluginError(_collision(name, found))
    if found:
        return PluginSource(found[0])
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return PluginSource(PluginIdentity(name.replace(".", "_"), f"module {name}", "(local)", name), Source.MODULE)
    raise PluginError(_unknown(name))


def local_file(content: bytes, *, path: str) -> PluginSource:
    """A single-file plugin of these bytes; its module name is made from their hash, the same in every process."""
    digest = hashlib.sha256(content).hexdigest()
    identity = PluginIdentity(Path(path).stem, path, f"sha256:{digest[:12]}", f"slime_local_{digest[:16]}")
    return PluginSource(identity, Source.FILE, content)


def _read_file(path: Path) -> PluginSource:
    if not path.is_file():
        raise PluginError(f"--plugin {path}: there is no such file in {Path.cwd()}; give the path of a Python file")
    return local_file(path.read_bytes(), path=os.fspath(path))


def _claims() -> list[Claim]:
    points = metadata.entry_points(group=ARCHITECTURE_GROUP)
    return [Claim(point.name, point.value, *_distribution(point)) for point in points]


def _distribution(point: metadata.EntryPoint) -> tuple[str, str]:
    if point.dist is None:  # only entry points built by hand have none
        return "an unknown distribution", "?"
    return str(point.dist.metadata["Name"]), str(point.dist.version)


def _collision(name: str, found: Sequence[PluginIdentity]) -> str:
    claims = " and ".join(f"{plugin.distribution} {plugin.version} ({plugin.entry_point})" for plugin in found)
    return f"--plugin {name}: two distributions claim this name: {claims}.\nUninstall one; slime prefers neither."


def _unknown(name: str) -> str:
    names = sorted({plugin.name for plugin in installed()})
    return (
        f"--plugin {name}: no installed plugin is called that{nearest(name, names)}. "
        f"Installed are: {', '.join(names)}.\n"
        "Install the distribution that has it, or give a file (./mine.py) or a dotted module (my_lab.plugin)."
    )


def nearest(name: str, names: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` where one of ``names`` is close to ``name``, else nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
