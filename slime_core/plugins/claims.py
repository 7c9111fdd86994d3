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
    FORMAT_GROUP,
    KIND_GROUPS,
    OUR_DISTRIBUTIONS,
    Declared,
    canonical,
    distribution_of,
    scan,
)
from slime_core.plugins.discovery import (
    CORE,
    Claim,
    PluginIdentity,
    PluginSource,
    activated_by,
    claimants,
    claims_for,
    few_ways,
    installed,
    is_for,
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
    """What ``--no-plugin`` takes away: by name, as ``distribution:name``, or as ``--plugin`` names a file or module."""

    names: tuple[str, ...] = ()

    def __contains__(self, plugin: PluginIdentity) -> bool:
        owned = f"{canonical(plugin.distribution)}:{plugin.name}"
        return any(_written(name) in (plugin.name, owned) or _is_where(name, plugin) for name in self.names)

    def leaves_out(self, name: str) -> bool:
        """Whether ``name``, as a run writes it after ``--plugin``, is taken away; the plugin need not be there."""
        return any(_are_same(name, one) for one in self.names)

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
        known = [*installed(declared), *(source.plugin for source in chosen)]
        for name in self.names:
            if CORE in Withheld((name,)):
                raise PluginError(f"--no-plugin {name}: core is slime itself, and no run goes without it.")
            is_named = any(map(Withheld((name,)).leaves_out, gone))
            if not is_named and not any(plugin in Withheld((name,)) for plugin in known):
                names = sorted({plugin.name for plugin in known})
                raise PluginError(
                    f"--no-plugin {name}: the run names no such plugin, and none is installed{similar(name, names)}. "
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

    Claims of other distributions do not count, so that none can make a run load a plugin, or stop one.

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
    step = "Install a plugin that claims it (docs/models.md: how to write one)" if ours is None else f"Install {ours}"
    near = difflib.get_close_matches(architecture, known, n=1, cutoff=0.0) if ours is None else []
    closest = "".join(f"The closest is {name}.\n" for name in near)
    strangers = "".join(
        f"{claim.distribution} {claim.version} claims it for plugin {claim.plugin!r} of another distribution, which "
        f"has no effect. Report it to the author of {claim.distribution}.\n"
        for claim in claims
    )
    return (
        f"no active plugin has a model spec for architecture {architecture}, and no installed one claims it. "
        f"Claimed are: {', '.join(known) or 'none'}.\n{strangers}{closest}"
        f"{step}, or name one that has a model spec for it: --plugin ./mine.py"
    )


def table_of(name: str) -> str:
    """The name of a plugin that a run writes as ``name``: of ``slime-grpo:grpo``, ``./grpo.py``, ``grpo``: grpo."""
    return Path(name).stem if name.endswith(".py") else name.rpartition(":")[2].replace(".", "_")


def _are_same(name: str, other: str) -> bool:
    """Whether two names of plugins, as a run writes them, can mean the same one."""
    if name.endswith(".py") and other.endswith(".py"):
        return Path(name).absolute().resolve() == Path(other).absolute().resolve()
    if ":" in name and ":" in other:
        return _written(name) == _written(other)
    return table_of(name) == table_of(other)


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


def _split_name(name: str) -> tuple[str, str]:
    """``plugin:component`` as two; the plugin of a plain name is empty."""
    plugin, _, component = name.rpartition(":")
    return plugin, component


def _group_of(kind: str) -> str:
    """The group of claims of a kind of component, or of prompt formats."""
    return FORMAT_GROUP if kind == PROMPT_FORMAT else KIND_GROUPS[kind]


def claimed_by(choice: Choice, *, withheld: Withheld, declared: Declared) -> Need | None:
    """The one plugin that claims what ``choice`` names, and why the run has it; None: none claims it.

    Raises:
        PluginError: two do; ``plugin:component`` names no installed plugin, or two; or ``withheld`` has it.
    """
    plugin, component = _split_name(choice.name)
    if plugin:
        found = _called(plugin, choice, declared)
    else:
        found = list(_own_plugins(claimants(component, declared, group=_group_of(choice.kind)), declared))
    left = [one for one in found if one not in withheld]
    if len(left) > 1:
        raise PluginError(_claimed_twice(choice, left))
    if not left and found:
        raise PluginError(
            f"{choice.where} names {choice.name}, which {found[0]} has, and --no-plugin takes that away.\n"
            f"Leave that --no-plugin out, or choose another {_words(choice.kind)}."
        )
    return Need(left[0], f"{choice.where} names {choice.name}") if left else None


def flag_needs(flags: Mapping[str, str], *, withheld: Withheld, declared: Declared) -> Iterator[Need]:
    """The plugins that flags, and settings of a file, by themselves activate.

    Arguments:
        flags: flag without dashes -> where it stands: the flag itself, or a place in a file.

    Raises:
        PluginError: two plugins claim such a flag, or ``withheld`` has the one that does.
    """
    for flag, where in flags.items():
        claims = _activating(flag, in_file=where != f"--{flag}", declared=declared)
        found = list(_own_plugins(claims, declared))
        left = [one for one in found if one not in withheld]
        if len(left) > 1:
            both = " and ".join(map(str, left))
            raise PluginError(f"{where}: this setting is claimed by {both}.\nName the one that is meant with --plugin.")
        if not left and found and where != f"--{flag}":
            continue  # the config.toml of a run holds every setting
        if not left and found:
            raise PluginError(
                f"{where}: this setting is one of {found[0]}, and --no-plugin takes that away.\n"
                "Leave one of the two out."
            )
        if left:
            yield Need(left[0], f"{where} is one of its settings")


def _activating(flag: str, *, in_file: bool, declared: Declared) -> list[Claim]:
    """The claims by which ``flag``, or ``PLUGIN.flag`` of a table ``[PLUGIN]``, activates a plugin."""
    table, _, name = flag.rpartition(".")
    claims = claimants(name, declared, group=FLAG_GROUP)
    if table:  # a file has the option's own name, which is not always that of its flag
        own = [claim for claim in _flag_claims(declared) if claim.plugin == table]
        # A table that no plugin has may be the core section in which an option was before it moved to a plugin.
        return (own or [claim for claim in claims if claim.activates]) if in_file else []
    is_of_core = name.replace("-", "_") in core_settings()
    return [claim for claim in claims if claim.activates or (in_file and not is_of_core)]


def _flag_claims(declared: Declared) -> list[Claim]:
    names = dict.fromkeys(entry.name for entry in declared.group(FLAG_GROUP))
    return [claim for name in names for claim in claimants(name, declared, group=FLAG_GROUP)]


def inactive_flags(
    active: Collection[PluginIdentity],
    declared: Declared | None = None,
    *,
    is_given: bool = True,
    withheld: Withheld = Withheld(),
) -> dict[str, str]:
    """What to say of the settings of plugins that are not ``active``: flag without dashes, or ``[plugin]`` for a table
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
    if kind != PROMPT_FORMAT and kind not in KIND_GROUPS:
        return None
    group = _group_of(kind)
    declared = declared or scan()
    plugins = list(_own_plugins(claimants(name, declared, group=group), declared))
    if plugins:
        return f"add --plugin {plugins[0].name}: {plugins[0]} has it"
    distribution = distribution_of(group, name)
    return None if distribution is None else f"install {distribution}, which has it"


def claimed_names(kind: str) -> list[str]:
    """Every component of a kind that an installed plugin claims, sorted."""
    declared = scan()
    names = {entry.name for entry in declared.group(_group_of(kind))} if kind in KIND_GROUPS else set()
    return sorted(
        name for name in names if list(_own_plugins(claimants(name, declared, group=_group_of(kind)), declared))
    )


def _how_to_activate(plugin: PluginIdentity, claims: Mapping[str, Sequence[Claim]]) -> str:
    ways = " or with ".join([f"--plugin {plugin.name}", *few_ways(list(activated_by(claims)), plugin.name)])
    return f"activate it with {ways}, or leave this out"


def _own_plugins(claims: Sequence[Claim], declared: Declared) -> Iterator[PluginIdentity]:
    """The plugins that the claims mean, each once; what a distribution claims for another's plugin does not count."""
    plugins = installed(declared)
    found = (plugin for claim in claims for plugin in plugins if is_for(claim, plugin))
    yield from dict.fromkeys(found)


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
