"""Declarations of components: the name, the import path of the code, and the traits.

The core reads traits before it imports that code, and branches on them, never on names.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Literal, get_args, get_origin, get_type_hints

TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""The form of a component's import path."""

SETTINGS_READ = frozenset({"gamma", "kl", "lambd"})
"""Inputs of an advantage estimator in addition to columns."""

OF_DIVERGENCE = frozenset({"log_probs", "ref_log_probs"})
"""The columns from which an estimator takes the divergence."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Base of the traits of every kind. What is made has one of the values of each ``Literal``, and sets are frozen."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            found = getattr(self, name)
            if get_origin(hint) is AbstractSet:
                object.__setattr__(self, name, frozenset(found))
            literal = next((one for one in (hint, *get_args(hint)) if get_origin(one) is Literal), None)
            is_left_out = found is None and type(None) in get_args(hint)
            if literal is not None and found not in get_args(literal) and not is_left_out:
                accepted = ", ".join(map(repr, get_args(literal)))
                raise ValueError(f"{type(self).__name__}.{name} is {found!r}; accepted: {accepted}")


@dataclass(frozen=True, slots=True)
class AdvantageTraits(Traits):
    """Traits of an advantage estimator.

    Arguments:
        scope: ``sample``: over all samples of a rollout at once, one number per sample. ``token``: on every learner
            rank over its own samples, one number per response token.
        reads: the columns it needs filled, such as ``rewards``, ``groups`` or ``values``; and of these settings those
            that it takes into account: ``gamma``, ``lambd``, and ``kl`` for ``kl_coef``. With ``kl`` the columns
            ``log_probs`` and ``ref_log_probs`` are filled where ``kl_coef`` is not 0. A run that sets one of the three
            that is not read is refused.
        policy_loss: the policy loss it pairs with.
        across_groups: whether an advantage may depend on the rewards of other groups, as where the whole batch is
            whitened; the conformance kit holds every other estimator that reads groups to its own group.
    """

    scope: Literal["sample", "token"] = "sample"
    reads: AbstractSet[str] = frozenset()
    policy_loss: str = "clipped"
    across_groups: bool = False

    def columns(self, *, kl_coef: float) -> frozenset[str]:
        """The columns in ``reads``, those of the divergence included where ``kl_coef`` is not 0."""
        columns = frozenset(self.reads - SETTINGS_READ)
        return columns | OF_DIVERGENCE if kl_coef and "kl" in self.reads else columns


@dataclass(frozen=True, slots=True)
class PolicyLossTraits(Traits):
    """Traits of a policy loss.

    Arguments:
        reads: the per-token columns it needs: ``advantages``, ``old_log_probs``. A run that changes advantages, by
            ``normalize_advantages`` or ``use_opd``, is refused with a loss that does not read them.
    """

    reads: AbstractSet[str] = frozenset({"advantages", "old_log_probs"})


@dataclass(frozen=True, slots=True)
class CorrectionTraits(Traits):
    """Traits of an off-policy correction.

    Arguments:
        compares_engine: whether it holds the trainer's log-probabilities against the engine's. Such a correction has
            nothing to do where ``use_rollout_logprobs`` makes the engine's the old ones, and the run is refused.
    """

    compares_engine: bool = True


@dataclass(frozen=True, slots=True)
class TransformTraits(Traits):
    """Traits of a sample transform.

    Arguments:
        scope: ``group``: with each finished group; ``rollout``: with all groups at once.
    """

    scope: Literal["group", "rollout"] = "group"


@dataclass(frozen=True, slots=True)
class RewardTraits(Traits):
    """Traits of a reward model.

    Arguments:
        scope: ``sample``: as responses finish. ``group``: with whole prompt groups.
        isolated: it runs in processes with a time and a memory limit, which are ended where a reward exceeds them.
            False: inside the sampler, for what can neither hang nor crash; saves the way to another process.
        auxiliary_model: what it asks the auxiliary model ``rm_model`` for, without which a run is refused. ``scores``:
            the model has to be served with ``is_embedding``; ``texts``: without; ``any``: either. None: it asks none.
        is_constant: each of its rewards is the same, and a run that would learn from them alone is refused.
        numbers: names of the numbers that it returns for each response, where these are always the same; a run that
            names none of them is refused. Empty: a plain number, or names that are not known before.
    """

    scope: Literal["sample", "group"] = "sample"
    isolated: bool = True
    auxiliary_model: Literal["scores", "texts", "any"] | None = None
    is_constant: bool = False
    numbers: AbstractSet[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GenerateTraits(Traits):
    """Traits of a generate function.

    Arguments:
        scope: ``sample``: with one sample; ``group``: with a whole prompt group.
        sends_prompts_whole: each prompt goes to an engine as it is, with room for the longest response, so the core may
            refuse prompts that are too long before the run starts. False: it makes of them what it wants.
        samples_from_engine: engines sample what is trained and say how likely each token was. False: the responses are
            given, alike for every sample of a group; a run that needs the engines' log-probabilities, or groups, is
            refused.
        rewards: it may give samples their rewards itself; the reward model scores the others only.
        resumes: with ``partial_rollout``, it gets ``ABORTED`` samples with the tokens that they have and resumes
            them; what is finished in its group it leaves alone. False: what was not finished is restarted.
    """

    scope: Literal["sample", "group"] = "sample"
    sends_prompts_whole: bool = False
    samples_from_engine: bool = True
    rewards: bool = False
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class DataTraits(Traits):
    """Traits of a data source.

    Arguments:
        reads_prompt_files: they are rows of ``prompt_data`` in the core's form, so the core may look through that file
            before the run starts. False: ``prompt_data`` means what the data source makes of it; it may look itself
            (:class:`~slime_core.ScreenedDataSource`).
    """

    reads_prompt_files: bool = False


@dataclass(frozen=True, slots=True)
class RolloutSourceTraits(Traits):
    """A rollout source has no traits yet; the class keeps the place typed."""


@dataclass(frozen=True, slots=True)
class ModelSpecTraits(Traits):
    """Which checkpoints a model spec fits, and what of them it does not build.

    Arguments:
        architectures: of a Hugging Face ``config.json``.
        unsupported: ``package.module:function``; the function takes the object of a ``config.json`` and returns what
            of it the spec does not build, one text each, such as ``asks for sliding windows; only full attention is
            built``. It is called before anything starts and imports nothing heavy. None: the spec speaks when it
            builds.
        inputs: names of ``Sample.multimodal_train_inputs``, such as ``pixel_values``, that its model's forward takes as
            keyword arguments: those of the samples of a row, one after the other in the order of the row. Only chunks
            that embed tokens (the first pipeline stage) are handed them. A run whose samples carry others is refused.
    """

    architectures: AbstractSet[str] = frozenset()
    unsupported: str | None = None
    inputs: AbstractSet[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PromptFormatTraits(Traits):
    """A prompt format has no traits: its name says which files it reads."""


@dataclass(frozen=True, slots=True)
class TrackerTraits(Traits):
    """A tracker has no traits yet; the class keeps the place typed."""


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


class Kind(StrEnum):
    """The kinds of components; each has one registration hook, one traits class and one contract."""

    ADVANTAGE_ESTIMATOR = "advantage_estimator"
    POLICY_LOSS = "policy_loss"
    CORRECTION = "correction"
    REWARD_MODEL = "reward_model"
    SAMPLE_TRANSFORM = "sample_transform"
    GENERATE_FUNCTION = "generate_function"
    DATA_SOURCE = "data_source"
    PROMPT_FORMAT = "prompt_format"
    ROLLOUT_SOURCE = "rollout_source"
    MODEL_SPEC = "model_spec"
    TRACKER = "tracker"

    @property
    def words(self) -> str:
        """The kind as words, for messages."""
        return self.value.replace("_", " ")

    @property
    def one(self) -> str:
        """The words with an article."""
        return f"{'an' if self.value[0] in 'aeiou' else 'a'} {self.words}"

    @property
    def plural(self) -> str:
        """The ending of the kind's registration hook, and of the group of entry points that claim its components."""
        return "policy_losses" if self is Kind.POLICY_LOSS else f"{self.value}s"

    @property
    def traits(self) -> type[Traits]:
        """The class that a component of this kind carries as ``traits``."""
        return _TRAITS[self]


