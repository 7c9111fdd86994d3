"""Checks the components that a run names (they exist, fulfil the contract of their kind, and fit together), and that
every setting of the run takes effect.

The annotation of a plugin's setting may name other settings (:mod:`slime_core.config.check`) and the components that
read it. A plugin checks everything else, such as an order between two numbers, in ``slime_check``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from slime_core.components.construction import load, run_view
from slime_core.components.functions import Code
from slime_core.config.check import blaming, called
from slime_core.config.engines import EngineModel
from slime_core.config.load import Resolved
from slime_core.config.options import KIND_NAMED_BY, ReadBy, UsedBy
from slime_core.config.sampling import RewardTerm, reward_names, reward_terms
from slime_core.config.schema import RunConfig, eval_sets
from slime_core.config.settings import Setting, as_words, core_settings, core_values, plugin_settings
from slime_core.errors import PluginError, config_error
from slime_core.plugins.discovery import CORE, Plugin
from slime_core.plugins.hooks import PLACES
from slime_core.plugins.lifecycle import Hooks, PerPlugin
from slime_core.plugins.registration import Component, Kind
from slime_core.plugins.registry import Registry
from slime_core.types import EngineColumn

SETTINGS_READ = frozenset({"gamma", "kl", "lambd"})
"""Settings that an advantage estimator may read, in addition to columns."""

FILLED = {
    "sample": frozenset({"rewards", "groups", "lengths", "mask_sums", "rollouts"}),
    "token": frozenset(
        {"rewards", "lengths", "mask", "tokens", "log_probs", "ref_log_probs", "rollout_log_probs", "values"}
    ),
}
"""Columns that an advantage estimator receives, by its scope."""

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

    component: Component
    plugin: Plugin
    by: str

    @property
    def kind(self) -> Kind:
        """The kind of the component."""
        return self.component.kind

    @property
    def traits(self) -> Any:
        """The traits of the component, an instance of its kind's traits class."""
        return self.component.traits

    @property
    def is_heavy(self) -> bool:
        """Return whether it runs on learner ranks. Importing its target may take seconds, so ranks check it."""
        return self.kind in HEAVY or (self.kind is Kind.ADVANTAGE_ESTIMATOR and self.traits.scope == "token")

    def __str__(self) -> str:
        return f"{self.component.name!r} of {self.plugin}"


def selected(config: RunConfig, registry: Registry, *, trains: bool, architecture: str | None) -> Iterator[Selected]:
    """Yield every component that the run uses.

    Arguments:
        architecture: of the start weights. None if no model is built.

    Raises:
        PluginError: no active plugin offers one of them.
    """
    for setting, kind in SELECTED_BY.items():
        if trains or setting not in FOR_TRAINING:
            for name in _named(config, setting):
                yield _selected(registry, kind, name, setting)
    for evaluation in eval_sets(config):
        for setting in ("generate_function", "rm_type"):
            for name in _names(SELECTED_BY[setting], str(getattr(evaluation, setting))):
                if name not in _named(config, setting):
                    yield _selected(registry, SELECTED_BY[setting], name, f"evaluation set {evaluation.name}")
    for name in registry.names(Kind.TRACKER):
        yield _selected(registry, Kind.TRACKER, name, "its plugin is active")
    if trains:
        yield _policy_loss(config, registry)
        implementation = config.model.model_impl
        spec = None if architecture is None else registry.model_spec(architecture, implementation=implementation)
        if spec is not None:
            yield Selected(spec[1], spec[0], f"architecture {architecture}")


def check_selection(
    config: RunConfig, registry: Registry, *, trains: bool, options: Mapping[str, object] | None = None
) -> None:
    """Raise PluginError if a component that ``config`` names cannot be used.

    Arguments:
        trains: False: an evaluation, which needs neither prompts nor an advantage estimator.
        options: plugin name -> its options object; of a plugin that is not there, the defaults.

    Raises:
        PluginError: no active plugin offers a component, it reads a column that nothing fills, or it does not read a
            setting that the run gives, or does what the run does in addition.
    """
    for chosen in selected(config, registry, trains=trains, architecture=None):
        _refuse_missing_setting(chosen, config, registry, options)
        _refuse_unread(chosen, config)
        if chosen.kind is Kind.ADVANTAGE_ESTIMATOR:
            _refuse_unfilled(chosen)
        elif chosen.kind is Kind.REWARD_MODEL:
            _refuse_other_model(chosen, config)
        elif chosen.kind is Kind.CORRECTION and config.algorithm.use_rollout_logprobs:
            _refuse_equal_policies(chosen)
    check_numbers(config, registry, trains=trains)
    if trains:
        engine_columns(config, registry)
        check_pairings(config, registry)


