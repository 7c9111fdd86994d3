"""Checks what a row of a prompt file requests: generate function, reward model and sampling of its samples.

Rows are checked when they are read, so ``on_bad_data`` applies to every row, not only to those read before the run.

``{"prompt": "2+2", "label": "4", "metadata": {"rm_type": "exact_match", "generate_function": "single_turn"}}``

    generate_function, rm_type   the name of a component of an active plugin
    reward_key                   which of the named numbers of the row's reward model counts

A name is never a path to code, so a data file cannot make a run execute other code. Plugins check further metadata in
``slime_check_row``. For a key that a row lacks, or that holds null or an empty string, the run's settings apply.

``{"prompt": "2+2", "label": "4", "metadata": {"sampling_params": {"max_new_tokens": 16, "stop": ["\\n"]}}}``

In an evaluation a row may set all sampling parameters. A run trains on one distribution, since the learner divides all
its logits by one temperature and compares its log-probabilities with those of the engines: there a row may set where
a response ends, and may repeat but not change the parameters that determine token probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError

from slime_core.components.construction import load, run_view
from slime_core.components.selection import missing_setting
from slime_core.config.sampling import RewardTerm, reward_names, reward_terms
from slime_core.config.schema import EvalSet, RunConfig
from slime_core.config.section import (
    FractionAboveZero,
    MinusOne,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from slime_core.contracts import PromptFilter
from slime_core.errors import DataError, nearest
from slime_core.plugins.lifecycle import Hooks
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from slime_core.types import GENERATE_FUNCTION, REWARD_KEY, REWARD_MODEL, SAMPLING_PARAMS, JsonValue
from slime_core.user_code.failures import boundary

__all__ = [
    "Offered",
    "RowChecks",
    "RowRewards",
    "RowSampling",
    "offered_to_rows",
    "own_sampling",
    "refuse_unknown",
]

RunSampling = Mapping[str, float]
"""``temperature``, ``top_p`` and ``top_k`` of a run that trains: the distribution that it samples from."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


class RowSampling(Section):
    """The fields of ``sampling_params``, under the names of SGLang; those left out are the run's."""

    max_new_tokens: PositiveInt | None = None
    """Longest response in tokens."""
    min_new_tokens: NonNegativeInt | None = None
    """No end before that many tokens."""
    stop: Annotated[tuple[Name, ...], BeforeValidator(_listed)] | None = None
    """Text or texts that end a response."""
    stop_token_ids: Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_listed)] | None = None
    """Ids that end a response, in addition to the end of sequence."""
    ignore_eos: bool | None = None
    """Continue after the end of sequence."""
    temperature: NonNegativeFloat | None = None
    """0 takes the likeliest token."""
    top_p: FractionAboveZero | None = None
    """Keep the likeliest tokens up to this probability mass."""
    top_k: MinusOne | PositiveInt | None = None
    """Keep the k likeliest tokens. -1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Keep tokens of at least this share of the likeliest one's probability."""
    repetition_penalty: PositiveFloat | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    """Penalties on tokens that occurred before."""
    json_schema: Name | None = None
    regex: Name | None = None
    ebnf: Name | None = None
    """The form that a response must have."""


ENDS = frozenset({"max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos"})
"""Parameters that do not change the probabilities of tokens."""


def own_sampling(metadata: Mapping[str, JsonValue], *, of_run: RunSampling | None, where: str) -> dict[str, JsonValue]:
    """Return the sampling parameters of the row, by the names of :class:`RowSampling`; empty: none.

    Arguments:
        of_run: sampling of the run that trains on the row; None: an evaluation.
        where: the row, for the message.

    Raises:
        DataError: a parameter does not exist, has a wrong value, or cannot be trained on.
    """
    requested = metadata.get(SAMPLING_PARAMS)
    if not requested:
        return {}
    if not isinstance(requested, dict):
        raise _refusal(where, f"found {requested!r}; accepted: an object such as {{'max_new_tokens': 16}}")
    try:
        given = RowSampling.model_validate(requested).model_dump(exclude_none=True)
    except ValidationError as error:
        problem = error.errors()[0]
        found = f"{problem['loc'][0]} = {requested[str(problem['loc'][0])]!r}: {problem['msg']}"
        raise _refusal(where, f"{found}. There are: {', '.join(RowSampling.model_fields)}") from None
    if of_run is not None:
        _refuse_another_distribution(given, of_run, where)
    return given


