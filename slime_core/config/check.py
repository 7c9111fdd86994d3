"""Checks conditions and rules between settings, and the files that they name. ``load`` calls it; it imports nothing
heavy.

Conditions (``Needs``, ``Conflicts``, ``AtMost``) are annotations of settings, from which their messages are made. Rules
are functions that yield messages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from slime_core.config.engine_flags import ENGINES, megatron_settings, values_of
from slime_core.config.layout_rules import MODELS, RUN_LAYOUT, SERVING
from slime_core.config.options import AtMost, Conflicts, Needs, Relation
from slime_core.config.rules import EVALUATION, FILES, FILES_OF_RUN, LENGTHS, LENGTHS_OF_RUN, STEPS, Rule
from slime_core.config.schema import DebugConfig, RunConfig
from slime_core.config.settings import Setting, as_words
from slime_core.errors import Mistake, PluginError
from slime_core.types import JsonValue

Pair = tuple[Setting, Any]


def unmet(
    values: Mapping[str, Pair], *, sections: Collection[str] | None = None, broken: Collection[str] = ()
) -> Iterator[str]:
    """Yield a message for every condition that does not hold.

    Arguments:
        values: setting key -> (setting, value), of the core and of active plugins, and engines' flags that are set.
        sections: sections whose conditions are checked; None for all.
        broken: settings without a usable value; conditions on them are not checked.

    Raises:
        PluginError: a condition of a plugin names a setting that does not exist.
    """
    by_flag = {pair[0].flag: pair for pair in values.values()}
    provided = {part for setting, value in values.values() if value != setting.default for part in setting.provides}
    for setting, value in values.values():
        if value == setting.default or setting.key in broken or (sections and setting.section not in sections):
            continue
        for condition in setting.notes(Relation):
            if condition.part not in provided and condition.when in (None, value):
                names = (*condition.settings, *(name for name, _ in condition.unless))
                pairs = {name: _find(setting, name, values, by_flag) for name in names}
                if not any(pair and pair[0].key in broken for pair in pairs.values()):
                    yield from _violations((setting, value), condition, pairs)


def out_of_bounds(
    values: Mapping[str, Pair], *, sections: Collection[str] | None = None, broken: Collection[str] = ()
) -> Iterator[str]:
    """Yield a message for every value of the core that exceeds its bound; arguments as for :func:`unmet`."""
    usable = {key: pair for key, pair in values.items() if pair[1] is not None and key not in broken}
    for setting, value in usable.values():
        for bound in setting.notes(AtMost) if sections is None or setting.section in sections else ():
            for other, most in (usable[name] for name in bound.settings if name in usable):
                if not bound.allows(value, most):
                    yield (
                        f"{_shown((setting, value))} is {bound.otherwise} {_shown((other, most))}{_reason(bound)}. "
                        f"Lower {setting.flag}, or raise {other.flag}"
                    )


def _find(setting: Setting, name: str, values: Mapping[str, Pair], by_flag: Mapping[str, Pair]) -> Pair | None:
    """Return the setting of that name, of the same plugin or by its flag; None for a setting of an inactive plugin."""
    of_plugin = values.get(f"{setting.section}.{name}") if setting.of_plugin else None
    pair = of_plugin or by_flag.get(f"--{name.replace('_', '-')}")
    if pair is None and setting.owner == "engine":
        other = megatron_settings()[name]
        return other, other.default
    if pair is None and setting.of_plugin:
        raise PluginError(f"setting {setting.key}: its condition names {name}, and there is no such setting.")
    return pair


def stated(setting: Setting) -> Iterator[tuple[str, str]]:
    """Yield the conditions of a setting in words, such as ``("needs", "use_kl_loss or kl_coef")``."""
    for condition in setting.notes(Relation):
        is_need = isinstance(condition, Needs)
        names = (" or " if is_need else ", ").join(condition.settings)
        equals = "" if condition.equals is None else f" = {as_words(condition.equals)}"
        when = "" if condition.when is None else f" if it is {as_words(condition.when)}"
        unless = " or ".join(
            name if value is None else f"{name} = {as_words(value)}" for name, value in condition.unless
        )
        lifted = f" unless {unless}" if unless else ""
        yield "needs" if is_need else "excludes", f"{names}{equals}{when}{lifted}"
    for bound in setting.notes(AtMost):
        yield "refused", f"{bound.otherwise} {' or '.join(bound.settings)}"


def called(setting: Setting) -> str:
    """Return the name of a setting in messages: its flag, without dashes."""
    return setting.flag.removeprefix("--").replace("-", "_")


def _violations(pair: Pair, condition: Relation, pairs: Mapping[str, Pair | None]) -> Iterator[str]:
    lifting = [(other, value) for name, value in condition.unless if (other := pairs[name]) is not None]
    if any(_counts(other, value) for other, value in lifting):
        return
    others = [other for name in condition.settings if (other := pairs[name]) is not None]
    counting = [other for other in others if _counts(other, condition.equals)]
    if isinstance(condition, Conflicts) and counting:
        yield _exclusive(pair, counting, lifting, condition)
    elif isinstance(condition, Needs) and not counting:
        yield _missing(pair, others, condition)


def _counts(pair: Pair, equals: object) -> bool:
    setting, value = pair
    return bool(value != setting.default if equals is None else value == equals)


def _exclusive(pair: Pair, others: list[Pair], lifting: list[tuple[Pair, JsonValue]], condition: Relation) -> str:
    outs = " or ".join(map(_flag, [pair, *others])) if len(others) == 1 else f"{_flag(pair)}, or all of the others,"
    steps = [entry.flag if value is None else f"{entry.flag} {as_words(value)}" for (entry, _), value in lifting]
    unless = f", or add {' or '.join(steps)}" if steps else ""
    return (
        f"{_shown(pair)} cannot be combined with {' and '.join(map(_shown, others))}{_reason(condition)}. Leave "
        f"{outs} out{unless}"
    )


def _missing(pair: Pair, others: list[Pair], condition: Relation) -> str:
    if not others:
        return f"{_shown(pair)} needs {' or '.join(condition.settings)}{_reason(condition)}. Leave {_flag(pair)} out"
    if condition.equals is not None:
        (first, value), needed = others[0], as_words(condition.equals)
        actual = as_words(value if first.owner != "engine" else None)
        needs, step = f"{called(first)} = {needed} (got {actual})", f"Give {first.flag} {needed}"
    else:
        needs = " or ".join(_beyond_default(other) for other, _ in others)
        step = f"Add {' or '.join(other.flag for other, _ in others)}"
    return f"{_shown(pair)} needs {needs}{_reason(condition)}. {step}, or leave {_flag(pair)} out"


def _beyond_default(setting: Setting) -> str:
    """Return the name of a setting that has to be set, with its default, which is not enough."""
    has_value = setting.default and not setting.is_sequence and setting.owner != "engine"
    return f"{called(setting)} other than {as_words(setting.default)}" if has_value else called(setting)


def _reason(condition: Relation | AtMost) -> str:
    return f", because {condition.because}" if condition.because else ""


def _shown(pair: Pair) -> str:
    setting, value = pair
    return f"{called(setting)} = {as_words(value)}"


def _flag(pair: Pair) -> str:
    """Return the flag that sets this value: ``--no-NAME`` for a switch that is off, otherwise ``--NAME``."""
    setting, value = pair
    return setting.flag.replace("--", "--no-", 1) if setting.is_switch and value is False else setting.flag


def mistakes(
    config: RunConfig,
    *,
    purpose: str = "run",
    broken: frozenset[str] = frozenset(),
    of_plugins: Mapping[str, tuple[Setting, Any]] | None = None,
) -> list[Mistake]:
    """Return a mistake for every condition and every rule that ``config`` breaks.

    Arguments:
        purpose: ``run``, or ``eval``, which trains nothing.
        broken: settings without a usable value, which have their defaults in ``config``. Conditions on them and rules
            that read them are not checked.
        of_plugins: setting key -> (setting, value) of the options of active plugins.
    """
    if purpose == "eval":
        config = config.model_copy(update={"debug": DebugConfig()})  # an evaluation neither trains nor samples rollouts
    rules = (*_ALWAYS, *(_OF_EVAL if purpose == "eval" else _OF_RUN))
    values = values_of(config) | dict(of_plugins or {})
    sections = OF_EVALUATIONS if purpose == "eval" else None
    readable = _without(config, broken)
    messages = [
        *unmet(values, sections=sections, broken=broken),
        *out_of_bounds(values, sections=sections, broken=broken),
        *(message for rule in rules for message in _messages(rule, readable, is_complete=not broken)),
    ]
    return [blaming(message, values) for message in dict.fromkeys(messages)]


def blaming(message: str, values: Mapping[str, Pair]) -> Mistake:
    """Return the mistake of a rule's message; it blames the setting that the message names first."""
    keys = {called(setting): key for key, (setting, _) in values.items()}
    return Mistake(message, next((keys[word] for word in re.findall(r"[\w.]+", message) if word in keys), ""))