def has_critic(config: RunConfig, registry: Registry) -> bool:
    """Return whether the run trains a critic, because its advantage estimator reads values.

    Raises:
        PluginError: no active plugin offers the estimator.
    """
    return "values" in _estimator(config, registry).traits.reads


def engine_columns(config: RunConfig, registry: Registry) -> dict[str, EngineColumn]:
    """Return the data of engines that the policy loss and the corrections of the run read, by name.

    Raises:
        PluginError: no active plugin offers one of them, or two of them give one name to different data.
    """
    has_loss = config.algorithm.advantage_estimator is not None and not config.provided("policy_loss")
    readers = [_policy_loss(config, registry)] if has_loss else []
    readers += [_selected(registry, Kind.CORRECTION, name, "corrections") for name in config.algorithm.corrections]
    columns: dict[str, EngineColumn] = {}
    for reader in readers:
        for name, column in reader.traits.reads_engine.items():
            if columns.setdefault(name, column) != column:
                raise PluginError(f"{reader.kind.words} {reader}: another component reads other data as {name!r}.")
    return columns


def missing_setting(
    kind: Kind, name: str, config: RunConfig, registry: Registry, options: Mapping[str, object] | None = None
) -> str | None:
    """Return the setting that the component requires and the run does not give, as its flag without dashes; None if
    nothing is missing.

    Arguments:
        options: plugin name -> its options object; of a plugin that is not there, the defaults.
    """
    owner, component = registry.find(kind, name)
    asks_model = kind is Kind.REWARD_MODEL and component.traits.auxiliary_model is not None
    if asks_model and config.rollout.rm_model is None:
        return "rm_model"
    plugin, name = owner.name, component.name
    declared = {plugin: registry.options[plugin]} if plugin in registry.options else {}
    values: Any = registry.options_of(plugin, options)
    for setting in plugin_settings(declared).values():
        required = [note for note in setting.notes(UsedBy) if note.required and note.kind in (None, kind)]
        if any(name in note.components for note in required) and dict(values)[setting.name] == setting.default:
            return setting.flag.removeprefix("--").replace("-", "_")
    return None


def _refuse_missing_setting(
    chosen: Selected, config: RunConfig, registry: Registry, options: Mapping[str, object] | None
) -> None:
    name = f"{chosen.plugin.name}:{chosen.component.name}"
    missing = missing_setting(chosen.kind, name, config, registry, options)
    if missing is not None:
        raise PluginError(
            f"{_reward_by(chosen, config)} needs {missing}, which is not set. Add --{missing.replace('_', '-')}, or "
            f"choose another {chosen.kind.words}."
        )


def _reward_by(chosen: Selected, config: RunConfig) -> str:
    named = f"rm_type = {config.rollout.rm_type}" if chosen.by == "rm_type" else chosen.by
    return f"{named}: {chosen.kind.words} {chosen}"


def _refuse_other_model(chosen: Selected, config: RunConfig) -> None:
    """Refuse a reward model whose auxiliary model is not served, or is served for something else."""
    traits = chosen.traits
    output = traits.auxiliary_model
    if output is None:
        return
    who, name = _reward_by(chosen, config), str(config.rollout.rm_model)
    served = {model.name: model for model in config.engine.engine_models}
    others = ", ".join(f"{other} ({_gives(model)})" for other, model in sorted(served.items())) or "none"
    found_as = _gives(served[name]) if name in served else "not served"
    if name not in served or output not in ("any", found_as):
        raise PluginError(
            f"{who} needs an auxiliary model that gives {'scores or texts' if output == 'any' else output}; rm_model = "
            f"{name}: {found_as}. The run serves: {others}. Name one of them with --rm-model, or serve it: a table "
            "[[engine.engine_models]] with name and model_path, for scores also is_embedding = true. Or choose another "
            "reward model."
        )


def _gives(model: EngineModel) -> str:
    return "scores" if model.is_embedding else "texts"


def _refuse_unfilled(chosen: Selected) -> None:
    traits = chosen.traits
    filled = FILLED[traits.scope]
    settings = SETTINGS_READ if traits.scope == "token" else SETTINGS_READ - {"kl"}
    unknown = sorted(traits.reads - filled - settings)
    if unknown:
        raise PluginError(
            f"advantage estimator {chosen} reads {', '.join(unknown)}, which nothing "
            f"fills; filled for scope {traits.scope!r} are {', '.join(sorted(filled))}. Choose another estimator, or a "
            "version of slime-rl that fills it."
        )