def _refuse_another_distribution(given: Mapping[str, JsonValue], of_run: RunSampling, where: str) -> None:
    for key, value in given.items():
        if key not in ENDS and value != of_run.get(key):
            runs = f", but the run samples with {of_run[key]:g}" if key in of_run else " would change the distribution"
            raise _refusal(
                where,
                f"{key} = {value!r}{runs}. The learner computes log-probabilities with one distribution per run, so "
                f"that those of this row would be wrong. Rows that are trained may set {', '.join(sorted(ENDS))}; "
                "rows of evaluations may set everything",
            )


def _refusal(where: str, text: str) -> DataError:
    return DataError(f"{where}: metadata {SAMPLING_PARAMS}: {text}.\nCorrect the row, or leave {SAMPLING_PARAMS} out.")


KINDS = {GENERATE_FUNCTION: Kind.GENERATE_FUNCTION, REWARD_MODEL: Kind.REWARD_MODEL}

Offered = Mapping[str, Mapping[str, str]]
"""Metadata key -> allowed names -> the setting that this component requires and the run lacks; empty: none."""


RowMistakes = Callable[[Mapping[str, JsonValue]], Iterator[str]]
"""Checks the metadata of one row; yields a message for each mistake."""


CheckRow = Callable[[JsonValue, Mapping[str, JsonValue]], str | None]
"""See :class:`~slime_core.CheckedRewardModel`."""


@dataclass(frozen=True)
class RowRewards:
    """The reward models that score the rows of a run or of an evaluation set, and what they need of a row.

    Arguments:
        rm_type: of rows that name no other.
        generate_function: of rows that name no other. If it may give rewards itself, rows need nothing.
        rows_name: the keys of metadata under which rows may name components.
        trains: whether the generate function makes responses to train on.
    """

    registry: Registry
    rm_type: str
    generate_function: str
    rows_name: Collection[str] = ()
    trains: bool = True

    def terms(self, metadata: Mapping[str, JsonValue]) -> tuple[RewardTerm, ...]:
        """The parts of the sum that scores a row, with weight 1 if it is one reward model; empty: it may be scored by
        its generate function."""
        if self.registry.traits(Kind.GENERATE_FUNCTION, self._named(GENERATE_FUNCTION, metadata)).rewards:
            return ()
        written = self._named(REWARD_MODEL, metadata)
        return reward_terms(written) or (RewardTerm(1.0, written),)

    def mistakes(self, label: JsonValue, metadata: Mapping[str, JsonValue]) -> Iterator[str]:
        """Yield why no response to a row could be rewarded, or why it has no response."""
        components = [(Kind.REWARD_MODEL, term.name) for term in self.terms(metadata)]
        maker = self._named(GENERATE_FUNCTION, metadata)
        if self.trains and not self.registry.traits(Kind.GENERATE_FUNCTION, maker).samples_from_engine:
            components.append((Kind.GENERATE_FUNCTION, maker))  # its responses come from the rows
        for kind, name in components:
            check_row = self._checks(kind, name)
            if check_row is not None:
                with boundary(self.registry.owner(kind, name), f"{kind.words} {name!r}: check_row", locate=True):
                    mistake = check_row(label, metadata)
                if mistake:
                    yield f"{kind.words} {name!r}: {mistake}"

    def _named(self, key: str, metadata: Mapping[str, JsonValue]) -> str:
        default = self.generate_function if key == GENERATE_FUNCTION else self.rm_type
        return str(metadata.get(key) or default) if key in self.rows_name else default

    def _checks(self, kind: Kind, name: str) -> CheckRow | None:
        if (kind, name) not in self._loaded:
            self._loaded[kind, name] = getattr(load(self.registry, kind, name), "check_row", None)
        return self._loaded[kind, name]

    @cached_property
    def _loaded(self) -> dict[tuple[Kind, str], CheckRow | None]:
        return {}


