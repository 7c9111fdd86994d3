"""Whether generate function, reward models, corrections and advantage estimator of a run fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime_core.config.choices import RewardTerm, reward_names, reward_terms
from slime_core.config.eval_sets import eval_sets
from slime_core.config.schema import RunConfig
from slime_core.errors import PluginError
from slime_core.plugins.component import Kind
from slime_core.plugins.discovery import similar
from slime_core.plugins.registry import Registry

__all__ = [
    "check_numbers",
    "check_pairings",
]


def check_pairings(config: RunConfig, registry: Registry) -> None:
    """Returns if the components of a run that trains go together, as far as their traits say.

    Raises:
        PluginError: one needs what another does not make; names the settings, the components and the next step.
    """
    if config.rollout.rollout_source is not None:
        return
    _refuse_unknown_log_probs(config, registry)
    _refuse_uncorrected(config, registry)
    if config.debug.generates and config.debug.trains:
        _refuse_equal_answers(config, registry)
        if not _learns_from_something_else(config):
            _refuse_groups_of_one(config, registry)
            _refuse_equal_rewards(config, registry)


# --- What no engine has drawn -----------------------------------------------------------------------------------------


def _refuse_unknown_log_probs(config: RunConfig, registry: Registry) -> None:
    name = config.rollout.generate_function
    if _traits(registry, Kind.GENERATE_FUNCTION, name).samples_from_engine:
        return
    given = list(_reading_the_engine(config, registry))
    if given:
        raise PluginError(
            f"generate_function = {name}: the responses of {_named(registry, Kind.GENERATE_FUNCTION, name)} are not "
            "drawn by an engine, so no engine says how likely their tokens were, and it is read by "
            f"{', '.join(given)}. {_without(given)}, or choose another generate function."
        )


def _refuse_uncorrected(config: RunConfig, registry: Registry) -> None:
    """Refuse to correct stale samples with nothing that knows who drew them; without a list, a rule has spoken."""
    settings, names = config.algorithm, config.algorithm.corrections
    knows = settings.use_rollout_logprobs or config.provided("correction")
    if config.rollout.stale_samples != "correct" or knows or not names:
        return
    if not any(_traits(registry, Kind.CORRECTION, name).compares_engine for name in names):
        raise PluginError(
            f"stale_samples = correct trains samples above max_staleness, and of corrections = {' '.join(names)} none "
            "compares the learner with the engine that drew them. Name one that does, such as --corrections tis, or "
            "choose --stale-samples requeue or evict."
        )


def _reading_the_engine(config: RunConfig, registry: Registry) -> Iterator[str]:
    """What of the run needs an engine's log-probabilities, or what else it says of tokens that it drew."""
    for name in config.algorithm.corrections:
        if _traits(registry, Kind.CORRECTION, name).compares_engine:
            yield f"corrections = {name}"
    yield from config.provided("correction")
    for setting in ("use_rollout_logprobs", "get_mismatch_metrics", "true_on_policy_mode"):
        if getattr(config.algorithm, setting):
            yield f"{setting} = true"
    if config.learner.use_rollout_routing_replay:
        yield "use_rollout_routing_replay = true"
    if config.weights.parity_interval and config.debug.generates and config.debug.trains:
        yield f"parity_interval = {config.weights.parity_interval}"


def _without(given: list[str]) -> str:
    others = [one.partition(" = ")[0].replace("_", "-") for one in given if not one.startswith("parity_interval")]
    out = f"leave --{' and --'.join(others)} out" if others else ""
    parity = "give --parity-interval 0" if len(others) < len(given) else ""
    steps = " and ".join(step for step in (parity, out) if step)
    return steps[0].upper() + steps[1:]


def _refuse_equal_answers(config: RunConfig, registry: Registry) -> None:
    name, size = config.rollout.generate_function, config.rollout.n_samples_per_prompt
    if _traits(registry, Kind.GENERATE_FUNCTION, name).samples_from_engine:
        return
    shown = (
        f"generate_function = {name}: {_named(registry, Kind.GENERATE_FUNCTION, name)} gives every sample of a group"
    )
    estimator = str(config.algorithm.advantage_estimator)
    if "groups" in _traits(registry, Kind.ADVANTAGE_ESTIMATOR, estimator).reads:
        raise PluginError(
            f"{shown} the same response, and {_named(registry, Kind.ADVANTAGE_ESTIMATOR, estimator)} learns from how "
            "the rewards of a group differ. Choose an estimator that reads no groups, such as --advantage-estimator "
            "sft, or another generate function."
        )
    if size > 1:
        raise PluginError(
            f"{shown} the same response, and n_samples_per_prompt = {size} would train as many equal copies of each. "
            "Give --n-samples-per-prompt 1."
        )


