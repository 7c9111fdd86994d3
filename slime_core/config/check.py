"""The rules between settings, and whether the files they name are there; quick, and without anything heavy imported.

Each rule is a function that yields what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from slime_core.config.conditions import unmet
from slime_core.config.engine_flags import ENGINES, engine_settings
from slime_core.config.mistakes import Mistake
from slime_core.config.rules import Rule
from slime_core.config.rules.engines import SERVING, SERVING_OF_EVAL, SERVING_OF_RUN
from slime_core.config.rules.evaluation import EVALUATION
from slime_core.config.rules.files import FILES, FILES_OF_RUN
from slime_core.config.rules.layout import ENGINE_LAYOUT, RUN_LAYOUT
from slime_core.config.rules.lengths import LENGTHS, LENGTHS_OF_EVAL, LENGTHS_OF_RUN
from slime_core.config.rules.models import MODELS
from slime_core.config.rules.steps import STEPS, waits_warn_first
from slime_core.config.running import DebugConfig
from slime_core.config.schema import RunConfig
from slime_core.config.section import EngineSection
from slime_core.config.settings import Setting, core_settings, core_values

__all__ = ["mistakes"]


def mistakes(
    config: RunConfig,
    *,
    purpose: str = "run",
    broken: frozenset[str] = frozenset(),
    of_plugins: Mapping[str, tuple[Setting, Any]] | None = None,
) -> list[Mistake]:
    """Every condition and every rule that ``config`` breaks.

    Arguments:
        purpose: ``run``, or ``eval``, which trains nothing.
        broken: settings whose value could not be read, which therefore have their defaults here. Conditions on them
            are not judged, and rules that read one are silent, because the default is not what was meant.
        of_plugins: setting key -> (setting, value), of the active plugins.
    """
    if purpose == "eval":
        config = config.model_copy(update={"debug": DebugConfig()})  # neither half of the loop runs
    rules = (*_ALWAYS, *(_OF_EVAL if purpose == "eval" else _OF_RUN))
    of_core = core_values(config)
    values = {key: (setting, of_core[key]) for key, setting in core_settings().items()} | _of_engines(config)
    readable = _without(config, broken)
    messages = [
        *unmet(values | dict(of_plugins or {}), sections=OF_EVALUATIONS if purpose == "eval" else None, broken=broken),
        *(message for rule in rules for message in _messages(rule, readable)),
    ]
    return list(map(Mistake, messages))


def _of_engines(config: RunConfig) -> dict[str, tuple[Setting, Any]]:
    """What the run gives of the engines' own settings."""
    found = {}
    for engine in ENGINES:
        section: EngineSection = dict(config)[engine]
        for name, value in section.given:
            setting = engine_settings(engine)[name]
            found[setting.key] = setting, value
    return found


class _UnreadError(Exception):
    """A rule has used a setting whose value could not be read."""


class _Unread:
    """Stands in for such a value: every use of it raises."""

    def _used(self, *_: object) -> NoReturn:
        raise _UnreadError

    __bool__ = __eq__ = __hash__ = __len__ = __iter__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __floordiv__ = _used
    __rfloordiv__ = __truediv__ = __rtruediv__ = __contains__ = __getattr__ = __str__ = __format__ = _used


def _without(config: RunConfig, settings: frozenset[str]) -> RunConfig:
    """``config`` with a value in the place of each of ``settings`` that no rule can use."""
    known = core_settings()
    sections = {known[key].section for key in settings if key in known}
    update = {
        name: (section := getattr(config, name)).model_copy(
            update={key: _Unread() for key in settings if key in type(section).model_fields}
        )
        for name in sections
    }
    return config.model_copy(update=update)


def _messages(rule: Rule, config: RunConfig) -> list[str]:
    try:
        return list(rule(config))
    except _UnreadError:
        return []


OF_EVALUATIONS = frozenset({"engine", "eval", *ENGINES})
"""Sections whose conditions hold for an evaluation too."""


def _estimator_is_named(config: RunConfig) -> Iterator[str]:
    if config.algorithm.advantage_estimator is None:
        yield (
            "advantage_estimator: nothing says how rewards become advantages; name a plugin that does, "
            "--plugin grpo, or a component, --advantage-estimator NAME"
        )


def _there_is_eval_data(config: RunConfig) -> Iterator[str]:
    if not config.evaluates:
        yield "eval_prompt_data: there is nothing to evaluate on; add --eval-prompt-data NAME FILE"


_ALWAYS: tuple[Rule, ...] = (*SERVING, *ENGINE_LAYOUT, *EVALUATION, *LENGTHS, *FILES, waits_warn_first)
_OF_EVAL: tuple[Rule, ...] = (*SERVING_OF_EVAL, *LENGTHS_OF_EVAL, _there_is_eval_data)
_OF_RUN: tuple[Rule, ...] = (
    *SERVING_OF_RUN,
    *RUN_LAYOUT,
    *STEPS,
    *LENGTHS_OF_RUN,
    *MODELS,
    *FILES_OF_RUN,
    _estimator_is_named,
)
