"""Whether the components that a run names exist, do what their kind promises, and fit together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from slime_core.config.engines import EngineModel
from slime_core.config.layout_rules import recomputes
from slime_core.config.options import KIND_NAMED_BY, ReadBy, UsedBy
from slime_core.config.sampling import RewardTerm, reward_names, reward_terms
from slime_core.config.schema import RunConfig, eval_sets
from slime_core.config.settings import Setting, as_words, core_settings, core_values, plugin_settings
from slime_core.errors import PluginError
from slime_core.plugins.component import SETTINGS_READ, AdvantageTraits, Component, Kind
from slime_core.plugins.discovery import CORE, PluginIdentity, similar
from slime_core.plugins.registry import Registry

FILLED = {
    "sample": frozenset({"rewards", "groups", "lengths", "mask_sums", "rollouts"}),
    "token": frozenset(
        {"rewards", "lengths", "mask", "tokens", "log_probs", "ref_log_probs", "rollout_log_probs", "values"}
    ),
}
"""Columns that an advantage estimator is handed, by its scope."""

SELECTED_BY = {setting: Kind(kind) for setting, kind in KIND_NAMED_BY.items() if setting != "policy_loss"}
"""Setting -> the kind whose components it names; the policy loss may follow from the estimator."""

FOR_TRAINING = frozenset({"sample_transforms", "data_source", "rollout_source", "advantage_estimator", "corrections"})
"""Settings among them that an evaluation does not use."""

HEAVY = frozenset({Kind.POLICY_LOSS, Kind.CORRECTION, Kind.MODEL_SPEC})
"""Kinds whose targets may import torch and Megatron."""


@dataclass(frozen=True, slots=True)
class Selected:
    """A component that a run uses, and why.

    Arguments:
        by: the setting that names it; for what no setting names, the reason in words.
    """

    kind: Kind
    component: Component
    plugin: PluginIdentity
    by: str

    @property
    def is_heavy(self) -> bool:
        """Whether it runs on learner ranks, so that importing its target may take seconds; checked where loaded."""
        traits = self.component.traits
        return self.kind in HEAVY or (isinstance(traits, AdvantageTraits) and traits.scope == "token")


def selected(config: RunConfig, registry: Registry, *, trains: bool, architecture: str | None) -> Iterator[Selected]:
    """Every component that the run uses.

    Arguments:
        architecture: of the start weights; None: no model is built.

    Raises:
        PluginError: no active plugin offers one of them.
    """
    for setting, kind in SELECTED_BY.items():
        if trains or setting not in FOR_TRAINING:
            for name in _named(config, setting):
                yield _selected(registry, kind, name, setting)
    for one in eval_sets(config):
        for setting in ("generate_function", "rm_type"):
            for name in _names(SELECTED_BY[setting], str(getattr(one, setting))):
                if name not in _named(config, setting):
                    yield _selected(registry, SELECTED_BY[setting], name, f"evaluation set {one.name}")
    for name in registry.names(Kind.TRACKER):
        yield _selected(registry, Kind.TRACKER, name, "its plugin is named")
    if trains:
        yield _policy_loss(config, registry)
        if architecture is not None and (spec := registry.model_spec(architecture)) is not None:
            yield _selected(registry, Kind.MODEL_SPEC, spec.name, f"architecture {architecture}")


def check_selection(
    config: RunConfig, registry: Registry, *, trains: bool, options: Mapping[str, object] | None = None
) -> None:
    """Returns if every component that ``config`` names can be used.

    Arguments:
        trains: False: an evaluation, which needs neither prompts nor an advantage estimator.
        options: plugin name -> its options object; of a plugin that is not there, the defaults.

    Raises:
        PluginError: no active plugin offers a component, it reads a column that nothing fills, or it does not read a
            setting that the run gives, or does what the run does in addition.
    """
    for found in selected(config, registry, trains=trains, architecture=None):
        _refuse_missing_setting(found, config, registry, options)
        _refuse_unread(found, config)
        if found.kind is Kind.ADVANTAGE_ESTIMATOR:
            _refuse_unfilled(found)
            _refuse_idle_replay(found, config)
        elif found.kind is Kind.REWARD_MODEL:
            _refuse_other_model(found, config)
        elif found.kind is Kind.CORRECTION and config.algorithm.use_rollout_logprobs:
            _refuse_equal_policies(found)
    check_numbers(config, registry, trains=trains)
    if trains:
        check_pairings(config, registry)


def has_critic(config: RunConfig, registry: Registry) -> bool:
    """Whether the run's advantage estimator reads the values of a critic, so that one is trained.

    Raises:
        PluginError: no active plugin offers the estimator.
    """
    return "values" in registry.traits(Kind.ADVANTAGE_ESTIMATOR, str(config.algorithm.advantage_estimator)).reads


def missing_setting(
    kind: Kind, name: str, config: RunConfig, registry: Registry, options: Mapping[str, object] | None = None
) -> str | None:
    """The setting that the component cannot do without and that the run does not give, as its flag without dashes;
    None: it has all.

    Arguments:
        options: plugin name -> its options object; of a plugin that is not there, the defaults.
    """
    traits = registry.traits(kind, name)
    if kind is Kind.REWARD_MODEL and traits.auxiliary_model is not None and config.rollout.rm_model is None:
        return "rm_model"
    plugin = registry.owner(kind, name).name
    declared = {plugin: registry.options[plugin]} if plugin in registry.options else {}
    given: Any = registry.options_of(plugin, options)
    for setting in plugin_settings(declared).values():
        required = [one for one in setting.notes(UsedBy) if one.required and one.kind in (None, kind)]
        if any(name in one.components for one in required) and dict(given)[setting.name] == setting.default:
            return setting.flag.removeprefix("--").replace("-", "_")
    return None


def _refuse_missing_setting(
    found: Selected, config: RunConfig, registry: Registry, options: Mapping[str, object] | None
) -> None:
    missing = missing_setting(found.kind, found.component.name, config, registry, options)
    if missing is not None:
        raise PluginError(
            f"{_reward_by(found, config)} needs {missing}, which is not set. Add --{missing.replace('_', '-')}, or "
            f"choose another {found.kind.words}."
        )


def _reward_by(found: Selected, config: RunConfig) -> str:
    named = f"rm_type = {config.rollout.rm_type}" if found.by == "rm_type" else found.by
    return f"{named}: {found.kind.words} {found.component.name!r} of {found.plugin}"


def _refuse_other_model(found: Selected, config: RunConfig) -> None:
    """Refuse a reward model whose auxiliary model is not served, or is served for something else."""
    traits: Any = found.component.traits
    wanted = traits.auxiliary_model
    if wanted is None:
        return
    who, name = _reward_by(found, config), str(config.rollout.rm_model)
    served = {model.name: model for model in config.engine.engine_models}
    others = ", ".join(f"{one} ({_gives(model)})" for one, model in sorted(served.items())) or "none"
    if name not in served:
        raise PluginError(
            f"{who} needs the auxiliary model rm_model = {name}{similar(name, served)}, but the run serves: {others}. "
            "Name one of them with --rm-model, or serve it: a table [[engine.engine_models]] with name and model_path."
        )
    if wanted not in ("any", _gives(served[name])):
        raise PluginError(
            f"{who} needs a model that gives {wanted}, but rm_model = {name} is served for {_gives(served[name])}. "
            f"The run serves: {others}. Give is_embedding = {str(wanted == 'scores').lower()} in its table "
            "[[engine.engine_models]], name another with --rm-model, or choose another reward model."
        )


def _gives(model: EngineModel) -> str:
    return "scores" if model.is_embedding else "texts"


def _refuse_unfilled(found: Selected) -> None:
    traits: Any = found.component.traits
    filled = FILLED[traits.scope]
    settings = SETTINGS_READ if traits.scope == "token" else SETTINGS_READ - {"kl"}
    unknown = sorted(traits.reads - filled - settings)
    if unknown:
        raise PluginError(
            f"advantage estimator {found.component.name!r} of {found.plugin} reads {', '.join(unknown)}, which nothing "
            f"fills; filled for scope {traits.scope!r} are {', '.join(sorted(filled))}. Choose another estimator, or a "
            "version of slime-rl that fills it."
        )


def _refuse_unread(found: Selected, config: RunConfig) -> None:
    """Refuse settings that say with :class:`~slime_core.config.options.ReadBy` that the component has to read them."""
    if found.kind is Kind.POLICY_LOSS and config.provided("policy_loss"):
        return
    reads: AbstractSet[str] = getattr(found.component.traits, "reads", frozenset())
    values, unread = core_values(config), defaultdict[str, list[Setting]](list)
    for name, setting in core_settings().items():
        for entry in setting.notes(ReadBy) if values[name] != setting.default else ():
            if entry.kind == found.kind and entry.column not in reads:
                unread[entry.column].append(setting)
    for column, settings in unread.items():
        given = ", ".join(f"{setting.name} = {as_words(values[setting.name])}" for setting in settings)
        raise PluginError(
            f"{given}: no effect, because {found.kind.words} {found.component.name!r} of {found.plugin}, chosen by "
            f"{found.by}, does not read {column}. Leave {' and '.join(setting.flag for setting in settings)} out, or "
            f"choose another {found.kind.words}."
        )


def _refuse_idle_replay(found: Selected, config: RunConfig) -> None:
    """Refuse routes that are kept for a later pass over a token where there is none; see ``RequiredColumns``."""
    traits: Any = found.component.traits
    settings = config.algorithm
    reads = traits.columns(kl_coef=settings.kl_coef)
    replays = (
        config.steps_per_rollout > 1
        or settings.keep_old_actor
        or settings.use_rollout_logprobs  # the rules of the settings speak
        or bool(config.provided("policy_loss"))
        or (traits.scope == "token" and "log_probs" in reads)
        or recomputes(config)
    )
    if config.learner.use_routing_replay and not replays:
        raise PluginError(
            "use_routing_replay = true has no effect: with num_steps_per_rollout = 1 the log-probs of before the step "
            f"are those of the step itself, and advantage estimator {found.component.name!r} of {found.plugin} reads "
            "none, so the learner passes over a token once and nothing is replayed. Leave --use-routing-replay out, or "
            "give --num-steps-per-rollout 2 or more."
        )


def _refuse_equal_policies(found: Selected) -> None:
    traits: Any = found.component.traits
    if traits.compares_engine:
        raise PluginError(
            "use_rollout_logprobs = true has the engine's log-probs in place of the learner's old ones, and "
            f"corrections name {found.component.name!r} of {found.plugin}, which compares the two: every ratio would "
            "be 1. Leave one of them out. A correction that does not compare them says so with "
            "CorrectionTraits(compares_engine=False)."
        )


def check_targets(
    config: RunConfig, registry: Registry, *, trains: bool, architecture: str | None, heavy: bool = False
) -> None:
    """Import what the run uses and hold it to its contract, except for what the core's own tests hold to it.

    Arguments:
        heavy: also targets that may import torch and Megatron, which takes seconds.

    Raises:
        PluginError: a target cannot be imported, or does not fit; names the plugin and the component.
    """
    for found in selected(config, registry, trains=trains, architecture=architecture):
        if found.plugin.distribution != CORE.distribution and (heavy or not found.is_heavy):
            registry.load(found.kind, f"{found.plugin.name}:{found.component.name}")


def _named(config: RunConfig, setting: str) -> tuple[str, ...]:
    """The names that a setting holds, wherever among the sections it stands."""
    value = next(dict(section)[setting] for _, section in config if setting in type(section).model_fields)
    if value is None:
        return ()
    return value if isinstance(value, tuple) else _names(SELECTED_BY[setting], str(value))


def _names(kind: Kind, written: str) -> tuple[str, ...]:
    """The components that a text of a setting names: of reward models, all parts of a sum."""
    return reward_names(written) if kind is Kind.REWARD_MODEL else (written,)


def _selected(registry: Registry, kind: Kind, name: str, by: str) -> Selected:
    return Selected(kind, registry.find(kind, name), registry.owner(kind, name), by)


def policy_loss(config: RunConfig, registry: Registry) -> str:
    """The policy loss of a run: the one that it names, or the one that its advantage estimator pairs with.

    Raises:
        PluginError: no active plugin offers the estimator.
    """
    if config.algorithm.policy_loss is not None:
        return config.algorithm.policy_loss
    return str(registry.traits(Kind.ADVANTAGE_ESTIMATOR, str(config.algorithm.advantage_estimator)).policy_loss)


def _policy_loss(config: RunConfig, registry: Registry) -> Selected:
    estimator = f"advantage estimator {config.algorithm.advantage_estimator}"
    by = estimator if config.algorithm.policy_loss is None else "policy_loss"
    return _selected(registry, Kind.POLICY_LOSS, policy_loss(config, registry), by)


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


# --- Samples of no engine ---------------------------------------------------------------------------------------------


def _refuse_unknown_log_probs(config: RunConfig, registry: Registry) -> None:
    name = config.rollout.generate_function
    if registry.traits(Kind.GENERATE_FUNCTION, name).samples_from_engine:
        return
    given = list(_reading_the_engine(config, registry))
    if given:
        raise PluginError(
            f"generate_function = {name}: the responses of {_who(registry, Kind.GENERATE_FUNCTION, name)} are not "
            "sampled by an engine, so that no engine gives their log-probabilities, which are read by "
            f"{', '.join(given)}. {_without(given)}, or choose another generate function."
        )


def _refuse_uncorrected(config: RunConfig, registry: Registry) -> None:
    """Refuse to correct stale samples with nothing that knows who sampled them; without a list, a rule has spoken."""
    settings, names = config.algorithm, config.algorithm.corrections
    knows = settings.use_rollout_logprobs or config.provided("correction")
    if config.rollout.stale_samples != "correct" or knows or not names:
        return
    if not any(registry.traits(Kind.CORRECTION, name).compares_engine for name in names):
        raise PluginError(
            f"stale_samples = correct trains samples above max_staleness, and of corrections = {' '.join(names)} none "
            "compares the learner with the engine that sampled them. Name one that does, such as --corrections tis, or "
            "choose --stale-samples requeue or evict."
        )


def _reading_the_engine(config: RunConfig, registry: Registry) -> Iterator[str]:
    """The parts of the run that need an engine's log-probabilities, or other facts about tokens that it sampled."""
    for name in config.algorithm.corrections:
        if registry.traits(Kind.CORRECTION, name).compares_engine:
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
    if registry.traits(Kind.GENERATE_FUNCTION, name).samples_from_engine:
        return
    shown = f"generate_function = {name}: {_who(registry, Kind.GENERATE_FUNCTION, name)} gives every sample of a group"
    estimator = str(config.algorithm.advantage_estimator)
    if "groups" in registry.traits(Kind.ADVANTAGE_ESTIMATOR, estimator).reads:
        raise PluginError(
            f"{shown} the same response, and {_who(registry, Kind.ADVANTAGE_ESTIMATOR, estimator)} learns from how "
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
    traits = registry.traits(Kind.ADVANTAGE_ESTIMATOR, name)
    if config.rollout.n_samples_per_prompt == 1 and "groups" in traits.reads and not traits.across_groups:
        raise PluginError(
            f"n_samples_per_prompt = 1: {_who(registry, Kind.ADVANTAGE_ESTIMATOR, name)} compares the rewards within "
            "a group, and a group of one has nothing to compare, so that nothing would be learned. Give "
            "--n-samples-per-prompt at least 2, or choose an estimator that reads no groups."
        )


def _refuse_equal_rewards(config: RunConfig, registry: Registry) -> None:
    rewards, estimator = config.rollout.rm_type, str(config.algorithm.advantage_estimator)
    names = reward_names(rewards)
    differ = any(not registry.traits(Kind.REWARD_MODEL, name).is_constant for name in names)
    judged = differ or _may_be_rewarded_otherwise(config, registry)
    if not judged and "rewards" in registry.traits(Kind.ADVANTAGE_ESTIMATOR, estimator).reads:
        raise PluginError(
            f"rm_type = {rewards}: {_who(registry, Kind.REWARD_MODEL, names[0])} gives every response the same "
            f"reward, and {_who(registry, Kind.ADVANTAGE_ESTIMATOR, estimator)} has nothing else to learn from. "
            "Choose a reward model with --rm-type, distil a teacher with --use-opd, or choose an estimator that reads "
            "no rewards, such as --advantage-estimator sft. A generate function that rewards its samples says so with "
            "GenerateTraits(rewards=True)."
        )


def _may_be_rewarded_otherwise(config: RunConfig, registry: Registry) -> bool:
    shaped = config.rollout.sample_transforms or config.algorithm.kl_coef
    return bool(
        config.provided("rewards")
        or shaped
        or registry.traits(Kind.GENERATE_FUNCTION, config.rollout.generate_function).rewards
    )


# --- What the registry says -------------------------------------------------------------------------------------------


def _who(registry: Registry, kind: Kind, name: str) -> str:
    return f"{name!r} of {registry.owner(kind, name)}"


@dataclass(frozen=True, slots=True)
class _Rewards:
    """A use of a reward model: ``where`` in the settings, which one, and which of several numbers counts."""

    where: str
    rm_type: str
    key: str | None


def check_numbers(config: RunConfig, registry: Registry, *, trains: bool) -> None:
    """Returns if one of the numbers that each reward model declares is named, by the run and its evaluation sets.

    Raises:
        PluginError: none is named, or one that is not among them. Without one, no response would have a reward.
    """
    for requested in _rewards_given(config, trains=trains):
        terms = reward_terms(requested.rm_type)
        for term in terms or (RewardTerm(1.0, requested.rm_type, requested.key),):
            traits = registry.traits(Kind.REWARD_MODEL, term.name)
            if traits.numbers and term.key not in traits.numbers:
                who = f"reward model {term.name!r} of {registry.owner(Kind.REWARD_MODEL, term.name)}"
                raise PluginError(
                    f"{requested.where}: {who} returns {_unnamed(term, traits.numbers, terms is not None)}"
                )


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
