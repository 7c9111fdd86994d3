"""Properties that the annotation of a setting may declare, in addition to the values that it takes.

    Flag        a flag without the plugin's name, and the former section of the setting in files
    NamesPrompts    the paths of the setting are prompt files
    UsedBy      the components that read the setting
    Needs       another setting without which this one has no effect
    Conflicts   another setting that excludes this one
    AtMost      another setting that this one may not exceed
    ReadBy      for settings of the core: the kind of component that has to read it
    NamesCode   the value names functions by path
    Once        the setting holds for one start
    Provides    tasks that the plugin does in place of the core if the setting is set

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
"""Settings with which rollouts are read, so that no engine is started."""

ONE_HALF = ("debug_rollout_only", *NO_ENGINES)
"""Settings with which the learner or the engines run alone."""


PROMPT_FILES = "prompts"
"""The data source that reads prompt files, those of evaluations too; slime-datasets has it."""

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
        section: former section of the setting in files, which is still read; None: none.
        value: placeholder of the value in help, such as ``URL``; None: that of its type.
    """

    name: str
    section: str | None = None
    value: str | None = None

    def __post_init__(self) -> None:
        if not self.name.startswith("--") or "_" in self.name or "." in self.name or not self.name[2:]:
            raise ValueError(f"Flag({self.name!r}); accepted: a flag with dashes, such as --length-limit")


@dataclass(frozen=True, slots=True)
class NamesPrompts:
    """The paths of the setting name prompt files: their formats activate plugins as those of ``--prompt-data`` do, and
    the built-in demo's settings are not filled in."""


class UsedBy:
    """Components of the plugin that read the setting; a run that uses none of them and sets it is refused.

    Rows of prompt files may name reward models, so a setting of a reward model is accepted if the run names the plugin
    (``--plugin``).

    Arguments:
        required: whether a run is refused that uses one of the components and leaves the setting at its default.
        kind: kind of the components, such as ``generate_function``, if components of several kinds share a name; None:
            any.
    """

    def __init__(self, *components: str, required: bool = False, kind: str | None = None) -> None:
        if not components:
            raise ValueError("UsedBy() names no component; leave it out, or name those that read the setting")
        self.components = components
        self.required = required
        self.kind = kind


Part = Literal["correction", "evaluation", "policy_loss", "reward_model", "rewards", "rollouts", "training_signal"]
"""Tasks that a plugin can do in place of the core.

    correction        weighs tokens that older weights sampled
    evaluation        implements ``slime_evaluate``, so that no evaluation set is needed
    policy_loss       computes the loss, so that settings that only the core's loss reads have no effect
    reward_model      scores every sample, also those whose row names a reward model
    rewards           may give samples rewards before the reward model scores them
    rollouts          makes whole rollouts, unless recorded ones are read
    training_signal   changes the training signal, so that equal rewards may have a gradient
"""


class Relation:
    """A condition that relates a setting to others.

    Arguments:
        settings: names of the other settings, of the same plugin or of the core, or a flag's name with underscores.
        equals: the value of the other settings that counts; None: any value except the default.
        when: the only value of this setting for which the condition holds; None: any value except the default.
        unless: other settings, any of which lifts the condition: name -> the value that counts, None for any value
            except the default. A name alone is short for ``{name: None}``.
        because: the reason, for messages: ``engines and learner take turns on the same devices``.
        part: the condition does not apply if an option of a plugin provides this part; see :class:`Provides`.
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
    """Another setting without which this one has no effect; of several, one is enough.

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
        """Whether ``value`` keeps within ``bound``."""
        return value <= bound


class Below(AtMost):
    """Other settings of the core that the value has to be below."""

    otherwise = "not below"

    def allows(self, value: float, bound: float) -> bool:
        """Whether ``value`` is below ``bound``."""
        return value < bound


@dataclass(frozen=True, slots=True)
class ReadBy:
    """The setting takes effect only where the run's component of ``kind`` says in the ``reads`` of its traits that it
    reads ``column``; else a run that sets it is refused.

    Example: ``ReadBy("advantage_estimator", "values")``, of the settings of the critic.
    """

    kind: str
    column: str


@dataclass(frozen=True, slots=True)
class Once:
    """The setting holds for one start: ``config.toml`` has it as a comment only, so that a resume has to give it
    again, and reads what followed from the setting rather than the file that it named."""


@dataclass(frozen=True, slots=True)
class CheckedIfGiven:
    """The setting is checked only if it is given: ``config.toml`` has its default as a comment, so that a run that
    repeats another is not checked more strictly."""


@dataclass(frozen=True, slots=True)
class NamesCode:
    """The setting names functions by path: ``file.py:function``, ``file.py``, ``package.module.function`` or
    ``package.module:function``; in a tuple, several.

    Before importing them, the core finds the functions and records their code with that of the plugins, so that every
    process runs the same code and a lock or a resume notices a change. The hooks ``slime_check`` and ``slime_prepare``
    receive the functions as :class:`~slime_core.FunctionSource`. A preset may not set such a setting. Because the
    core does not know what such a function reads, no setting of the run is refused for having no reader.

    Arguments:
        joined: the values of a tuple are the two parts of one path, ``module`` and ``function``.
    """

    joined: bool = False

    def paths(self, value: object) -> tuple[str, ...]:
        """The paths in a value of the setting; none where it is not set."""
        if not value:
            return ()
        found = tuple(map(str, value)) if isinstance(value, tuple | list) else (str(value),)
        return (":".join(found),) if self.joined else found


class Provides:
    """Tasks that the plugin does in place of the core where the setting is not at its default; checks of the
    settings take it into account."""

    def __init__(self, *parts: Part) -> None:
        if not parts:
            raise ValueError("Provides() names no part; leave it out, or name what the setting brings")
        self.parts = parts


@dataclass(frozen=True, slots=True)
class DerivedSetting:
    """A setting of the core that follows from an option; hook ``slime_settings`` yields them.

    Example: ``DerivedSetting("rm_type", "custom_rm_path", option="custom_rm_path")``: where that option is set, the
    component of the same name is the reward model. ``DerivedSetting("data_source", "streams", option="streaming_data",
    given="keep")``: that option selects the data source, unless the run names another.

    Arguments:
        name: of the setting of the core.
        value: read like one of a preset.
        option: of the plugin, from which it follows; messages and records name it. None: it follows from other settings
            of the core, as :func:`slime_settings` is given them, and counts as a preset of the plugin.
        given: where the run has another value. ``refuse``: one of a flag or a file is an error, one of a preset is
            replaced. ``keep``: one that is not the default stays. ``replace``: this one takes its place. ``later``: a
            flag wins over the option in a file and the option as a flag over a file; two of one layer are an error.
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
    """The options of a run's plugins, as far as the core reads them.

    Arguments:
        values: ``PLUGIN.NAME`` -> value of every option, without secrets.
        files: option -> the file or folder that it names.
        code: the options that name code, as ``custom_rm_path = mine.py``.
        provided: part -> the options that bring it, as ``custom_rm_path = mine.py``.
    """

    values: Mapping[str, JsonValue] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    code: tuple[str, ...] = ()
    provided: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)
