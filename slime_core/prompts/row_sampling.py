"""How a row of a prompt file wants its own responses drawn.

``{"prompt": "2+2", "label": "4", "metadata": {"sampling_params": {"max_new_tokens": 16, "stop": ["\\n"]}}}``

In an evaluation a row may say anything here. A run trains on one distribution, since the learner divides all its logits
by one temperature and compares its log-probabilities with those of the engines: there a row decides where a response
ends, and may repeat, not change, what decides how likely a token is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError

from slime_core.config.mistakes import nearest
from slime_core.config.schema import RunConfig
from slime_core.config.section import All, Count, CountOrZero, Name, Positive, PositiveOrZero, Section, Share
from slime_core.errors import DataError
from slime_core.types import JsonValue

__all__ = ["SAMPLING_PARAMS", "Drawn", "RowSampling", "drawn", "own_sampling", "refuse_unusable"]

SAMPLING_PARAMS = "sampling_params"
"""Key of a row's metadata."""

Drawn = Mapping[str, float]
"""What decides how likely a token is, of a run that trains: ``temperature``, ``top_p`` and ``top_k``."""


def drawn(config: RunConfig) -> Drawn:
    """What the rows of a run that trains may not change."""
    rollout = config.rollout
    return {
        "temperature": rollout.rollout_temperature,
        "top_p": rollout.rollout_top_p,
        "top_k": rollout.rollout_top_k,
    }


def _listed(value: object) -> object:
    return [value] if isinstance(value, str | int) and not isinstance(value, bool) else value


class RowSampling(Section):
    """What ``sampling_params`` may hold, under the names of SGLang; what is left out is the run's."""

    max_new_tokens: Count | None = None
    """Longest response in tokens."""
    min_new_tokens: CountOrZero | None = None
    """No end before that many tokens."""
    stop: Annotated[tuple[Name, ...], BeforeValidator(_listed)] | None = None
    """Text or texts that end a response."""
    stop_token_ids: Annotated[tuple[CountOrZero, ...], BeforeValidator(_listed)] | None = None
    """Ids that end a response, besides the end of sequence."""
    ignore_eos: bool | None = None
    """Go on after the end of sequence."""
    temperature: PositiveOrZero | None = None
    """0 takes the likeliest token."""
    top_p: Share | None = None
    """Keep the likeliest tokens up to this probability mass."""
    top_k: All | Count | None = None
    """Keep the k likeliest tokens. -1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Keep tokens of at least this share of the likeliest one's probability."""
    repetition_penalty: Positive | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    """What tokens that stood before lose."""
    json_schema: Name | None = None
    regex: Name | None = None
    ebnf: Name | None = None
    """What a response has to look like."""


ENDS = frozenset({"max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos"})
"""What leaves the probabilities of tokens alone."""


def own_sampling(metadata: Mapping[str, JsonValue], *, drawn: Drawn | None, where: str) -> dict[str, JsonValue]:
    """What the row wants, by the names of :class:`RowSampling`; empty: nothing.

    Arguments:
        drawn: of the run that trains on the row; None: an evaluation.
        where: the row, for the message.

    Raises:
        DataError: it wants what does not exist, or what cannot be trained on.
    """
    asked = metadata.get(SAMPLING_PARAMS)
    if not asked:
        return {}
    if not isinstance(asked, dict):
        raise _refusal(where, f"found {asked!r}; accepted: an object such as {{'max_new_tokens': 16}}")
    unknown = [key for key in asked if key not in RowSampling.model_fields]
    if unknown:
        known = ", ".join(RowSampling.model_fields)
        near = nearest(str(unknown[0]), RowSampling.model_fields)
        raise _refusal(where, f"there is no {unknown[0]!r}{near}. There are: {known}")
    try:
        given = RowSampling.model_validate(asked).model_dump(exclude_none=True)
    except ValidationError as error:
        problem = error.errors()[0]
        raise _refusal(where, f"{problem['loc'][0]} = {asked[problem['loc'][0]]!r}: {problem['msg']}") from None
    if drawn is not None:
        _refuse_another_distribution(given, drawn, where)
    return given


def refuse_unusable(metadata: Mapping[str, JsonValue], *, drawn: Drawn | None, where: str) -> None:
    """Returns if what the row wants can be had; raises as :func:`own_sampling`."""
    own_sampling(metadata, drawn=drawn, where=where)


def _refuse_another_distribution(given: Mapping[str, JsonValue], drawn: Drawn, where: str) -> None:
    for key, value in given.items():
        if key not in ENDS and value != drawn.get(key):
            runs = f"; the run's is {drawn[key]:g}" if key in drawn else ""
            raise _refusal(
                where,
                f"{key} = {value!r} cannot be trained on{runs}. The learner reckons with one distribution a run: "
                "another for a row would make its log-probabilities other ones than those that were drawn from. "
                f"Accepted in training are {', '.join(sorted(ENDS))}; in evaluations everything is",
            )


def _refusal(where: str, text: str) -> DataError:
    return DataError(f"{where}: metadata {SAMPLING_PARAMS}: {text}.\nCorrect the row, or leave {SAMPLING_PARAMS} out.")
