"""What the annotation of a setting may say about it, besides what values it takes.

    Flag        a flag without the plugin's name, the section of files in which the setting once stood, and the
                component that the setting selects
    NamesPrompts    its paths are prompt files
    UsedBy      the components that read the setting
    Needs       another setting without which this one has no effect
    Conflicts   another setting that excludes this one

A condition speaks where its setting has another value than its default; the messages are made in one place
(:mod:`slime_core.config.conditions`).
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.types import JsonValue

__all__ = ["NO_ENGINES", "ONE_HALF", "Conflicts", "Flag", "NamesPrompts", "Needs", "UsedBy"]

NO_ENGINES = ("debug_train_only", "load_debug_rollout_data")
"""Settings with which rollouts are read, so that no engine is started."""

ONE_HALF = ("debug_rollout_only", *NO_ENGINES)
"""Settings with which the learner or the engines run alone."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag without the plugin's name in it.

    Arguments:
        name: as the command line spells it, ``--length-limit``.
        section: of files in which the setting stood before it belonged to the plugin, and is still read; None: none.
        value: what stands for the value in help, such as ``URL``; None: what its type says.
        selects: ``KIND:NAME`` of a component of the plugin. A run that gives the setting another value than its default
            uses that component where it would use the core's default one; a component that the user names stays. None:
            the setting selects nothing.
    """

    name: str
    section: str | None = None
    value: str | None = None
    selects: str | None = None

    def __post_init__(self) -> None:
        if not self.name.startswith("--") or "_" in self.name or "." in self.name or not self.name[2:]:
            raise ValueError(f"Flag({self.name!r}): accepted is a flag with dashes, such as --length-limit")
        if self.selects is not None:
            _require_component(self.name, self.selects)


@dataclass(frozen=True, slots=True)
class NamesPrompts:
    """The paths of the setting name prompt files: their formats activate plugins as those of ``--prompt-data`` do, and
    the built-in demo's settings are not filled in."""


@dataclass(frozen=True, slots=True, init=False)
class UsedBy:
    """Components of the plugin that read the setting; a run that uses none of them and sets it is refused.

    Rows of prompt files may name reward models, so that a setting of theirs is not refused where the run names the
    plugin (``--plugin``).

    Arguments:
        required: they cannot do without it; a run that uses one of them and leaves the setting at its default is
            refused.
    """

    components: tuple[str, ...]
    required: bool

    def __init__(self, *components: str, required: bool = False) -> None:
        if not components:
            raise ValueError("UsedBy() names no component; leave it out, or name those that read the setting")
        object.__setattr__(self, "components", components)
        object.__setattr__(self, "required", required)


@dataclass(frozen=True, slots=True, init=False)
class _Relation:
    """What a setting says about others.

    Arguments:
        settings: their names, of the same plugin, of the core, or with a flag of their own.
        equals: the value of theirs that counts; None: any other than the default.
        when: the only value of this setting for which it holds; None: any other than the default.
        unless: another setting with which it does not hold, if that has another value than its default.
        because: the reason, for messages: ``engines and learner take turns on the same devices``.
    """

    settings: tuple[str, ...]
    equals: JsonValue
    when: JsonValue
    unless: str
    because: str

    def __init__(
        self, *settings: str, equals: JsonValue = None, when: JsonValue = None, unless: str = "", because: str = ""
    ) -> None:
        if not settings:
            raise ValueError(f"{type(self).__name__}() names no setting; leave it out, or name one")
        for name, value in {
            "settings": settings,
            "equals": equals,
            "when": when,
            "unless": unless,
            "because": because,
        }.items():
            object.__setattr__(self, name, value)


class Needs(_Relation):
    """Another setting without which this one has no effect; of several, one is enough.

    Example: ``Needs("use_kl_loss", "kl_coef")``, ``Needs("failed_samples", equals="retry")``,
    ``Needs("lr_wsd_decay_iters", when="WSD")``.
    """

    __slots__ = ()


class Conflicts(_Relation):
    """Other settings of which none may be set too.

    Example: ``Conflicts("colocate", because="engines and learner take turns on the same devices")``,
    ``Conflicts("parity_interval", equals=0)``.
    """

    __slots__ = ()


def _require_component(flag: str, selects: str) -> None:
    from slime_core.config.choices import KIND_NAMED_BY  # imports pydantic, which a list of plugins does without

    kind, _, component = selects.partition(":")
    if not component or kind not in KIND_NAMED_BY.values():
        raise ValueError(
            f"Flag({flag!r}, selects={selects!r}): accepted is a kind and a component, such as data_source:mine; kinds "
            f"are {', '.join(sorted(KIND_NAMED_BY.values()))}"
        )