def _refuse_unread(chosen: Selected, config: RunConfig) -> None:
    """Refuse settings that say with :class:`~slime_core.config.options.ReadBy` that the component has to read them."""
    if chosen.kind is Kind.POLICY_LOSS and config.provided("policy_loss"):
        return
    reads: AbstractSet[str] = getattr(chosen.component.traits, "reads", frozenset())
    values, unread = core_values(config), defaultdict[str, list[Setting]](list)
    for name, setting in core_settings().items():
        for entry in setting.notes(ReadBy) if values[name] != setting.default else ():
            if entry.kind == chosen.kind and entry.column not in reads:
                unread[entry.column].append(setting)
    for column, settings in unread.items():
        written = ", ".join(f"{setting.name} = {as_words(values[setting.name])}" for setting in settings)
        raise PluginError(
            f"{written}: no effect, because {chosen.kind.words} {chosen}, chosen by "
            f"{chosen.by}, does not read {column}. Leave {' and '.join(setting.flag for setting in settings)} out, or "
            f"choose another {chosen.kind.words}."
        )


def _refuse_equal_policies(chosen: Selected) -> None:
    traits = chosen.traits
    if traits.compares_engine:
        raise PluginError(
            "use_rollout_logprobs = true replaces the learner's old log-probs by the engine's, and "
            f"corrections name {chosen}, which compares the two: every ratio would "
            "be 1. Leave one of them out. A correction that does not compare them is added with "
            "compares_engine=False."
        )


def check_targets(
    config: RunConfig, registry: Registry, *, trains: bool, architecture: str | None, heavy: bool = False
) -> None:
    """Import the targets of the components that the run uses and check their contracts, except those of the core.

    Arguments:
        heavy: also targets that may import torch and Megatron, which takes seconds.

    Raises:
        PluginError: a target cannot be imported, or does not fit; names the plugin and the component.
    """
    for chosen in selected(config, registry, trains=trains, architecture=architecture):
        if chosen.plugin.distribution != CORE.distribution and (heavy or not chosen.is_heavy):
            load(registry, chosen.kind, f"{chosen.plugin.name}:{chosen.component.name}")


def _named(config: RunConfig, setting: str) -> tuple[str, ...]:
    """Return the names that a setting holds, in whatever section it is."""
    value = next(dict(section)[setting] for _, section in config if setting in type(section).model_fields)
    if value is None:
        return ()
    return value if isinstance(value, tuple) else _names(SELECTED_BY[setting], str(value))


def _names(kind: Kind, written: str) -> tuple[str, ...]:
    """Return the components that the text of a setting names; for reward models, all parts of a sum."""
    return reward_names(written) if kind is Kind.REWARD_MODEL else (written,)


def _selected(registry: Registry, kind: Kind, name: str, by: str) -> Selected:
    plugin, component = registry.find(kind, name)
    return Selected(component, plugin, by)


def policy_loss(config: RunConfig, registry: Registry) -> str:
    """Return the policy loss of a run: the one that it names, or the one that its advantage estimator pairs with.

    Raises:
        PluginError: no active plugin offers the estimator.
    """
    if config.algorithm.policy_loss is not None:
        return config.algorithm.policy_loss
    estimator = _estimator(config, registry)
    return registry.meant(Kind.POLICY_LOSS, estimator.traits.policy_loss, estimator.plugin.name)


def _policy_loss(config: RunConfig, registry: Registry) -> Selected:
    estimator = f"advantage estimator {config.algorithm.advantage_estimator}"
    by = estimator if config.algorithm.policy_loss is None else "policy_loss"
    return _selected(registry, Kind.POLICY_LOSS, policy_loss(config, registry), by)


def _estimator(config: RunConfig, registry: Registry) -> Selected:
    name = str(config.algorithm.advantage_estimator)
    return _selected(registry, Kind.ADVANTAGE_ESTIMATOR, name, "advantage_estimator")


def check_pairings(config: RunConfig, registry: Registry) -> None:
    """Raise PluginError if the traits of the components of a training run do not fit together.

    Raises:
        PluginError: a component needs something that no other component provides; names settings and components.
    """
    if config.rollout.rollout_source is not None:
        return
    generate = _selected(registry, Kind.GENERATE_FUNCTION, config.rollout.generate_function, "generate_function")
    _refuse_unknown_log_probs(generate, config, registry)
    _refuse_uncorrected(config, registry)
    if config.debug.generates and config.debug.trains:
        estimator = _estimator(config, registry)
        _refuse_equal_answers(generate, estimator, config)
        if not (config.algorithm.use_opd or config.provided("training_signal") or config.provided("policy_loss")):
            _refuse_groups_of_one(estimator, config)
            _refuse_equal_rewards(generate, estimator, config, registry)


