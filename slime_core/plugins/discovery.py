"""Finds plugins: in the metadata of installed distributions, in a file, or in a module; imports none of them.

A distribution declares its plugins as entry points of group ``slime``::

    [project.entry-points.slime]
    grpo = "slime_grpo.plugin"

A run may also name a file (``./mine.py``) or a module (``my_lab.plugin``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import importlib_metadata as metadata

from slime_core.errors import PluginError, nearest

GROUP = "slime"
"""The group of entry points."""

LOCAL_MODULE = "slime_local_"
"""Start of the module name of a single-file plugin. The start of the file's hash follows."""


class Source(StrEnum):
    """Kind of source of a plugin's code."""

    INSTALLED = "installed"
    MODULE = "module"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A plugin that has been found and not yet imported.

    Example: ``Plugin("grpo", "slime-grpo", "0.1.0", "slime_grpo.plugin")`` prints as
    ``plugin 'grpo' (slime-grpo 0.1.0)``.

    Arguments:
        name: the word after ``--plugin``; for files and modules, the last part of the name.
        distribution: the installed distribution; for local code, the path or the module.
        version: of the distribution; for a file, the start of its hash.
        module: the module, or ``module:attribute``, that holds the hooks.
        content: the bytes of a single-file plugin.
        neighbours: the modules that a file imports from its folder: dotted name, path and bytes of each.
    """

    name: str
    distribution: str
    version: str
    module: str
    source: Source = Source.INSTALLED
    content: bytes = field(default=b"", repr=False)
    neighbours: tuple[tuple[str, str, bytes], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.distribution} {self.version})"


CORE = Plugin("core", "slime-rl", "0.1.0", "slime_core.builtin.plugin")
"""The plugin of slime itself, which takes part in every run."""


def installed() -> tuple[list[Plugin], list[str]]:
    """Return ``core`` and all plugins that distributions on ``sys.path`` declare, sorted by name, and a text for each
    distribution whose metadata cannot be read."""
    plugins: dict[tuple[str, str], Plugin] = {}
    unreadable: list[str] = []
    for distribution in metadata.Distribution.discover():
        try:
            if "[slime]" in (distribution.read_text("entry_points.txt") or ""):
                for plugin in _declared(distribution):
                    plugins.setdefault((plugin.distribution, plugin.name), plugin)  # an import uses the first copy
        except Exception as problem:  # metadata that is cut short raises many types
            unreadable.append(f"{distribution.locate_file('')} ({type(problem).__name__}: {problem})")
    return [CORE, *sorted(plugins.values(), key=lambda plugin: (plugin.name, plugin.distribution))], unreadable


def _declared(distribution: metadata.Distribution) -> Iterator[Plugin]:
    # The property ``metadata`` imports the package email, which takes a tenth of the time of slime --help.
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    about = dict(re.findall(r"^(Name|Version): *(\S+)", text.partition("\n\n")[0], re.MULTILINE))
    for point in distribution.entry_points.select(group=GROUP):
        yield Plugin(point.name, about["Name"], about["Version"], point.value)


def is_path(name: str) -> bool:
    """Return whether ``--plugin NAME`` names a file or a module instead of an installed plugin."""
    return name.endswith(".py") or ("." in name and all(part.isidentifier() for part in name.split(".")))


def resolve(name: str) -> Plugin:
    """Return the plugin of ``--plugin NAME`` for a file or a module.

    Raises:
        PluginError: the file cannot be read.
    """
    if name.endswith(".py"):
        return local_file(read_code(Path(name), flag=f"--plugin {Path(name)}"), path=str(Path(name)))
    return Plugin(short_name(name), f"module {name}", "(local)", name, Source.MODULE)


def short_name(name: str) -> str:
    """Return the name of the plugin ``--plugin NAME``, which is also that of its table in a file: ``mine`` for
    ``./mine.py``, ``my_lab_plugin`` for ``my_lab.plugin``."""
    return Path(name).stem if name.endswith(".py") else name.replace(".", "_")


_NEXT_STEPS = {
    "--plugin": "Install it, or give a file (./mine.py) or a module (my_lab.plugin). --no-plugin {} runs without it.",
    "--device": "Install the plugin (slime-{}), or choose another device.",
    "--no-plugin": "Leave --no-plugin {} out, or correct the name.",
}


def unknown_plugin(name: str, names: list[str], *, flag: str = "--plugin") -> PluginError:
    """Return the error for a plugin that is not installed."""
    return PluginError(
        f"{flag} {name}: no plugin of this name is installed{nearest(name, names)}\n"
        f"Installed plugins: {', '.join(names)}.\n{_NEXT_STEPS[flag].format(name)}"
    )


def read_code(path: Path, *, flag: str) -> bytes:
    """Return the bytes of a Python file that a run names.

    Arguments:
        flag: the flag with its value, for messages.

    Raises:
        PluginError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as problem:
        message = f"{flag}: the file cannot be read from {Path.cwd()} ({problem.strerror}); give a Python file."
        raise PluginError(message) from problem


def local_file(content: bytes, *, path: str, name: str | None = None) -> Plugin:
    """Return the plugin of a single file. Its module is named by the hash of the bytes, the same in every process.

    Arguments:
        name: of the plugin, by default the stem of ``path``.
    """
    digest = hashlib.sha256(content).hexdigest()
    module = f"{LOCAL_MODULE}{digest[:16]}"
    return Plugin(name or Path(path).stem, path, f"sha256:{digest[:12]}", module, Source.FILE, content)