class RowChecks(PromptFilter):
    """Filter that refuses rows whose metadata requests what the run cannot do, or to which no response could be
    rewarded, and selects all other rows.

    Arguments:
        offered: what rows may name.
        of_run: sampling of a run that trains on the rows, which they may not change; None: an evaluation.
        mistakes: further checks of a row, those of plugins; None: there are none.
        rewards: what reward models need of a row; None: nothing is known.
    """

    def __init__(
        self,
        offered: Offered | None = None,
        of_run: RunSampling | None = None,
        mistakes: RowMistakes | None = None,
        rewards: RowRewards | None = None,
    ) -> None:
        self._offered: Offered = offered or {}
        self._of_run = of_run
        self._mistakes = mistakes
        self.rewards = rewards

    @classmethod
    def of(
        cls,
        config: RunConfig,
        registry: Registry,
        *,
        evaluates: EvalSet | None = None,
        options: Mapping[str, object] | None = None,
    ) -> RowChecks:
        """Make the checks of the rows of a run.

        Arguments:
            evaluates: the evaluation set of the rows; None: the run trains on them.
            options: plugin name -> its options object; a plugin without an entry has its defaults.
        """
        rollout = config.rollout
        of_run = {
            "temperature": rollout.rollout_temperature,
            "top_p": rollout.rollout_top_p,
            "top_k": rollout.rollout_top_k,
        }
        mistakes = _mistakes_of_plugins(config, registry, options)
        offered, trains = offered_to_rows(config, registry, options), evaluates is None
        named = rollout if evaluates is None else evaluates
        rewards = RowRewards(registry, named.rm_type, named.generate_function, frozenset(offered), trains=trains)
        # A rollout source makes whole rollouts, and may reward them.
        is_scored = not (trains and rollout.rollout_source)
        return cls(offered, of_run if trains else None, mistakes, rewards if is_scored else None)

    def check(self, metadata: Mapping[str, JsonValue], label: JsonValue, where: str) -> None:
        """See :class:`~slime_core.contracts.PromptFilter`."""
        refuse_unknown(metadata, self._offered, where=where)
        own_sampling(metadata, of_run=self._of_run, where=where)
        of_plugins = () if self._mistakes is None else self._mistakes(metadata)
        of_rewards = () if self.rewards is None else self.rewards.mistakes(label, metadata)
        for mistake in chain(of_plugins, of_rewards):
            raise DataError(f"{where}: {mistake}")


def offered_to_rows(
    config: RunConfig, registry: Registry, options: Mapping[str, object] | None = None
) -> dict[str, dict[str, str]]:
    """Return the components that rows may name.

    Rows may not name a reward model where an option of a plugin (such as ``--custom-rm-path``) provides it, as in
    THUDM's slime.

    Arguments:
        options: plugin name -> its options object; a plugin without an entry has its defaults.
    """
    found = {GENERATE_FUNCTION: dict.fromkeys(registry.names(Kind.GENERATE_FUNCTION), "")}
    if not config.provided("reward_model"):
        names = registry.names(Kind.REWARD_MODEL)
        kind = Kind.REWARD_MODEL
        found[REWARD_MODEL] = {name: missing_setting(kind, name, config, registry, options) or "" for name in names}
    return found


def refuse_unknown(metadata: Mapping[str, JsonValue], offered: Offered, *, where: str) -> None:
    """Raise DataError if ``metadata`` names a component that no active plugin offers, or that lacks a setting.

    Arguments:
        where: the row, for the message.
    """
    for key, names in offered.items():
        if name := metadata.get(key):
            _refuse_name(key, name, names, where=where)
    reward_key = metadata.get(REWARD_KEY)
    if offered and reward_key and not isinstance(reward_key, str):
        raise DataError(
            f"{where}: metadata {REWARD_KEY} = {reward_key!r:.100} is not a name; accepted: the name of one of the "
            "numbers that the row's reward model gives"
        )


def _mistakes_of_plugins(
    config: RunConfig, registry: Registry, options: Mapping[str, object] | None = None
) -> RowMistakes | None:
    """Return the checks of rows by the plugins of a run (``slime_check_row``); None: no plugin checks rows."""
    hooks = Hooks(registry, options=options)
    if not hooks.implementers("slime_check_row"):
        return None
    plan = run_view(config, options)

    def mistakes(metadata: Mapping[str, JsonValue]) -> Iterator[str]:
        for messages in hooks.call("slime_check_row", metadata=metadata, plan=plan):
            yield from messages

    return mistakes


def _refuse_name(key: str, name: JsonValue, names: Mapping[str, str], *, where: str) -> None:
    kind = KINDS[key]
    given = f"{where}: metadata {key} = {name!r}"
    words = name if isinstance(name, str) else repr(name)
    for part in reward_names(words) if kind is Kind.REWARD_MODEL else (words,):  # a weighted sum names several
        if part not in names:
            raise DataError(
                f"{given} is no {kind.words} of a plugin that takes part{nearest(part, names)}\n"
                f"They offer: {', '.join(names)}.\nCorrect the row, or name the plugin that offers it with --plugin "
                "NAME. Paths of code are given as flags."
            )
        if setting := names[part]:
            raise DataError(
                f"{given}: {kind.words} {part!r} needs {setting}, which the run does not give. "
                f"Add --{setting.replace('_', '-')}, or correct the row."
            )