# --- What learns from rewards -----------------------------------------------------------------------------------------


def _learns_from_something_else(config: RunConfig) -> bool:
    return bool(config.algorithm.use_opd or config.provided("training_signal") or config.provided("policy_loss"))


def _refuse_groups_of_one(config: RunConfig, registry: Registry) -> None:
    name = str(config.algorithm.advantage_estimator)
    traits = _traits(registry, Kind.ADVANTAGE_ESTIMATOR, name)
    if config.rollout.n_samples_per_prompt == 1 and "groups" in traits.reads and not traits.across_groups:
        raise PluginError(
            f"n_samples_per_prompt = 1: {_named(registry, Kind.ADVANTAGE_ESTIMATOR, name)} compares the rewards within "
            "a group, and a group of one has nothing to compare, so that nothing would be learned. Give "
            "--n-samples-per-prompt at least 2, or choose an estimator that reads no groups."
        )


def _refuse_equal_rewards(config: RunConfig, registry: Registry) -> None:
    rewards, estimator = config.rollout.rm_type, str(config.algorithm.advantage_estimator)
    names = reward_names(rewards)
    differ = any(not _traits(registry, Kind.REWARD_MODEL, name).is_constant for name in names)
    judged = differ or _may_be_rewarded_otherwise(config, registry)
    if not judged and "rewards" in _traits(registry, Kind.ADVANTAGE_ESTIMATOR, estimator).reads:
        raise PluginError(
            f"rm_type = {rewards}: {_named(registry, Kind.REWARD_MODEL, names[0])} gives every response the same "
            f"reward, and {_named(registry, Kind.ADVANTAGE_ESTIMATOR, estimator)} has nothing else to learn from. "
            "Choose a reward model with --rm-type, distil a teacher with --use-opd, or choose an estimator that reads "
            "no rewards, such as --advantage-estimator sft. A generate function that rewards its samples says so with "
            "GenerateTraits(rewards=True)."
        )


def _may_be_rewarded_otherwise(config: RunConfig, registry: Registry) -> bool:
    shaped = config.rollout.sample_transforms or config.algorithm.kl_coef
    return bool(
        config.provided("rewards")
        or shaped
        or _traits(registry, Kind.GENERATE_FUNCTION, config.rollout.generate_function).rewards
    )


# --- What the registry says -------------------------------------------------------------------------------------------


def _traits(registry: Registry, kind: Kind, name: str) -> Any:
    return registry.find(kind, name).traits


def _named(registry: Registry, kind: Kind, name: str) -> str:
    return f"{name!r} of {registry.owner(kind, name)}"


@dataclass(frozen=True, slots=True)
class _Rewards:
    """What is to be rewarded how: ``where`` in the settings, by what, and which of several numbers counts."""

    where: str
    rm_type: str
    key: str | None


def check_numbers(config: RunConfig, registry: Registry, *, trains: bool) -> None:
    """Returns if one of the numbers that each reward model declares is named, by the run and its evaluation sets.

    Raises:
        PluginError: none is named, or one that is not among them. Without one, no response would have a reward.
    """
    for asked in _rewards_given(config, trains=trains):
        terms = reward_terms(asked.rm_type)
        for term in terms or (RewardTerm(1.0, asked.rm_type, asked.key),):
            traits: Any = registry.find(Kind.REWARD_MODEL, term.name).traits
            if traits.numbers and term.key not in traits.numbers:
                who = f"reward model {term.name!r} of {registry.owner(Kind.REWARD_MODEL, term.name)}"
                raise PluginError(f"{asked.where}: {who} returns {_unnamed(term, traits.numbers, terms is not None)}")


def _rewards_given(config: RunConfig, *, trains: bool) -> Iterator[_Rewards]:
    if trains:
        settings = config.rollout
        yield _Rewards(f"rm_type = {settings.rm_type}", settings.rm_type, settings.reward_key)
    for one in eval_sets(config):
        yield _Rewards(f"evaluation set {one.name}", one.rm_type, one.reward_key)


def _unnamed(term: RewardTerm, numbers: frozenset[str], is_part: bool) -> str:
    named = "none is named" if term.key is None else f"{term.key!r} is none{similar(term.key, numbers)}"
    one = min(numbers)
    advice = f"Say which one counts: --reward-key {one}, or reward_key in the table of an evaluation set."
    if is_part:
        advice = f"Write {term.name}:{one} in the sum, or another of them."
    return f"{', '.join(sorted(numbers))} for each response, and of these {named}. {advice}"
