"""How the tokens of a response are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_core.types import JsonValue

__all__ = ["MAX_KEPT", "SamplingParams"]

MAX_KEPT = 64
"""Default of :attr:`SamplingParams.max_kept`; each kept token costs about 30 bytes of an answer for every position."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled.

    Example, greedy and short: ``SamplingParams(temperature=0.0, max_new_tokens=16)``.

    Arguments:
        temperature: 0 takes the likeliest token; log-probabilities are those of the distribution *after* this scaling.
        top_p: keep the likeliest tokens up to this mass; 1 keeps all.
        top_k: keep that many; -1 keeps all.
        max_new_tokens: longest turn in tokens.
        min_new_tokens: no end before that many.
        stop: texts that end a turn; the match is kept in the ids.
        stop_token_ids: ids that end a turn, besides the tokenizer's end-of-sequence token; kept in the ids.
        ignore_eos: continue after the end-of-sequence token.
        extra: further fields of SGLang's sampling parameters (``json_schema``, ``repetition_penalty``); they take
            precedence.
        max_kept: most tokens that top_p keeps, where top_k does not say it; with it, log-probabilities are those after
            truncation, and the kept tokens are recorded. None: log-probabilities are those before truncation, as in an
            evaluation.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    extra: Mapping[str, JsonValue] = field(default_factory=dict)
    max_kept: int | None = MAX_KEPT

    def fields(self, *, n: int) -> dict[str, JsonValue]:
        """The ``sampling_params`` of SGLang's request for ``n`` responses."""
        return {
            "n": n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "stop": list(self.stop),
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            # The engine's text is only read by people: keep all of it.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            **self.extra,
        }