# --- Samples of no engine ---------------------------------------------------------------------------------------------


def _refuse_unknown_log_probs(generate: Selected, config: RunConfig, registry: Registry) -> None:
    readers = list(_reading_the_engine(config, registry))
    if readers and not generate.traits.samples_from_engine:
        raise PluginError(
            f"generate_function = {generate.component.name}: the responses of {generate} are not sampled by an "
            f"engine, so that no engine gives their log-probabilities, which are read by {', '.join(readers)}. Leave "
            "these out (--parity-interval 0), or choose another generate function."
        )


def _refuse_uncorrected(config: RunConfig, registry: Registry) -> None:
    """Refuse to correct stale samples with corrections that do not compare learner and engine. A rule between settings
    refuses an empty list."""
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
    """Yield the settings that need an engine's log-probabilities, or other data about tokens that it sampled."""
    for name in config.algorithm.corrections:
        if registry.traits(Kind.CORRECTION, name).compares_engine:
            yield f"corrections = {name}"
    yield from config.provided("correction")
    for setting in ("use_rollout_logprobs", "get_mismatch_metrics", "true_on_policy_mode"):
        if getattr(config.algorithm, setting):
            yield f"{setting} = true"
    if config.learner.use_rollout_routing_replay:
        yield "use_rollout_routing_replay = true"
    for name in engine_columns(config, registry):
        yield f"engine column {name}"
    if config.weights.parity_interval and config.debug.generates and config.debug.trains:
        yield f"parity_interval = {config.weights.parity_interval}"


def _refuse_equal_answers(generate: Selected, estimator: Selected, config: RunConfig) -> None:
    if generate.traits.samples_from_engine:
        return
    shown = f"generate_function = {generate.component.name}: {generate} gives every sample of a group the same response"
    if "groups" in estimator.traits.reads:
        raise PluginError(
            f"{shown}, and {estimator} learns from how the rewards of a group differ. Choose an estimator that reads "
            "no groups, such as --advantage-estimator sft, or another generate function."
        )
    if (size := config.rollout.n_samples_per_prompt) > 1:
        raise PluginError(
            f"{shown}, and n_samples_per_prompt = {size} would train as many equal copies of each. "
            "Give --n-samples-per-prompt 1."
        )


# --- What learns from rewards -----------------------------------------------------------------------------------------


def _refuse_groups_of_one(estimator: Selected, config: RunConfig) -> None:
    compares = "groups" in estimator.traits.reads and not estimator.traits.across_groups
    if config.rollout.n_samples_per_prompt == 1 and compares:
        raise PluginError(
            f"n_samples_per_prompt = 1: {estimator} compares the rewards within a group, and a group of one has "
            "nothing to compare, so that nothing would be learned. Give --n-samples-per-prompt at least 2, or choose "
            "an estimator that reads no groups."
        )


def _refuse_equal_rewards(generate: Selected, estimator: Selected, config: RunConfig, registry: Registry) -> None:
    rewards = config.rollout.rm_type
    models = [_selected(registry, Kind.REWARD_MODEL, name, "rm_type") for name in reward_names(rewards)]
    may_differ = (
        config.rollout.sample_transforms
        or config.algorithm.kl_coef
        or config.provided("rewards")
        or generate.traits.rewards
        or not all(model.traits.is_constant for model in models)
    )
    if not may_differ and "rewards" in estimator.traits.reads:
        raise PluginError(
            f"rm_type = {rewards}: {models[0]} gives every response the same reward, and {estimator} has nothing else "
            "to learn from. Choose a reward model with --rm-type, distil a teacher with --use-opd, or choose an "
            "estimator that reads no rewards, such as --advantage-estimator sft. A generate function that rewards its "
            "samples is added with rewards=True."
        )


def check_numbers(config: RunConfig, registry: Registry, *, trains: bool) -> None:
    """Raise PluginError if the run, or an evaluation set, names none of the numbers that its reward model declares.

    Raises:
        PluginError: no number is named, or one that the model does not return: no response would have a reward.
    """
    uses = [(f"evaluation set {entry.name}", entry.rm_type, entry.reward_key) for entry in eval_sets(config)]
    if trains:
        rm_type = config.rollout.rm_type
        uses = [(f"rm_type = {rm_type}", rm_type, config.rollout.reward_key), *uses]
    for where, rm_type, key in uses:
        for term in reward_terms(rm_type) or (RewardTerm(1.0, rm_type, key),):
            model = _selected(registry, Kind.REWARD_MODEL, term.name, where)
            numbers = model.traits.numbers
            if not numbers or term.key in numbers:
                continue
            example = min(numbers)
            raise PluginError(
                f"{where}: reward model {model} returns {', '.join(sorted(numbers))} for each response, and {term.key} "
                f"is none of them. Choose with --reward-key {example}, with reward_key in the table of an evaluation "
                f"set, or with {term.name}:{example} in a sum."
            )


