"""Properties of a setting that its annotation may declare.

    Flag            a flag without the plugin's name, and the former section of the setting in files
    NamesPrompts    the paths of the setting are prompt files
    UsedBy          the components that read the setting
    Needs           other settings without which this one has no effect
    Conflicts       other settings that exclude this one
    AtMost          another setting that this one may not exceed
    ReadBy          for settings of the core: the kind of component that has to read it
    NamesCode       the value names functions by path
    Once            the setting holds for one start
    CheckedIfGiven  the default is not checked
    Provides        tasks that the plugin does instead of the core if the setting is set

A condition is checked if its setting differs from its default; :mod:`slime_core.config.check` makes the messages.

This file does not import pydantic, because ``slime plugins list`` must work without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slime_core.types import JsonValue

NO_ENGINES = ("debug_train_only", "load_debug_rollout_data")
"""Settings with which a run reads rollouts from files and starts no engine."""

ONE_HALF = ("debug_rollout_only", *NO_ENGINES)
"""Settings with which a run starts only the learner or only the engines."""


PROMPT_FILES = "prompts"
"""The data source of slime-datasets, which reads prompt files, also for evaluations."""

KIND_NAMED_BY = {
    "generate_function": "generate_function",
    "rm_type": "reward_model",
    "sample_transforms": "sample_transform",
    "data_source": "data_source",
    "rollout_source": "rollout_source",
    "advantage_estimator": "advantage_estimator",
    "policy_loss": "policy_loss",
    "corrections": "correction",
}
"""Setting -> the kind of component that it names."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag without the plugin's name.

    Arguments:
        name: the flag, such as ``--length-limit``.
        section: former section of the setting in files, which is still read; None if it had none.
        value: placeholder of the value in help, such as ``URL``; None for that of its type.
    """

    name: str
    section: str | None = None
    value: str | None = None

    def __post_init__(self) -> None:
        if not self.name.startswith("--") or "_" in self.name or "." in self.name or not self.name[2:]:
            raise ValueError(f"Flag({self.name!r}); accepted: a flag with dashes, such as --length-limit")


@dataclass(frozen=True, slots=True)
class NamesPrompts:
    """The paths of the setting are prompt files, so that the run does not use those of the built-in demo."""


class UsedBy:
    """Components of the plugin that read the setting. A run that sets it and uses none of them is refused.

    Rows of prompt files may name reward models, so a setting of a reward model is accepted if the run names the plugin
    (``--plugin``).

    Arguments:
        required: refuse a run that uses one of the components and leaves the setting at its default.
        kind: kind of the components, such as ``generate_function``, if components of several kinds share a name; None
            for any kind.
    """

    def __init__(self, *components: str, required: bool = False, kind: str | None = None) -> None:
        if not components:
            raise ValueError("UsedBy() names no component; leave it out, or name those that read the setting")
        self.components = components
        self.required = required
        self.kind = kind


Part = Literal["correction", "evaluation", "policy_loss", "reward_model", "rewards", "rollouts", "training_signal"]
"""Tasks that a plugin can do instead of the core.

    correction        weighs tokens that older weights sampled
    evaluation        implements ``slime_evaluate``, so that no evaluation set is needed
    policy_loss       computes the loss, so that settings of the core's loss have no effect
    reward_model      scores every sample, even if its row names a reward model
    rewards           may give samples rewards before the reward model scores them
    rollouts          makes whole rollouts, unless recorded ones are read
    training_signal   changes the training signal, so that equal rewards may have a gradient
