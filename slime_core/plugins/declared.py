"""Reads the entry points of installed distributions in slime's groups; imports nothing, and survives broken metadata.

    slime             grpo = "slime_grpo.plugin"         a plugin, and the module that holds its hooks
    slime.models      Qwen3ForCausalLM = "models"        checkpoints of this architecture need that plugin
    slime.requires    grpo = "searchr1"                  plugin searchr1 of this distribution requires plugin grpo
    slime.commands    "plugins.new" = "package.module:function"    the command slime plugins new
    slime.corrections tis = "offpolicy"                  a run that names correction tis activates plugin offpolicy
    slime.flags       tis-clip = "offpolicy"             the flag --tis-clip is an option of plugin offpolicy; a file
                                                         that gives it activates the plugin
    slime.flags       buffer-data = "datasets:activates" giving --buffer-data activates plugin datasets

:data:`KIND_GROUPS` lists the groups of component names, :data:`OUR_DISTRIBUTIONS` what our own distributions have, for
messages where one is not installed; a test compares it with their claims.

Of two copies of one distribution on the path, only the first is what an import would find, so only that one counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import importlib_metadata as metadata
from importlib_metadata import EntryPoint

from slime_core.errors import PluginError

OUR_DISTRIBUTIONS: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(
    Path(__file__).with_name("our_distributions.json").read_text(encoding="utf-8")
)
"""Distribution -> group of its entry points -> their names."""


def distribution_of(group: str, name: str) -> str | None:
    """Our distribution that has ``name``; None: none has.

    Example: ``distribution_of("slime.models", "LlamaForCausalLM")`` is ``"slime-models"``.

    Arguments:
        group: of entry points; see :mod:`slime_core.plugins.declared`.
    """
    return next((one for one, groups in OUR_DISTRIBUTIONS.items() if name in groups.get(group, ())), None)


PLUGIN_GROUP = "slime"
ARCHITECTURE_GROUP = "slime.models"
REQUIRES_GROUP = "slime.requires"
COMMAND_GROUP = "slime.commands"
FLAG_GROUP = "slime.flags"

KIND_GROUPS = {
    "advantage_estimator": "slime.advantage_estimators",
    "policy_loss": "slime.policy_losses",
    "correction": "slime.corrections",
    "reward_model": "slime.reward_models",
    "sample_transform": "slime.sample_transforms",
    "generate_function": "slime.generate_functions",
    "data_source": "slime.data_sources",
    "rollout_source": "slime.rollout_sources",
    "prompt_format": "slime.prompt_formats",
}
"""Kind of component -> the group in which distributions claim the names of such components."""

_BROKEN = (OSError, ValueError, TypeError, AttributeError, LookupError, metadata.PackageNotFoundError)
"""What ``importlib_metadata`` raises on files that are cut short, in another encoding, no metadata at all, or under
another name than that of their folder."""


class _Distribution(Protocol):
    """The attributes that are read of a distribution; those of ``importlib.metadata`` and its backport have them."""

    def read_text(self, filename: str, /) -> str | None: ...
    def locate_file(self, path: str, /) -> object: ...
    @property
    def entry_points(self) -> Iterable[EntryPoint]: ...
    @property
    def requires(self) -> list[str] | None: ...


ACTIVATES = "activates"
"""After the plugin's name in a claim of a flag: giving the flag activates the plugin."""


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
        return self.value.partition(":")[2] == ACTIVATES


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
    """The declarations of all distributions on ``sys.path``."""
    entries: list[Declaration] = []
    unreadable: list[str] = []
    for distribution in metadata.distributions():
        try:
            if "[slime" in (distribution.read_text("entry_points.txt") or ""):
                entries += _entries(distribution)
        except _BROKEN as problem:
            where = distribution.locate_file("")
            unreadable.append(f"a distribution in {where} ({type(problem).__name__}: {problem})")
    return Declared(tuple(entries), tuple(unreadable))


def canonical(distribution: str) -> str:
    """The name as indexes compare it: ``Slime_GRPO`` is ``slime-grpo``."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def required_lines(distribution: str) -> list[str]:
    """The ``Requires-Dist`` lines of an installed distribution, as they are written.

    Raises:
        importlib_metadata.PackageNotFoundError: it is not installed.
    """
    found = metadata.distribution(distribution)
    if not found.read_text("METADATA"):  # an egg keeps them in a file of their own
        return found.requires or []
    return re.findall(r"^Requires-Dist:[ \t]*(\S.*?)[ \t]*$", _about(found), flags=re.MULTILINE | re.IGNORECASE)


def entry_point_of(distribution: str, group: str, name: str) -> str:
    """The module, or ``module:attribute``, that an entry point of an installed distribution names.

    Raises:
        PluginError: the distribution is not installed, or does not declare the entry point.
    """
    found: list[str] = [
        point.value
        for one in metadata.distributions(name=distribution)
        for point in one.entry_points
        if (point.group, point.name) == (group, name)
    ]
    if not found:
        raise PluginError(
            f"{distribution} is not installed here: no metadata of it declares {name!r} in group {group!r}.\n"
            f"Install {distribution} into this environment, from its wheel or with pip install -e of its repository."
        )
    return found[0]


def _entries(distribution: _Distribution) -> Iterator[Declaration]:
    about = _about(distribution)
    name, version = _field("Name", about), _field("Version", about)
    first = metadata.distribution(name)
    if first.locate_file("") != distribution.locate_file("") or _about(first) != about:
        return  # an import would find another copy of it
    for point in distribution.entry_points:
        if point.group == PLUGIN_GROUP or point.group.startswith(f"{PLUGIN_GROUP}."):
            yield Declaration(point.group, point.name, point.value, name, version)


def _about(distribution: _Distribution) -> str:
    """The headers of its METADATA, without the description that follows them."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    return text.partition("\n\n")[0]


def _field(name: str, about: str) -> str:
    # The parser of importlib_metadata takes several times as long, and hundreds of plugins may be installed.
    found = re.search(rf"^{name}:[ \t]*(\S.*?)[ \t]*$", about, flags=re.MULTILINE | re.IGNORECASE)
    if found is None:
        raise ValueError(f"its METADATA has no {name}")
    return found[1]