# --- Whether every setting takes effect -------------------------------------------------------------------------------


def check_settings(
    resolved: Resolved,
    registry: Registry,
    *,
    architecture: str | None = None,
    code: Code | None = None,
    trains: bool = True,
) -> None:
    """Raise ConfigError if a setting of a training run has no effect, or a plugin refuses the settings.

    Arguments:
        architecture: of the start weights. If None, no model spec counts as used.
        code: the functions that options name by path.
        trains: False: an evaluation, which may be given the settings of a run; only plugins judge those.

    Raises:
        ConfigError: lists the settings without effect, the conflicts, and the messages of plugins.
        PluginError: a plugin's ``slime_check`` failed, or an annotation names a component that does not exist.
    """
    unused = _without_effect(resolved, registry, architecture) if trains else ()
    mistakes = [*unused, *_plugin_mistakes(resolved, registry, code or {}, trains=trains)]
    if mistakes:
        values = resolved.values()
        raise config_error([blaming(message, values) for message in mistakes])


def _without_effect(resolved: Resolved, registry: Registry, architecture: str | None) -> Iterator[str]:
    if resolved.config.of_plugins.code:
        return  # a function that is named by path reads every setting
    chosen = selected(resolved.config, registry, trains=True, architecture=architecture)
    used = {(entry.kind, entry.component.name) for entry in chosen}
    # Rows may choose reward models of plugins that the run names.
    named = {name.rpartition(":")[2] for name in resolved.config.run.plugins}
    hooks = Hooks(registry)
    hooked = {name for hook in PLACES for name, _ in hooks.implementations(hook)}
    for setting, value in resolved.values().values():
        if value == setting.default:
            continue
        conditions = setting.notes(UsedBy)
        for condition in conditions:
            kind = _unread(setting, condition, registry, used, by_rows=setting.section in named)
            if kind is not None:
                names = [name for other, name in sorted(used) if other is kind]
                by = next((name for name, of in SELECTED_BY.items() if of is kind), kind.value)
                none = f"none of {by} = {' '.join(names)}" if names else f"{by} names no {kind.words}, and none"
                yield (
                    f"{called(setting)} = {as_words(value)} has no effect: {none} reads it. Leave {setting.flag} out, "
                    f"or use the {kind.words} {', '.join(condition.components)}"
                )
        if setting.of_plugin and not conditions:
            plugin = registry.loaded[setting.section].plugin
            offered = {
                (component.kind, component.name): None for component in registry.loaded[plugin.name].added.components
            }
            if offered and plugin.name not in hooked and used.isdisjoint(offered):
                yield (
                    f"{called(setting)} = {as_words(value)} has no effect: the run uses no component of plugin "
                    f"{plugin.name!r}. Leave {setting.flag} out, or name one: "
                    f"{', '.join(dict.fromkeys(name for _, name in offered))}"
                )


def _unread(
    setting: Setting, condition: UsedBy, registry: Registry, used: AbstractSet[tuple[Kind, str]], *, by_rows: bool
) -> Kind | None:
    """Return the first kind of the components in ``condition`` if none of them is used; None if one is.

    Arguments:
        by_rows: rows of data may choose reward models.
    """
    possible = list(Kind) if condition.kind is None else [kind for kind in Kind if kind == condition.kind]
    kinds = [kind for kind in possible if any(registry.offers(kind, name) for name in condition.components)]
    if not kinds:
        names = f"{condition.kind or ''} {', '.join(condition.components)}".strip()
        raise PluginError(f"setting {setting.key}: UsedBy names {names}, which no active plugin offers.")
    is_used = any((kind, name) in used for kind in kinds for name in condition.components)
    return None if is_used or (by_rows and Kind.REWARD_MODEL in kinds) else kinds[0]


def _plugin_mistakes(resolved: Resolved, registry: Registry, code: Code, *, trains: bool) -> Iterator[str]:
    hooks = Hooks(registry, options=resolved.plugin_options)
    plan = run_view(resolved.config, resolved.plugin_options)
    for messages in hooks.call("slime_check", plan=plan, trains=trains, code=PerPlugin.of(registry, code, {})):
        yield from messages
