"""The plugins that a run needs without naming them, from metadata alone, and what ``--no-plugin`` takes away.

A plugin requires others by entry points of its own distribution (``slime.requires``); a checkpoint's architecture needs
the one plugin that claims it (``slime.models``). Both are printed at start and recorded in the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import PluginError
from slime_core.plugins.declared import ARCHITECTURE_GROUP, Declared, canonical
from slime_core.plugins.discovery import (
    CORE,
    Claim,
    PluginIdentity,
    PluginSource,
    claimants,
    installed,
    is_for,
    nearest,
    required_by,
)
from slime_core.plugins.distributions import distribution_of

__all__ = ["Need", "Withheld", "architecture_source", "with_required"]


@dataclass(frozen=True, slots=True)
class Need:
    """A plugin that a run has by need; prints as ``grpo is active because searchr1 requires it``."""

    plugin: PluginIdentity
    why: str

    def __str__(self) -> str:
        return f"{self.plugin.name} is active because {self.why}"


@dataclass(frozen=True, slots=True)
class Withheld:
    """What ``--no-plugin`` takes away: by name, as ``distribution:name``, or as ``--plugin`` names a file or module."""

    names: tuple[str, ...] = ()

    def __contains__(self, plugin: PluginIdentity) -> bool:
        owned = f"{canonical(plugin.distribution)}:{plugin.name}"
        return any(_written(name) in (plugin.name, owned) or _is_where(name, plugin) for name in self.names)

    def check(self, chosen: Sequence[PluginSource], declared: Declared) -> None:
        """Returns if every name means a plugin that is installed or that the run names.

        Raises:
            PluginError: one means nothing, or ``core``.
        """
        known = [*installed(declared), *(source.plugin for source in chosen)]
        for name in self.names:
            if CORE in Withheld((name,)):
                raise PluginError(f"--no-plugin {name}: core is slime itself, and no run goes without it.")
            if not any(plugin in Withheld((name,)) for plugin in known):
                names = sorted({plugin.name for plugin in known})
                raise PluginError(
                    f"--no-plugin {name}: the run names no such plugin, and none is installed{nearest(name, names)}. "
                    f"Installed or named are: {', '.join(names)}."
                )


def with_required(
    chosen: Sequence[PluginSource], *, withheld: Withheld, declared: Declared
) -> tuple[list[PluginSource], list[Need]]:
    """``chosen``, and after it what it requires, and what that requires; and why each of those is there.

    Raises:
        PluginError: a required plugin is not installed, withheld, claimed by two distributions, or requires in turn
            what requires it.
    """
    sources, needs = list(chosen), []
    for source in sources:  # grows while it is walked
        for name in required_by(source.plugin, declared):
            _refuse_cycle(name, (source.plugin.name,), declared)
            if not any(one.plugin.name == name for one in sources):
                sources.append(_required(name, source.plugin, withheld, declared))
                needs.append(Need(sources[-1].plugin, f"{source.plugin.name} requires it"))
    return sources, needs


def architecture_source(architecture: str, *, withheld: Withheld, declared: Declared) -> PluginSource:
    """The one installed plugin that its own distribution claims ``architecture`` for, and that is not withheld.

    Only that distribution is asked: no stranger can make a run load a plugin, or stop one, by claiming for it.

    Raises:
        PluginError: none does, or several do.
    """
    claims = claimants(architecture, declared)
    found = [(claim, PluginSource(own)) for claim in claims if (own := _own(claim, declared))]
    left = [(claim, source) for claim, source in found if source.plugin not in withheld]
    if len(left) > 1:
        both = " and ".join(str(claim) for claim, _ in left)
        raise PluginError(f"architecture {architecture} is claimed twice: by {both}.\nName one of them with --plugin.")
    if left:
        return left[0][1]
    if found:
        who = " and ".join(str(claim) for claim, _ in found)
        raise PluginError(
            f"architecture {architecture} needs {who}, which claims it, and --no-plugin takes that away.\n"
            "Leave that --no-plugin out, or name another plugin that has a model spec for it: --plugin ./mine.py"
        )
    raise PluginError(_unclaimed(architecture, claims, declared))


def _unclaimed(architecture: str, claims: Sequence[Claim], declared: Declared) -> str:
    names = {entry.name for entry in declared.group(ARCHITECTURE_GROUP)}
    known = sorted(name for name in names if any(_own(one, declared) for one in claimants(name, declared)))
    ours = distribution_of(ARCHITECTURE_GROUP, architecture)
    step = "Install a plugin that claims it (slime-models has the common ones)" if ours is None else f"Install {ours}"
    strangers = "".join(
        f"{claim.distribution} {claim.version} claims it for plugin {claim.plugin!r}, which is none of its own: that "
        f"counts for nobody. Report it to the author of {claim.distribution}.\n"
        for claim in claims
    )
    return (
        f"no active plugin has a model spec for architecture {architecture}, and no installed one claims it. "
        f"Claimed are: {', '.join(known) or 'none'}.\n{strangers}"
        f"{step}, or name one that has a model spec for it: --plugin ./mine.py"
    )


def _written(name: str) -> str:
    distribution, colon, plugin = name.rpartition(":")
    return f"{canonical(distribution)}{colon}{plugin}"


def _is_where(name: str, plugin: PluginIdentity) -> bool:
    """Whether ``name`` is the file or the module that holds a plugin which no distribution declares."""
    if name.endswith(".py"):
        is_file = plugin.distribution.endswith(".py") and plugin.version.startswith("sha256:")
        return is_file and Path(name).absolute().resolve() == Path(plugin.distribution).absolute().resolve()
    return plugin.distribution == f"module {name}"


def _own(claim: Claim, declared: Declared) -> PluginIdentity | None:
    """The plugin that a claim means, which the claim's own distribution has to declare; None: it does not."""
    return next((plugin for plugin in installed(declared) if is_for(claim, plugin)), None)


def _required(name: str, by: PluginIdentity, withheld: Withheld, declared: Declared) -> PluginSource:
    found = [plugin for plugin in installed(declared) if plugin.name == name]
    if not found:
        raise PluginError(
            f"{by} requires plugin {name!r}, and none of that name is installed.\n"
            f"Install the distribution that has it, or reinstall {by.distribution} with what it depends on."
        )
    if len(found) > 1:
        claims = " and ".join(f"{plugin.distribution} {plugin.version}" for plugin in found)
        forms = " or ".join(f"--plugin {plugin.distribution}:{name}" for plugin in found)
        raise PluginError(
            f"{by} requires plugin {name!r}, a name that {claims} claim.\n"
            f"slime prefers neither: say which one is meant, {forms}."
        )
    if found[0] in withheld:
        raise PluginError(
            f"{by} requires {found[0]}, and --no-plugin {name} takes that away.\n"
            f"Run without --plugin {by.name}, or without --no-plugin {name}."
        )
    return PluginSource(found[0])


def _refuse_cycle(name: str, path: tuple[str, ...], declared: Declared) -> None:
    """Follow what ``name`` requires; ``path`` led to it, each requiring the next."""
    if name in path:
        round_trip = " requires ".join([*path[path.index(name) :], name])
        raise PluginError(
            f"plugins require one another in a circle: {round_trip}.\n"
            "Report it to their authors; a plugin requires only what can do without it."
        )
    for plugin in installed(declared):
        if plugin.name == name:
            for further in required_by(plugin, declared):
                _refuse_cycle(further, (*path, name), declared)
