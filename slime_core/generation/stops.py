"""What an engine overlooks where a response is interrupted: that it has ended.

An engine (sglang 0.5.23, srt/managers/schedule_batch.py) looks whether a response ends

    in the tokens of one request    so a stop text, or what ``stop_regex`` matches, that ended tokens begin and new ones
                                    complete is not seen (tail_str)
    unless it was aborted           so what a last token completes, or a last token that is a stop id, is not seen
                                    (update_finish_state)

Either is found here, and what was sampled after it is left out. That changes no log-probability: the tokens sampled by
then decide where a response ends, so those up to there have the distribution that they have without an interruption. To
draw the last tokens before it once more, so that the engine sees a stop text whole, would change it: tokens that could
begin one would have to be sampled twice to stay, and would be rarer than their log-probabilities say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from slime_core.generation.response import Generation
from slime_core.generation.sampling import SamplingParams
from slime_core.types import JsonValue

if TYPE_CHECKING:
    from slime_core.generation.context import Encoder

__all__ = ["until_stop"]

LAST_STEP = 64
"""Tokens at the end of an aborted response that the engine has not looked at; more than one with speculative
decoding."""


PATTERN_TOKENS = 256
"""Tokens in which a pattern is looked for, where it may match one that ended before. An engine takes as many as the
longest match has characters, which for most patterns is all of them, at each token once more."""


def until_stop(before: Sequence[int], answer: Generation, sampling: SamplingParams, encoder: Encoder) -> Generation:
    """``answer`` up to where the response ends, as one that has stopped there; unchanged where the engine has reported
    it all.

    Arguments:
        before: the tokens of the response before ``answer``; empty at its start.
        sampling: the sampling parameters of the whole response.
    """
    fields = sampling.fields(n=1)
    texts, patterns = _listed(fields["stop"]), _listed(fields.get("stop_regex"))
    # Each token is at least one byte of the text, so a stop text has no more tokens than bytes.
    reach = max([len(text.encode()) for text in texts] + [PATTERN_TOKENS] * bool(patterns), default=0)
    ids, was_ended = answer.token_ids, answer.finish_reason == "abort"
    stop_ids = set(_whole(fields["stop_token_ids"])) if was_ended and not fields["ignore_eos"] else set()
    unseen = len(ids) - LAST_STEP if was_ended else len(ids)
    tail = list(before[max(0, len(before) - reach) :])
    if not stop_ids and not (reach and (was_ended or tail)):
        return answer  # the engine has looked at every token
    for count, token in enumerate(ids, 1):
        is_looked_at = reach and (count > unseen or (tail and count < reach))
        seen = encoder.decode_all([*tail, *ids[:count]][-reach - 1 :]) if is_looked_at else ""
        if token in stop_ids or (is_looked_at and _ends(seen, texts, patterns)):
            return answer.until(count)
    return answer


def _ends(seen: str, texts: Iterable[str], patterns: Iterable[str]) -> bool:
    """As the engine decides it."""
    return any(text in seen for text in texts) or any(re.search(one, seen) for one in patterns)


def _listed(given: JsonValue) -> list[str]:
    if isinstance(given, str):
        return [given]
    return [str(one) for one in given] if isinstance(given, Sequence) else []


def _whole(given: JsonValue) -> list[int]:
    return [one for one in given if isinstance(one, int)] if isinstance(given, Sequence) else []
