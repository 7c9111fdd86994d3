""":class:`Registration`, the argument of the hook ``slime_register(add)``, collects the additions of a plugin."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slime_core.types import EngineColumn

__all__ = ["Component", "Kind", "Registration", "Target"]

Target = type | Callable[..., object] | str
"""A class; a function, if the contract has one method; or ``"package.module:attribute"``, imported at first use."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

ANY_ARCHITECTURE = "*"
"""Stands for all architectures in those of a model spec."""

CHOOSES_CODE = frozenset({"plugins", "no_plugins", "allow_plugin_change", "load", "hf_checkpoint"})
"""Settings that no preset may set: they choose the code and the weights of a run."""


class Kind(StrEnum):
    """The kinds of components. Each has a method of :class:`Registration` and a contract."""

    ADVANTAGE_ESTIMATOR = "advantage_estimator"
    POLICY_LOSS = "policy_loss"
    CORRECTION = "correction"
    REWARD_MODEL = "reward_model"
    SAMPLE_TRANSFORM = "sample_transform"
    GENERATE_FUNCTION = "generate_function"
    DATA_SOURCE = "data_source"
    ROLLOUT_SOURCE = "rollout_source"
    MODEL_SPEC = "model_spec"
    TRACKER = "tracker"

    @property
    def words(self) -> str:
        """The kind in words, for messages: ``reward model``."""
        return self.value.replace("_", " ")


@dataclass(frozen=True)
class Component:
    """A component that a run can select by name.

    Arguments:
        traits: the keyword arguments of the method of :class:`Registration` that added it.
        text: the summary that the plugin gave.
    """

    kind: Kind
    name: str
    target: Target
    traits: SimpleNamespace
    text: str | None = None

    @property
    def place(self) -> str:
        """The import path of the target, for messages."""
        if isinstance(self.target, str):
            return self.target
        return f"{self.target.__module__}:{self.target.__qualname__}"