_TRAITS: dict[Kind, type[Traits]] = {
    Kind.ADVANTAGE_ESTIMATOR: AdvantageTraits,
    Kind.POLICY_LOSS: PolicyLossTraits,
    Kind.CORRECTION: CorrectionTraits,
    Kind.REWARD_MODEL: RewardTraits,
    Kind.SAMPLE_TRANSFORM: TransformTraits,
    Kind.GENERATE_FUNCTION: GenerateTraits,
    Kind.DATA_SOURCE: DataTraits,
    Kind.PROMPT_FORMAT: PromptFormatTraits,
    Kind.ROLLOUT_SOURCE: RolloutSourceTraits,
    Kind.MODEL_SPEC: ModelSpecTraits,
    Kind.TRACKER: TrackerTraits,
}


@dataclass(frozen=True, slots=True)
class Component:
    """One thing a run can select by name; its code is imported only where it is selected.

    Example::

        Component("grpo", target="slime_grpo.advantage:GroupRelative", traits=AdvantageTraits(scope="sample"),
                  summary="Group-relative advantage (DeepSeekMath, 2402.03300)")

    Arguments:
        name: what the run writes, such as ``--advantage-estimator grpo``; letters, digits and ``. _ + -``.
        target: ``package.module:attribute``; inside a single-file plugin, ``f"{__name__}:attribute"``.
        traits: an instance of the kind's traits class; None: that class's defaults.
        summary: one line for ``slime plugins show``.

    Raises:
        ValueError: ``name`` or ``target`` is not of that form.
    """

    name: str
    _: KW_ONLY
    target: str
    traits: Traits | None = None
    summary: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a component's name has letters, digits and . _ + - only; found {self.name!r}")
        if not TARGET.fullmatch(self.target):
            found = f"component {self.name!r} has the target {self.target!r}"
            raise ValueError(f"{found}; write it as 'package.module:attribute'")
