"""The plugins that a run needs without naming them, from metadata alone, and what ``--no-plugin`` takes away.

A plugin requires others by entry points of its own distribution (``slime.requires``). The distribution of a plugin
claims names for it (:mod:`slime_core.plugins.declared`): architectures, components, prompt formats, flags. A name that
exactly one plugin claims activates that plugin. So does a claimed setting in a file, because the ``config.toml`` of a
run holds every setting; on the command line a flag does where its claim ends with ``:activates``. Rows of data never
activate a plugin. Reasons are printed at start and recorded in the manifest.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_core.config.choices import PROMPT_FORMAT, Choice
from slime_core.config.settings import core_settings
from slime_core.errors import PluginError
from slime_core.plugins.declared import (
    ARCHITECTURE_GROUP,
    FLAG_GROUP,
    KIND_GROUPS,
    OUR_DISTRIBUTIONS,
    Declaration,
    Declared,
    distribution_of,
    scan,
)
from slime_core.plugins.discovery import (
    CORE,
    PluginIdentity,
    PluginSource,
    activated_by,
    claimants,
    claims_for,
    few_ways,
    installed,
    own_plugins,
    required_by,
    similar,
)


@dataclass(frozen=True, slots=True)
class Need:
    """A plugin that a run has by need; prints as ``grpo is active because searchr1 requires it``."""

    plugin: PluginIdentity
    why: str

    def __str__(self) -> str:
        return f"{self.plugin.name} is active because {self.why}"


@dataclass(frozen=True, slots=True)
class Withheld:
    """The plugins that ``--no-plugin`` excludes, by their names, in any form in which ``--plugin`` names one."""

    names: tuple[str, ...] = ()

    def __contains__(self, plugin: PluginIdentity) -> bool:
        return plugin.name in self.tables

    def leaves_out(self, name: str) -> bool:
        """Whether ``name``, as a run writes it after ``--plugin``, is taken away; the plugin need not be there."""
        return table_of(name) in self.tables

    @property
    def tables(self) -> frozenset[str]:
        """The names of the plugins, which are also those of their tables in a file."""
        return frozenset(map(table_of, self.names))

    def check(self, chosen: Sequence[PluginSource], declared: Declared, *, gone: Collection[str] = ()) -> None:
        """Returns if every name means a plugin that is installed or that the run names.

        Arguments:
            gone: names after ``--plugin`` that are taken away.

        Raises:
            PluginError: one means nothing, or ``core``.
        """
        known = {plugin.name for plugin in (*installed(declared), *(source.plugin for source in chosen))}
        for name in self.names:
            if table_of(name) == CORE.name:
                raise PluginError(f"--no-plugin {name}: core is slime itself, and no run goes without it.")
            if table_of(name) not in known.union(map(table_of, gone)):
                names = sorted(known)
                raise PluginError(
                    f"--no-plugin {name}: the run names no such plugin, and none is installed{similar(name, names)}. "
                    f"Installed or named are: {', '.join(names)}."
                )


def with_required(
    chosen: Sequence[PluginSource], *, withheld: Withheld, declared: Declared
) -> tuple[list[PluginSource], list[Need]]:
    """``chosen``, and after it what it requires, and what that requires; and why each of those is there.

    Raises:
        PluginError: a required plugin is not installed, withheld, or claimed by two distributions.
    """
    sources, needs = list(chosen), []
    for source in sources:  # grows while it is walked
        for name in required_by(source.plugin, declared):
            if not any(one.plugin.name == name for one in sources):
                sources.append(_required(name, source.plugin, withheld, declared))
                needs.append(Need(sources[-1].plugin, f"{source.plugin.name} requires it"))
    return sources, needs


def architecture_need(architecture: str, *, withheld: Withheld, declared: Declared) -> Need:
    """The one installed plugin that claims ``architecture`` and that is not withheld.

    Raises:
        PluginError: none does, or several do.
    """
    found = claimants(architecture, declared)
    left = _left(
        found,
        withheld,
        needs=f"architecture {architecture} needs {' and '.join(map(str, found))}, which claims it",
        step="Leave that --no-plugin out, or name another plugin that has a model spec for it: --plugin ./mine.py",
    )
    if len(left) > 1:
        both = " and ".join(map(str, left))
        raise PluginError(f"architecture {architecture} is claimed twice: by {both}.\nName one of them with --plugin.")
    if not left:
        raise PluginError(_unclaimed(architecture, declared))
    return Need(left[0], f"the model's architecture {architecture} needs it")


def _left(found: Sequence[PluginIdentity], withheld: Withheld, *, needs: str, step: str) -> list[PluginIdentity]:
    """The plugins among ``found`` that are not withheld.

    Arguments:
        needs, step: the message where all are: what needs them, and what to do.

    Raises:
        PluginError: all are withheld.
    """
    left = [plugin for plugin in found if plugin not in withheld]
    if found and not left:
        raise PluginError(f"{needs}, and --no-plugin takes that away.\n{step}")
    return left


def _unclaimed(architecture: str, declared: Declared) -> str:
    names = {entry.name for entry in declared.group(ARCHITECTURE_GROUP)}
    known = sorted(name for name in names if claimants(name, declared))
    ours = distribution_of(ARCHITECTURE_GROUP, architecture)
    write = (
        "Write a plugin that claims it, with a model spec that builds it in Megatron and maps its weights "
        "(docs/models.md)"
    )
    step = write if ours is None else f"Install {ours}"
    near = difflib.get_close_matches(architecture, known, n=1, cutoff=0.0) if ours is None else []
    closest = "".join(f"The closest is {name}.\n" for name in near)
    return (
        f"no active plugin has a model spec for architecture {architecture}, and no installed one claims it. "
        f"Claimed are: {', '.join(known) or 'none'}.\n{closest}"
        f"{step}, or name one that has a model spec for it: --plugin ./mine.py"
    )


def table_of(name: str) -> str:
    """The name of a plugin that a run writes as ``name``: of ``slime-grpo:grpo``, ``./grpo.py``, ``grpo``: grpo."""
    return Path(name).stem if name.endswith(".py") else name.rpartition(":")[2].replace(".", "_")


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


def claimed_by(choice: Choice, *, withheld: Withheld, declared: Declared) -> Need | None:
    """The one plugin that claims what ``choice`` names, and why the run has it; None: none claims it.

    Raises:
        PluginError: two do; ``plugin:component`` names no installed plugin, or two; or ``withheld`` has it.
    """
    plugin, _, component = choice.name.rpartition(":")
    if plugin:
        found = _called(plugin, choice, declared)
    else:
        found = claimants(component, declared, group=KIND_GROUPS[choice.kind])
    left = _left(
        found,
        withheld,
        needs=f"{choice.where} names {choice.name}, which {' and '.join(map(str, found))} has",
        step=f"Leave that --no-plugin out, or choose another {_words(choice.kind)}.",
    )
    if len(left) > 1:
        raise PluginError(_claimed_twice(choice, left))
    return Need(left[0], f"{choice.where} names {choice.name}") if left else None


def flag_needs(flags: Mapping[str, str], *, withheld: Withheld, declared: Declared) -> Iterator[Need]:
    """The plugins that flags, and settings of a file, by themselves activate.

    Arguments:
        flags: flag without dashes -> where it stands: the flag itself, or a place in a file.

    Raises:
        PluginError: two plugins claim such a flag, or ``withheld`` has the one that does.
    """
    for flag, where in flags.items():
        is_flag = where == f"--{flag}"
        found = own_plugins(_activating(flag, in_file=not is_flag, declared=declared), declared)
        if not is_flag and all(plugin in withheld for plugin in found):
            continue  # the config.toml of a run holds every setting
        needs = f"{where}: this setting is one of {' and '.join(map(str, found))}"
        left = _left(found, withheld, needs=needs, step="Leave one of the two out.")
        if len(left) > 1:
            both = " and ".join(map(str, left))
            raise PluginError(f"{where}: this setting is claimed by {both}.\nName the one that is meant with --plugin.")
        if left:
            yield Need(left[0], f"{where} is one of its settings")


def _activating(flag: str, *, in_file: bool, declared: Declared) -> list[Declaration]:
    """The claims by which ``flag``, or ``PLUGIN.flag`` of a table ``[PLUGIN]``, activates a plugin."""
    table, _, name = flag.rpartition(".")
    of_flags = declared.group(FLAG_GROUP)
    claims = [claim for claim in of_flags if claim.name == name]
    if table:  # a file has the option's own name, which is not always that of its flag
        own = [claim for claim in of_flags if claim.plugin == table]
        # A table that no plugin has may be the core section in which an option was before it moved to a plugin.
        return (own or [claim for claim in claims if claim.activates]) if in_file else []
    is_of_core = name.replace("-", "_") in core_settings()
    return [claim for claim in claims if claim.activates or (in_file and not is_of_core)]


def inactive_flags(
    active: Collection[PluginIdentity],
    declared: Declared | None = None,
    *,
    is_given: bool = True,
    withheld: Withheld = Withheld(),
) -> dict[str, str]:
    """Messages about the settings of plugins that are not ``active``: flag without dashes, or ``[plugin]`` for a table
    of that name -> the plugin, its distribution, and what activates it; empty for the table of one that is taken away.

    Arguments:
        is_given: the settings are given, so that a component of the plugin activates it, or the run leaves them out;
            False: a user reads about them.
    """
    declared = declared or scan()
    found = {}
    for distribution, groups in OUR_DISTRIBUTIONS.items():
        for flag in groups.get(FLAG_GROUP, ()):
            found[flag] = f"a setting of {distribution}, which is not installed; install it"
    for plugin in installed(declared):
        claims = claims_for(plugin, declared)
        if plugin not in active and claims:
            step = _how_to_activate(plugin, claims) if is_given else f"add --plugin {plugin.name}"
            reported = f"{plugin}, which is not active; {step}"
            found[f"[{plugin.name}]"] = f"settings of {reported}"
            found |= {claim.name: f"a setting of {reported}" for claim in claims.get(FLAG_GROUP, ())}
    for plugin in active:
        for claim in claims_for(plugin, declared).get(FLAG_GROUP, ()):
            found.pop(claim.name, None)
    return found | {f"[{table}]": "" for table in withheld.tables}


def how_to_get(kind: str, name: str, *, declared: Declared | None = None) -> str | None:
    """The next step for a component, or a prompt format, that no active plugin offers; None: nothing is known of it.

    Example: ``install slime-rewards, which has it``.
    """
    if (group := KIND_GROUPS.get(kind)) is None:
        return None
    declared = declared or scan()
    plugins = claimants(name, declared, group=group)
    if plugins:
        return f"add --plugin {plugins[0].name}: {plugins[0]} has it"
    distribution = distribution_of(group, name)
    return None if distribution is None else f"install {distribution}, which has it"


def claimed_names(kind: str) -> list[str]:
    """Every component of a kind that an installed plugin claims, sorted."""
    if (group := KIND_GROUPS.get(kind)) is None:
        return []
    declared = scan()
    return sorted(
        name for name in {one.name for one in declared.group(group)} if claimants(name, declared, group=group)
    )


def _how_to_activate(plugin: PluginIdentity, claims: Mapping[str, Sequence[Declaration]]) -> str:
    ways = " or with ".join([f"--plugin {plugin.name}", *few_ways(list(activated_by(claims)), plugin.name)])
    return f"activate it with {ways}, or leave this out"


def _called(plugin: str, choice: Choice, declared: Declared) -> list[PluginIdentity]:
    found = [one for one in installed(declared) if one.name == plugin]
    if len(found) == 1:
        return found
    who = " and ".join(f"{one.distribution} {one.version}" for one in found)
    reported = f"{who} both have a plugin of that name" if found else f"no plugin {plugin!r} is installed"
    step = f"Name one with --plugin DISTRIBUTION:{plugin}" if found else "Install it, or name the component alone"
    raise PluginError(f"{choice.where} names {choice.name}, and {reported}.\n{step}.")


def _claimed_twice(choice: Choice, found: Sequence[PluginIdentity]) -> str:
    both = " and ".join(map(str, found))
    plugins = " or ".join(f"--plugin {plugin.distribution}:{plugin.name}" for plugin in found)
    forms = " or ".join(f"{plugin.name}:{choice.name}" for plugin in found)
    instead = "" if choice.kind == PROMPT_FORMAT or len({one.name for one in found}) < 2 else f"; or write {forms}"
    return (
        f"{choice.where} names {choice.name}, a {_words(choice.kind)} that {both} claim.\n"
        f"Name the plugin that is meant, {plugins}{instead}."
    )


def _words(kind: str) -> str:
    return kind.replace("_", " ")