"""


class Relation:
    """A condition that relates a setting to others.

    Arguments:
        settings: names of the other settings, of the same plugin or of the core, or a flag's name with underscores.
        equals: the required or excluded value of the other settings; None for any value except the default.
        when: the value of this setting for which the condition holds; None for any value except the default.
        unless: other settings that lift the condition: name -> value, None for any value except the default. A name
            alone is short for ``{name: None}``.
        because: the reason, for messages: ``engines and learner take turns on the same devices``.
        part: the condition does not hold if an option of a plugin provides this part; see :class:`Provides`.
    """

    def __init__(
        self,
        *settings: str,
        equals: JsonValue = None,
        when: JsonValue = None,
        unless: str | Mapping[str, JsonValue] | None = None,
        because: str = "",
        part: Part | None = None,
    ) -> None:
        if not settings:
            raise ValueError(f"{type(self).__name__}() names no setting; leave it out, or name one")
        lifted: Mapping[str, JsonValue] = {unless: None} if isinstance(unless, str) else unless or {}
        self.settings = settings
        self.equals = equals
        self.when = when
        self.unless = tuple(lifted.items())
        self.because = because
        self.part = part


class Needs(Relation):
    """Other settings without which this one has no effect. One of several is enough.

    Example: ``Needs("use_kl_loss", "kl_coef")``, ``Needs("failed_samples", equals="retry")``,
    ``Needs("lr_wsd_decay_iters", when="WSD")``.
    """


class Conflicts(Relation):
    """Other settings that may not be set together with this one.

    Example: ``Conflicts("colocate", because="engines and learner take turns on the same devices")``,
    ``Conflicts("parity_interval", equals=0)``, ``Conflicts("over_sampling_batch_size", unless={"max_staleness": 0})``.
    """


class AtMost:
    """Other settings of the core that the value may not exceed; None sets no bound.

    Example: ``AtMost("lr", "critic_lr")``.

    Arguments:
        because: the reason, for messages.
    """

    otherwise = "above"

    def __init__(self, *settings: str, because: str = "") -> None:
        self.settings = settings
        self.because = because

    def allows(self, value: float, bound: float) -> bool:
        """Return whether ``value`` is within ``bound``."""
        return value <= bound


class Below(AtMost):
    """Other settings of the core that have to be larger."""

    otherwise = "not below"

    def allows(self, value: float, bound: float) -> bool:
        """Return whether ``value`` is below ``bound``."""
        return value < bound


@dataclass(frozen=True, slots=True)
class ReadBy:
    """The setting has an effect only if the run's component of ``kind`` has ``column`` in its trait ``reads``. Other
    runs that set it are refused.

    Example: ``ReadBy("advantage_estimator", "values")`` for the settings of the critic.
    """

    kind: str
    column: str


@dataclass(frozen=True, slots=True)
class Once:
    """The setting holds for one start. ``config.toml`` has it as a comment, so that a resume has to give it again, and
    has the settings that followed from it."""


@dataclass(frozen=True, slots=True)
class CheckedIfGiven:
    """The setting is checked only if it is given. ``config.toml`` has its default as a comment, so that a run that
    repeats another is not checked more strictly."""


@dataclass(frozen=True, slots=True)
class NamesCode:
    """The setting names functions by path: ``file.py:function``, ``file.py``, ``package.module.function`` or
    ``package.module:function``; a tuple names several.

    The core finds the functions without importing them and records their code with that of the plugins, so that every
    process runs the same code and a resume notices a change. The hooks ``slime_check`` and ``slime_prepare`` receive
    the functions as :class:`~slime_core.provisional.FunctionSource`. A preset may not set such a setting. Since the
    core does not know the settings that a function reads, it refuses no setting as unused.

    Arguments:
        joined: a tuple holds the two parts of one path, ``module`` and ``function``.
    """

    joined: bool = False

    def paths(self, value: object) -> tuple[str, ...]:
        """Return the paths in a value of the setting; none if it is unset."""
        if not value:
            return ()
        paths = tuple(map(str, value)) if isinstance(value, tuple | list) else (str(value),)
        return (":".join(paths),) if self.joined else paths


class Provides:
    """Tasks that the plugin does instead of the core if the setting is not at its default. Checks of settings read
    it."""

    def __init__(self, *parts: Part) -> None:
        if not parts:
            raise ValueError("Provides() names no part; leave it out, or name a part")
        self.parts = parts


@dataclass(frozen=True, slots=True)
class DerivedSetting:
    """A setting of the core that follows from an option. The hook ``slime_settings`` yields them.

    Examples: with ``DerivedSetting("rm_type", "custom_rm_path", option="custom_rm_path")`` the option of that name
    selects the reward model of that name. With ``DerivedSetting("data_source", "streams", option="streaming_data",
    given="keep")`` the option selects the data source, unless the run names another.

    Arguments:
        name: the setting of the core.
        value: its value, read like that of a preset.
        option: the option of the plugin from which it follows, for messages and records. None if it follows from
            other settings of the core; it then counts as a preset of the plugin.
        given: the case that the run sets another value. ``refuse``: one of a flag or a file is an error, one of a
            preset is replaced. ``keep``: one that is not the default stays. ``replace``: it is replaced. ``later``: a
            flag overrides an option in a file, and an option as a flag overrides a file; two in one layer are an error.
    """

    name: str
    value: JsonValue
    option: str | None = None
    given: Literal["refuse", "keep", "replace", "later"] = "refuse"

    def __post_init__(self) -> None:
        if self.given not in ("refuse", "keep", "replace", "later"):
            accepted = "accepted: refuse, keep, replace, later"
            raise ValueError(f"DerivedSetting({self.name!r}, given={self.given!r}): {accepted}")


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """The part of the plugins' options that the core reads.

    Arguments:
        values: ``PLUGIN.NAME`` -> value of every option, without secrets.
        files: option -> the file or folder that it names.
        code: the options that name code, such as ``custom_rm_path = mine.py``.
        provided: part -> the options that provide it, such as ``custom_rm_path = mine.py``.
    """

    values: Mapping[str, JsonValue] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    code: tuple[str, ...] = ()
    provided: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)