def _without(config: RunConfig, settings: frozenset[str]) -> RunConfig:
    """Return ``config`` without ``settings``, so that a rule that reads one fails."""
    copies = {name: section.model_copy() for name, section in config}
    for section in copies.values():
        for key in settings & type(section).model_fields.keys():
            del section.__dict__[key]
    return config.model_copy(update=copies)


def _messages(rule: Rule, config: RunConfig, *, is_complete: bool) -> list[str]:
    try:
        return list(rule(config))
    except (AttributeError, KeyError, ValidationError):  # the rule read a missing setting
        if is_complete:
            raise
        return []


OF_EVALUATIONS = frozenset({"engine", "eval", "watch", *ENGINES})
"""Sections whose conditions hold for an evaluation too."""


def _estimator_is_named(config: RunConfig) -> Iterator[str]:
    if config.algorithm.advantage_estimator is None:
        yield (
            "advantage_estimator: the run has no advantage estimator; name a plugin that presets one, such as --plugin "
            "grpo, or a component with --advantage-estimator NAME"
        )


def _there_is_eval_data(config: RunConfig) -> Iterator[str]:
    if not config.evaluates:
        yield "eval_prompt_data: there is no evaluation set; add --eval-prompt-data NAME FILE"


def _evaluated_weights_are_known(config: RunConfig) -> Iterator[str]:
    if config.engine.rollout_external_engine_addrs:
        yield (
            "rollout_external_engine_addrs: an evaluation publishes no weights, and the weights of external engines "
            "are unknown; leave it out, so that the evaluation starts engines with its weights"
        )


_ALWAYS: tuple[Rule, ...] = (*SERVING, *EVALUATION, *LENGTHS, *FILES)
_OF_EVAL: tuple[Rule, ...] = (_there_is_eval_data, _evaluated_weights_are_known)
_OF_RUN: tuple[Rule, ...] = (*RUN_LAYOUT, *STEPS, *LENGTHS_OF_RUN, *MODELS, *FILES_OF_RUN, _estimator_is_named)
