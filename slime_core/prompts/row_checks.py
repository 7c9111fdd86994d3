"""Checks what a row of a prompt file requests: generate function, reward model and sampling of its samples.

A row is looked at where it is read, so that ``on_bad_data`` decides about it, wherever it stands.

``{"prompt": "2+2", "label": "4", "metadata": {"rm_type": "exact_match", "generate_function": "single_turn"}}``

    generate_function, rm_type   the name of a component of a plugin that the run has named
    reward_key                   which of the named numbers of its reward model counts

It is never a path to code, so that data cannot make a run execute what the run did not ask for. What else a row may
say, plugins check (``slime_check_row``). A row without a name, or with null or an empty text, takes what the run's
settings name.

``{"prompt": "2+2", "label": "4", "metadata": {"sampling_params": {"max_new_tokens": 16, "stop": ["\\n"]}}}``

In an evaluation a row may set all sampling parameters. A run trains on one distribution, since the learner divides all
its logits by one temperature and compares its log-probabilities with those of the engines: there a row decides where a
response ends, and may repeat, not change, what decides how likely a token is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError

from slime_core.config.sampling import reward_names
from slime_core.config.schema import RunConfig
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
from slime_core.errors import DataError
from slime_core.plugins import hooks
from slime_core.plugins.component import Kind
from slime_core.plugins.construction import run_view
from slime_core.plugins.contracts import PromptFilter
from slime_core.plugins.discovery import how_to_get, similar
from slime_core.plugins.loading import boundary
from slime_core.plugins.registry import Registry
from slime_core.plugins.selection import missing_setting
from slime_core.types import REWARD_KEY, JsonValue

__all__ = [
    "GENERATE_FUNCTION",
    "REWARD_MODEL",
    "SAMPLING_PARAMS",
    "Offered",
    "RowChecks",
    "RowSampling",
    "offered_to_rows",
    "own_sampling",
    "refuse_unknown",
]

SAMPLING_PARAMS = "sampling_params"
"""Key of a row's metadata."""

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
    """The sampling parameters of the row, by the names of :class:`RowSampling`; empty: none.

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


GENERATE_FUNCTION = "generate_function"
REWARD_MODEL = "rm_type"
"""Keys of a row's metadata."""

KINDS = {GENERATE_FUNCTION: Kind.GENERATE_FUNCTION, REWARD_MODEL: Kind.REWARD_MODEL}

Offered = Mapping[str, Mapping[str, str]]
"""Key of a row's metadata -> the names it may hold, each with the setting that it needs and the run does not give, or
nothing."""


RowMistakes = Callable[[Mapping[str, JsonValue]], Iterator[str]]
"""A mistake in a row's metadata."""


class RowChecks(PromptFilter):
    """Refuses rows whose metadata requests what the run cannot do; selects all others.

    Arguments:
        offered: what rows may name.
        of_run: sampling of a run that trains on the rows, which they may not change; None: an evaluation.
        mistakes: what else is wrong with a row; None: nothing is.
    """

    def __init__(
        self, offered: Offered | None = None, of_run: RunSampling | None = None, mistakes: RowMistakes | None = None
    ) -> None:
        self._offered: Offered = offered or {}
        self._of_run = of_run
        self._mistakes = mistakes

    @classmethod
    def of(
        cls, config: RunConfig, registry: Registry, *, trains: bool, options: Mapping[str, object] | None = None
    ) -> RowChecks:
        """The checks of the rows of a run.

        Arguments:
            trains: False: they are only measured.
            options: plugin name -> its options object; of a plugin that is not there, the defaults.
        """
        rollout = config.rollout
        of_run = {
            "temperature": rollout.rollout_temperature,
            "top_p": rollout.rollout_top_p,
            "top_k": rollout.rollout_top_k,
        }
        mistakes = _mistakes_of_plugins(config, registry, options)
        return cls(offered_to_rows(config, registry, options), of_run if trains else None, mistakes)

    def check(self, metadata: Mapping[str, JsonValue], where: str) -> None:
        """See :class:`~slime_core.PromptFilter`."""
        refuse_unknown(metadata, self._offered, where=where)
        own_sampling(metadata, of_run=self._of_run, where=where)
        if self._mistakes is not None and (found := next(self._mistakes(metadata), None)) is not None:
            raise DataError(f"{where}: {found}")


def offered_to_rows(
    config: RunConfig, registry: Registry, options: Mapping[str, object] | None = None
) -> dict[str, dict[str, str]]:
    """The components that rows may name; as in slime, rows do not choose the reward where a plugin scores every sample.

    Arguments:
        options: plugin name -> its options object; of a plugin that is not there, the defaults.
    """
    found = {GENERATE_FUNCTION: dict.fromkeys(registry.names(Kind.GENERATE_FUNCTION), "")}
    if not config.provided("reward_model"):
        names = registry.names(Kind.REWARD_MODEL)
        kind = Kind.REWARD_MODEL
        found[REWARD_MODEL] = {name: missing_setting(kind, name, config, registry, options) or "" for name in names}
    return found


def refuse_unknown(metadata: Mapping[str, JsonValue], offered: Offered, *, where: str) -> None:
    """Returns if what ``metadata`` names can be had.

    Arguments:
        where: the row, for the message.

    Raises:
        DataError: no active plugin offers it; says what it may be.
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
    """The checks of rows by the plugins of a run (``slime_check_row``); None: no plugin checks rows."""
    implementations = registry.declarations.get(hooks.CHECK_ROW, ())
    if not implementations:
        return None
    plan = run_view(config, options)

    def mistakes(metadata: Mapping[str, JsonValue]) -> Iterator[str]:
        for one in implementations:
            given = {"metadata": metadata, "plan": plan, "options": registry.options_of(one.plugin.name, options)}
            with boundary(one.plugin, f"calling {hooks.CHECK_ROW}", locate=True):
                found = list(one(given) or ())
            yield from found

    return mistakes


def _refuse_name(key: str, name: JsonValue, names: Mapping[str, str], *, where: str) -> None:
    kind = KINDS[key]
    given = f"{where}: metadata {key} = {name!r}"
    words = name if isinstance(name, str) else repr(name)
    for part in reward_names(words) if kind is Kind.REWARD_MODEL else (words,):  # a weighted sum names several
        if part not in names:
            raise DataError(
                f"{given} names no {kind.words} of the run's plugins{similar(part, names)}. They offer: "
                f"{', '.join(names)}.\n{how_to_get(kind, part) or 'Correct the row'}. Rows name components of plugins "
                "that the run names; a path to code is given as a flag."
            )
        if setting := names[part]:
            raise DataError(
                f"{given}: {kind.words} {part!r} needs {setting}, which the run does not give. "
                f"Add --{setting.replace('_', '-')}, or correct the row."
            )
