"""One request to an engine, its answer, and what a sample records of it.

SamplingParams   how the tokens of a response are sampled
Generation       one response, exactly as the engine sampled it
Kept             which tokens top-p and top-k left to sample from at each position (truncated-sampling mask)
until_stop       cuts a response at a stop condition that the engine does not report
engine_inputs    what a sample adds to a request
fail, keep       record in a sample that no engine answered; what its tokens were sampled from

An engine (sglang 0.5.23, srt/managers/schedule_batch.py) does not see every end of a response that was interrupted. It
looks only at the tokens of one request, so it misses a stop text (or a match of ``stop_regex``) that starts in the
tokens before (tail_str). And it does not look at the last tokens of an aborted request, so it misses a stop text or a
stop id there (update_finish_state). ``until_stop`` finds both, and leaves out what was sampled after it. That changes
no log-probability: the tokens up to the stop have the distribution that they have without an interruption. Sampling the
last tokens before the interruption again, so that the engine sees a stop text whole, would change it: tokens that could
start one would have to be sampled twice to stay, and would be rarer than their log-probabilities say.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from operator import add
from typing import TYPE_CHECKING, Literal, TypedDict

from slime_core.errors import EngineError, RequestFailed
from slime_core.types import JsonValue, Sample, SpecInfo, Status, TokenIds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_core.generation.context import Encoder

MAX_KEPT = 64
"""Default of :attr:`SamplingParams.max_kept`; each kept token costs about 30 bytes of an answer for every position."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling.

    Example, greedy and short: ``SamplingParams(temperature=0.0, max_new_tokens=16)``.

    Arguments:
        temperature: 0 takes the likeliest token; log-probabilities are those of the distribution *after* this scaling.
        top_p: keep the likeliest tokens up to this mass; 1 keeps all.
        top_k: keep that many; -1 keeps all.
        max_new_tokens: longest turn in tokens.
        min_new_tokens: no end before that many.
        stop: texts that end a turn; the match is kept in the ids.
        stop_token_ids: ids that end a turn, in addition to the tokenizer's end-of-sequence token; kept in the ids.
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


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The tokens that were kept at each position of a response of t tokens.

    Example, of two tokens, the first sampled from 7 and 2, the second from all: ``Kept(array("i", [7, 2]), array("i",
    [0, 2, 2]))``.

    Arguments:
        token_ids: int32 [s], position after position, the likeliest first.
        offsets: int32 [t + 1], where each position starts and the last one ends; a position without any kept all.
    """

    token_ids: array[int]
    offsets: array[int]

    def until(self, count: int) -> Kept:
        """The part of the first ``count`` tokens."""
        return Kept(self.token_ids[: self.offsets[count]], self.offsets[: count + 1])


def joined(parts: Sequence[tuple[Kept | None, int]]) -> Kept | None:
    """The kept tokens of a response of several parts, each with its number of tokens; None: all tokens, everywhere.

    Example: of three ids that a tool wrote, and one id sampled from 7 and 2: ``joined([(None, 3), (kept, 1)])`` has the
    offsets 0 0 0 0 2.
    """
    if all(kept is None for kept, _ in parts):
        return None
    token_ids, offsets = array("i"), array("i", [0])
    for kept, count in parts:
        ends = kept.offsets[1:] if kept is not None else [0] * count
        offsets.extend([offsets[-1] + end for end in ends])
        token_ids.extend(kept.token_ids if kept is not None else ())
    return Kept(token_ids, offsets)


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One response.

    Example, ``72`` and the end token, sampled from weights of version 3: ``Generation(array("i", [12, 7, 1]),
    array("f", [-0.39, -0.0, -0.0]), "stop", ("3",), "72<|end|>")``.

    Arguments:
        token_ids: int32, exactly what the engine sampled.
        log_probs: float32, natural, one a token.
        finish_reason: ``stop``: an end token or stop text; ``length``: ``max_new_tokens`` reached; ``abort``: the
            request was aborted, with the tokens so far.
        weight_versions: of the weights that sampled the tokens, oldest first, each once.
        weight_spans: which of them sampled which tokens, ``(version, start, end)`` with ``end`` excluded.
        text: decoded by the engine; empty when its tokenizer was left out.
        routed_experts: int8 (or int16, for numbers above 127) [prompt + response - 1, layers, k], which experts of a
            mixture each token took; None: not
            requested.
        spec_info: counters of speculative decoding; None: the engine does none.
        kept: what each token was sampled from, which ``log_probs`` are about; None: from all.
        prompt_tokens: that the engine read, placeholders of images included; None: it does not say.
    """

    token_ids: array[int]
    log_probs: array[float]
    finish_reason: FinishReason
    weight_versions: tuple[str, ...] = ()
    text: str = ""
    routed_experts: NDArray[np.int8 | np.int16] | None = field(default=None, compare=False)
    weight_spans: tuple[tuple[str, int, int], ...] = ()
    spec_info: SpecInfo | None = None
    kept: Kept | None = field(default=None, compare=False)
    prompt_tokens: int | None = field(default=None, compare=False)

    def until(self, count: int) -> Generation:
        """The first ``count`` of its tokens, as if the response had stopped there; the engine's text is left out."""
        spans = tuple((name, start, min(end, count)) for name, start, end in self.weight_spans if start < count)
        kept, routes = self.kept, self.routed_experts
        return replace(
            self,
            token_ids=self.token_ids[:count],
            log_probs=self.log_probs[:count],
            finish_reason="stop",
            weight_versions=tuple(dict.fromkeys(name for name, _, _ in spans)) or self.weight_versions,
            text="",
            routed_experts=None if routes is None else routes[: len(routes) - len(self.token_ids) + count],
            weight_spans=spans,
            kept=None if kept is None else kept.until(count),
        )