@dataclass
class Registration:
    """Collects what one plugin adds. Each method adds one thing.

    Every method for a kind of components takes the name by which a run selects the component, and its target: a class,
    a function if the contract has one method, or ``"package.module:attribute"`` for code that imports torch or
    Megatron. Classes and functions may take ``options`` (the plugin's options object) and ``run`` (a
    :class:`~slime_core.RunView`), or neither. ``summary`` is one line for ``slime plugins show``, by default the first
    line of the target's docstring.

    Raises:
        ValueError, TypeError: the methods, for a name, target or trait that they do not accept.
    """

    components: list[Component] = field(default_factory=list)
    preset_values: dict[str, object] = field(default_factory=dict)
    options_target: type[BaseModel] | str | None = None
    commands: dict[str, str] = field(default_factory=dict)
    advice: str | None = None
    device_target: str | None = None

    def advantage_estimator(
        self,
        name: str,
        target: Target,
        *,
        summary: str | None = None,
        scope: Literal["sample", "token"] = "sample",
        reads: AbstractSet[str] = frozenset(),
        policy_loss: str = "clipped",
        across_groups: bool = False,
    ) -> None:
        """Add an advantage estimator (contract ``AdvantageEstimator``, or ``TokenAdvantageEstimator``).

        Arguments:
            scope: ``sample``: called once with all samples of a rollout, returns one number a sample. ``token``: called
                on every learner rank with its samples, returns one number a response token.
            reads: the columns that it needs, such as ``rewards``, ``groups`` or ``values``, and the settings among
                ``gamma``, ``lambd`` and ``kl`` (for ``kl_coef``) that it uses. A run that sets one of the three is
                refused if the estimator does not read it. With ``kl``, the columns ``log_probs`` and ``ref_log_probs``
                are filled unless ``kl_coef`` is 0.
            policy_loss: the policy loss that it is used with, unless the run names another.
            across_groups: an advantage may depend on the rewards of other groups, because the batch is whitened.
        """
        traits = {"policy_loss": policy_loss, "across_groups": across_groups}
        self._add(Kind.ADVANTAGE_ESTIMATOR, name, target, summary, scope=scope, reads=_names(reads), **traits)

    def policy_loss(
        self,
        name: str,
        target: Target,
        *,
        summary: str | None = None,
        reads: AbstractSet[str] = frozenset({"advantages", "old_log_probs"}),
        reads_engine: Mapping[str, EngineColumn] = MappingProxyType({}),
    ) -> None:
        """Add a policy loss (contract ``PolicyLoss``).

        Arguments:
            reads: the columns that it needs: ``advantages``, ``old_log_probs``. A run that changes advantages
                (``normalize_advantages``, ``use_opd``) is refused if the loss does not read them.
            reads_engine: name -> data that the engine returns for each token; ``LossTerms.engine_columns_T`` has it.
        """
        self._add(Kind.POLICY_LOSS, name, target, summary, reads=_names(reads), reads_engine=dict(reads_engine))

    def correction(
        self,
        name: str,
        target: Target,
        *,
        summary: str | None = None,
        compares_engine: bool = True,
        reads_engine: Mapping[str, EngineColumn] = MappingProxyType({}),
    ) -> None:
        """Add an off-policy correction (contract ``Correction``).

        Arguments:
            compares_engine: it compares the learner's log-probabilities with the engine's. A run with
                ``use_rollout_logprobs`` is refused, because the two are equal there.
            reads_engine: as for a policy loss; ``CorrectionTerms.engine_columns_T`` has it.
        """
        traits = {"compares_engine": compares_engine, "reads_engine": dict(reads_engine)}
        self._add(Kind.CORRECTION, name, target, summary, **traits)

    def reward_model(
        self,
        name: str,
        target: Target,
        *,
        summary: str | None = None,
        scope: Literal["sample", "group"] = "sample",
        isolated: bool = True,
        auxiliary_model: Literal["scores", "texts", "any"] | None = None,
        is_constant: bool = False,
        numbers: AbstractSet[str] = frozenset(),
    ) -> None:
        """Add a reward model (contract ``RewardModel``; a function is its ``score``).

        Arguments:
            scope: ``sample``: scores responses as they finish. ``group``: scores whole prompt groups.
            isolated: it runs in worker processes that are killed at a time or memory limit. False: in the sampler, for
                code that can neither hang nor crash.
            auxiliary_model: the output that it needs from the model ``rm_model``, without which a run is refused.
                ``scores``: of a model with ``is_embedding``. ``texts``: of a model without. ``any``: of either.
            is_constant: every reward is the same. A run that would learn from it alone is refused.
            numbers: the names of the numbers that it returns for a response, if they are fixed. A run that selects none
                of them is refused. Empty if it returns plain numbers or the names vary.
        """
        traits = {"isolated": isolated, "auxiliary_model": auxiliary_model, "is_constant": is_constant}
        self._add(Kind.REWARD_MODEL, name, target, summary, scope=scope, numbers=_names(numbers), **traits)

    def sample_transform(
        self, name: str, target: Target, *, summary: str | None = None, scope: Literal["group", "rollout"] = "group"
    ) -> None:
        """Add a sample transform (contract ``GroupTransform``, or ``RolloutTransform``; a function is its call).

        Arguments:
            scope: ``group``: called with each finished group. ``rollout``: called once with all groups.
        """
        self._add(Kind.SAMPLE_TRANSFORM, name, target, summary, scope=scope)

    def generate_function(
        self,
        name: str,
        target: Target,
        *,
        summary: str | None = None,
        scope: Literal["sample", "group"] = "sample",
        sends_prompts_whole: bool = False,
        samples_from_engine: bool = True,
        rewards: bool = False,
        resumes: bool = False,
    ) -> None:
        """Add a generate function (contract ``GenerateFunction`` or ``GroupGenerateFunction``; a function is its call).

        Arguments:
            scope: ``sample``: called with one sample. ``group``: called with a whole prompt group.
            sends_prompts_whole: each prompt is sent to an engine unchanged, with room for the longest response, so the
                core may refuse prompts that are too long before the run starts.
            samples_from_engine: engines sample the trained tokens and report their log-probabilities. False: the
                responses are known and equal for every sample of a group. A run that needs log-probabilities of
                engines, or groups, is refused.
            rewards: it may set the rewards of its samples. The reward model scores the others.
            resumes: with ``partial_rollout``, it receives ``ABORTED`` samples with their tokens and continues them, and
                leaves finished samples alone. False: unfinished samples start again.
        """
        traits = {"sends_prompts_whole": sends_prompts_whole, "samples_from_engine": samples_from_engine}
        traits |= {"rewards": rewards, "resumes": resumes}
        self._add(Kind.GENERATE_FUNCTION, name, target, summary, scope=scope, **traits)

    def data_source(self, name: str, target: Target, *, summary: str | None = None) -> None:
        """Add a data source (contract ``DataSource``)."""
        self._add(Kind.DATA_SOURCE, name, target, summary)

    def rollout_source(self, name: str, target: Target, *, summary: str | None = None) -> None:
        """Add a rollout source, which makes whole rollouts (contract ``RolloutSource``)."""
        self._add(Kind.ROLLOUT_SOURCE, name, target, summary)

    def model_spec(
        self,
        name: str,
        target: Target,
        *,
        summary: str | None = None,
        architectures: AbstractSet[str] = frozenset(),
        implementation: str = "megatron",
        unsupported: str | None = None,
        inputs: AbstractSet[str] = frozenset(),
    ) -> None:
        """Add a model spec, which builds a model for the learner (contract ``ModelSpec``).

        Arguments:
            architectures: the architectures in ``config.json`` that it builds. ``{"*"}``: all; a spec that names an
                architecture is preferred.
            implementation: whose layers it builds; ``--model-impl`` chooses among several specs for an architecture.
            unsupported: ``package.module:function``. The function takes the object of a ``config.json``, and the run
                (:class:`~slime_core.RunView`) if it names ``run``. It returns a text for each part that the spec does
                not build, such as ``asks for sliding windows``. It is called before anything starts. None: the spec
                raises when it builds.
            inputs: names of ``Sample.multimodal_train_inputs``, such as ``pixel_values``, that the model's forward
                takes as keyword arguments: those of all samples of a row, in order, on the first pipeline stage only. A
                run whose samples carry others is refused.
        """
        traits = {"architectures": _names(architectures), "unsupported": unsupported, "inputs": _names(inputs)}
        self._add(Kind.MODEL_SPEC, name, target, summary, implementation=implementation, **traits)

    def tracker(self, name: str, target: Target, *, summary: str | None = None) -> None:
        """Add a tracker, which sends metrics elsewhere (contract ``Tracker``). It is used if the plugin takes part."""
        self._add(Kind.TRACKER, name, target, summary)

    def presets(self, **values: object) -> None:
        """Add defaults of settings, used if the run names the plugin: ``add.presets(advantage_estimator="grpo")``."""
        if refused := sorted(CHOOSES_CODE & values.keys()):
            raise ValueError(f"{', '.join(refused)} cannot be preset, because it chooses the code or weights of a run")
        self.preset_values |= values

    def options(self, options: type[BaseModel] | str) -> None:
        """Add the plugin's settings: a subclass of :class:`~slime_core.PluginOptions`, or its
        ``"package.module:attribute"``. The flags and the table in TOML files follow from it. Every field has a default
        and a description."""
        if self.options_target is not None:
            raise ValueError(f"options are added twice: {self.options_target} and {options}")
        self.options_target = _path(options) if isinstance(options, str) else options

    def command(self, name: str, target: str) -> None:
        """Add the command ``slime NAME``; two words add to another command: ``plugins new``.

        Arguments:
            target: ``package.module:function``, called as ``function(words) -> exit code``.
        """
        self.commands[name] = _path(target)

    def flag_advice(self, target: str) -> None:
        """Add a function that explains flags of other tools (provisional).

        Arguments:
            target: ``package.module:function``, called without arguments if a run has an unknown flag; returns
                flag -> message. See :func:`slime_core.config.engine_flags.flag_advice`.
        """
        self.advice = _path(target)

    def device(self, module: str) -> None:
        """Add the device that a run chooses with ``--device NAME``, NAME being that of the plugin (provisional).

        Arguments:
            module: path of a module with the members of :class:`slime_core.components.devices.Device`.
        """
        self.device_target = module

    def _add(self, kind: Kind, name: str, target: Target, summary: str | None, **traits: Any) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{kind.words} {name!r}: a name has letters, digits and . _ + - only")
        if isinstance(target, str):
            _path(target)
        elif not callable(target):
            raise TypeError(f"{kind.words} {name!r}: the target is {target!r}; give a class, a function or a path")
        if any(entry.kind is kind and entry.name == name for entry in self.components):
            raise ValueError(f"{kind.words} {name!r} is added twice")
        if (scope := traits.get("scope")) not in (accepted := _SCOPES.get(kind, (None,))):
            raise ValueError(f"{kind.words} {name!r}: scope={scope!r}; accepted: {', '.join(map(repr, accepted))}")
        self.components.append(Component(kind, name, target, SimpleNamespace(**traits), summary))


_SCOPES: Mapping[Kind, tuple[str, ...]] = {
    Kind.ADVANTAGE_ESTIMATOR: ("sample", "token"),
    Kind.REWARD_MODEL: ("sample", "group"),
    Kind.SAMPLE_TRANSFORM: ("group", "rollout"),
    Kind.GENERATE_FUNCTION: ("sample", "group"),
}


def _names(names: AbstractSet[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise TypeError(f"{names!r} is one text; give a set of names: {{{names!r}}}")
    return frozenset(names)


def _path(target: str) -> str:
    if not _PATH.fullmatch(target):
        raise ValueError(f"the target is {target!r}; write it as 'package.module:attribute'")
    return target
