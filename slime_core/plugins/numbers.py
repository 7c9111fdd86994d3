"""Whether it is said which number counts, where a reward model returns several for a response."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime_core.config.eval_sets import eval_sets
from slime_core.config.reward_sum import RewardTerm, reward_terms
from slime_core.config.schema import RunConfig
from slime_core.errors import PluginError
from slime_core.plugins.component import Kind
from slime_core.plugins.discovery import nearest
from slime_core.plugins.registration import Registry

__all__ = ["check_numbers"]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be rewarded how: ``where`` in the settings, by what, and which of several numbers counts."""

    where: str
    rm_type: str
    key: str | None


def check_numbers(config: RunConfig, registry: Registry, *, trains: bool) -> None:
    """Returns if one of the numbers that each reward model declares is named, by the run and its evaluation sets.

    Raises:
        PluginError: none is named, or one that is not among them. Without one, no response would have a reward.
    """
    for asked in _asked(config, trains=trains):
        terms = reward_terms(asked.rm_type)
        for term in terms or (RewardTerm(1.0, asked.rm_type, asked.key),):
            traits: Any = registry.find(Kind.REWARD_MODEL, term.name).traits
            if traits.numbers and term.key not in traits.numbers:
                who = f"reward model {term.name!r} of {registry.owner(Kind.REWARD_MODEL, term.name)}"
                raise PluginError(f"{asked.where}: {who} returns {_unnamed(term, traits.numbers, terms is not None)}")


def _asked(config: RunConfig, *, trains: bool) -> Iterator[_Asked]:
    if trains:
        settings = config.rollout
        yield _Asked(f"rm_type = {settings.rm_type}", settings.rm_type, settings.reward_key)
    for one in eval_sets(config):
        yield _Asked(f"evaluation set {one.name}", one.rm_type, one.reward_key)


def _unnamed(term: RewardTerm, numbers: frozenset[str], is_part: bool) -> str:
    named = "none is named" if term.key is None else f"{term.key!r} is none{nearest(term.key, numbers)}"
    one = min(numbers)
    advice = f"Say which one counts: --reward-key {one}, or reward_key in the table of an evaluation set."
    if is_part:
        advice = f"Write {term.name}:{one} in the sum, or another of them."
    return f"{', '.join(sorted(numbers))} for each response, and of these {named}. {advice}"