NOTHING = Generation(array("i"), array("f"), "abort")
"""The response of a request that was not sent."""


def added(first: SpecInfo | None, second: SpecInfo | None) -> SpecInfo | None:
    """The counters of both, for a sample that several answers make up."""
    if first is None or second is None:
        return first or second
    return SpecInfo(*map(add, astuple(first), astuple(second)))


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
    was_ended = answer.finish_reason == "abort"
    if not was_ended and not before:
        return answer  # one request sampled it all, and the engine has looked at every token
    fields = sampling.fields(n=1)
    texts, patterns = _listed(fields["stop"]), _listed(fields.get("stop_regex"))
    # Each token is at least one byte of the text, so a stop text has no more tokens than bytes.
    reach = max([len(text.encode()) for text in texts] + [PATTERN_TOKENS] * bool(patterns), default=0)
    ids = answer.token_ids
    stops = fields["stop_token_ids"] if was_ended and not fields["ignore_eos"] else ()
    stop_ids = set(stops) if isinstance(stops, Sequence) else set()
    unseen = len(ids) - LAST_STEP if was_ended else len(ids)
    tail = list(before[max(0, len(before) - reach) :])
    if not stop_ids and not (reach and (was_ended or tail)):
        return answer  # the engine has looked at every token
    for count, token in enumerate(ids, 1):
        is_looked_at = reach and (count > unseen or (tail and count < reach))
        seen = encoder.decode_all([*tail, *ids[:count]][-reach - 1 :]) if is_looked_at else ""
        is_stop = any(text in seen for text in texts) or any(re.search(one, seen) for one in patterns)
        if token in stop_ids or (is_looked_at and is_stop):
            return answer.until(count)
    return answer


def _listed(given: JsonValue) -> list[str]:
    if isinstance(given, str):
        return [given]
    return [str(one) for one in given] if isinstance(given, Sequence) else []


FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Finish reason of the engine -> status of the sample."""

UNANSWERED = "engine"
"""Cause of a failure: no engine has answered."""


def is_finished(sample: Sample) -> bool:
    """Whether its response is whole."""
    return sample.status in (Status.COMPLETED, Status.TRUNCATED)


def fail(sample: Sample, failure: EngineError) -> None:
    """``sample`` has no response, because of ``failure``; it is not trained on."""
    sample.status, sample.error = Status.FAILED, str(failure)
    sample.failure_cause = failure.cause if isinstance(failure, RequestFailed) else UNANSWERED


def keep(sample: Sample, kept: Kept | None) -> None:
    """Record in ``sample`` what its response was sampled from; None: from all tokens."""
    sample.rollout_top_p_token_ids = None if kept is None else TokenIds(kept.token_ids)
    sample.rollout_top_p_token_offsets = None if kept is None else TokenIds(kept.offsets)


def kept_of(sample: Sample) -> Kept | None:
    """The tokens that the response of ``sample`` was sampled from, as :func:`keep` recorded them; None: all tokens."""
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    return None if ids is None or offsets is None else Kept(array("i", ids), array("i", offsets))


class EngineInputs(TypedDict, total=False):
    """Arguments of :meth:`Client.generate` that a sample adds."""

    extra: Mapping[str, JsonValue]


def engine_inputs(sample: Sample) -> EngineInputs:
    """Arguments of a request that carry the sample's inputs other than text, as its file holds them; empty: none.

    Example: of ``multimodal_inputs = {"image": ["cat.png"]}``, ``{"extra": {"image_data": ["cat.png"]}}``, as SGLang
    names it.
    """
    inputs = sample.multimodal_inputs
    if not isinstance(inputs, dict) or not inputs:
        return {}
    return {"extra": {f"{kind}_data": value for kind, value in inputs.items()}}


def routes_of(sample: Sample) -> NDArray[np.int8 | np.int16] | None:
    """The experts that the sample's tokens took; a file gives them as lists."""
    import numpy as np  # here: the edges of the core load no numpy

    routes = sample.rollout_routed_experts
    return np.asarray(routes, np.int16) if isinstance(routes, list) else routes


def joined_routes(
    before: NDArray[np.int8 | np.int16] | None, routes: NDArray[np.int8 | np.int16] | None
) -> NDArray[np.int8 | np.int16] | None:
    """Tokens so far keep the experts that they took then; what was added since comes from the newest answer."""
    if before is None or routes is None:
        return routes if before is None else before
    import numpy as np

    joined: NDArray[np.int8 | np.int16] = np.concatenate([before, routes[len(before) :]])
    return joined


def padded_routes(routes: NDArray[np.int8 | np.int16] | None, count: int) -> NDArray[np.int8 | np.int16] | None:
    """``routes`` with -1 for tokens that were added after the last turn, which no engine read."""
    if routes is None or len(routes) >= count:
        return routes
    import numpy as np

    return np.pad(routes, ((0, count - len(routes)), (0, 0), (0, 0)), constant_values=-1)
