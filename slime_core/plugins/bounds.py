"""Whether a plugin's distribution accepts the versions that it runs with: its own ``Requires-Dist``, evaluated.

An installer checks these once, and not at all with ``--no-deps``, after a later upgrade of the core alone, or for what
stands on the path without having been installed. So a run checks them again, before it imports a plugin.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import importlib_metadata as metadata
from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement

from slime_core.errors import PluginError
from slime_core.plugins.declared import canonical, required_lines
from slime_core.plugins.discovery import CORE, PluginIdentity

__all__ = ["bound_mistakes", "check_bounds"]

_UPPER = frozenset({"<", "<=", "==", "===", "~="})


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


def bound_mistakes(plugin: PluginIdentity) -> list[str]:
    """What ``slime plugins check`` says about the bounds of an installed plugin on ``slime-rl``; empty: all is well.

    A run accepts a distribution without a bound, or without an upper one, and finds out later that it does not fit.
    """
    lines = [line for line in _required(plugin) if canonical(_head(line)) == CORE.distribution]
    try:
        check_bounds(plugin, {CORE.distribution: CORE.version})
        applying = [wanted for wanted in map(Requirement, lines) if _applies(wanted)]
    except PluginError as mistake:
        return [str(mistake)]
    who = f"{plugin.distribution} {plugin.version}"
    advice = f"Its author should require {_advised()}."
    if not applying:
        return [f"{who} does not say which versions of {CORE.distribution} it works with.\n{advice}"]
    if not any(one.operator in _UPPER for wanted in applying for one in wanted.specifier):
        return [f"{who} requires {lines[0]}, which has no upper bound.\n{advice}"]
    return []


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


def _advised() -> str:
    major, minor, *_ = CORE.version.split(".")
    return f"'{CORE.distribution}>={major}.{minor},<{major}.{int(minor) + 1}'"
