"""Sampling parameters, the record of one response, and the functions that write it into a sample.

SamplingParams   how the tokens of a response are sampled
Generation       one response, exactly as the engine sampled it
Kept             truncated-sampling mask: the tokens that top-p and top-k left at each position; joined: concatenates
                 masks; keep, mask_of: write it to a sample and read it
until_stop       truncates a response at a stop condition that the engine does not report
engine_inputs    the fields that a sample adds to a request
added            sums counters of speculative decoding
is_finished, fail   whether a sample has its whole response; records that no engine answered
routes_of, join_routes, pad_routes   the experts of a mixture that took each token

:mod:`.context` and :mod:`.trajectory` use these around a request, ``rollout/engines`` makes a Generation of an answer.

An engine (sglang 0.5.23, srt/managers/schedule_batch.py) does not see every end of a response that was interrupted. It
looks only at the tokens of one request, so it misses a stop text (or a match of ``stop_regex``) that starts in the
tokens before (tail_str). And it does not look at the last tokens of an aborted request, so it misses a stop text or a
stop id there (update_finish_state). ``until_stop`` finds both, and drops the tokens that were sampled after the stop.
That changes no log-probability: the tokens up to the stop have the distribution that they have without an interruption.
Sampling the last tokens before the interruption again, so that the engine sees the whole stop text, would change it:
tokens that could start a stop text would have to be sampled twice to remain, and would be rarer than their
log-probabilities say.
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

MAX_MASK_TOKENS = 64
"""Default of :attr:`SamplingParams.max_kept`; each token of a mask takes about 30 bytes of the answer per position."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling.

    Example, greedy and short: ``SamplingParams(temperature=0.0, max_new_tokens=16)``.

    Arguments:
        temperature: 0 takes the likeliest token; log-probabilities are those of the distribution *after* this scaling.
        top_p: sample from the likeliest tokens up to this mass; 1: from all.
        top_k: sample from this many of the likeliest tokens; -1: from all.
        max_new_tokens: longest turn in tokens.
        min_new_tokens: shortest turn in tokens.
        stop: texts that end a turn; the ids include the match.
        stop_token_ids: ids that end a turn, in addition to the tokenizer's end-of-sequence token; the ids include them.
        ignore_eos: continue after the end-of-sequence token.
        extra: further fields of SGLang's sampling parameters (``json_schema``, ``repetition_penalty``); they take
            precedence.
        max_kept: most tokens of the truncated-sampling mask at a position, where top_k sets no limit. The mask is
            recorded, and log-probabilities are normalised over it. None: no mask is requested; log-probabilities are
            those before truncation, as in an evaluation.
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
    max_kept: int | None = MAX_MASK_TOKENS

    def fields(self, *, n: int) -> dict[str, JsonValue]:
        """Return the ``sampling_params`` of SGLang's request for ``n`` responses."""
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
            # The engine's text is for people: include special tokens and stop texts.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            **self.extra,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The truncated-sampling mask of a response of t tokens: the tokens that top-p and top-k left at each position.

    Example, of two tokens, the first sampled from 7 and 2, the second from the whole vocabulary: ``Kept(array("i", [7,
    2]), array("i", [0, 2, 2]))``.

    Arguments:
        token_ids: int32 [s], concatenated over the positions, the likeliest first.
        offsets: int32 [t + 1], where each position starts, and the end of the last position. A position without ids was
            sampled from the whole vocabulary.
    """

    token_ids: array[int]
    offsets: array[int]

    def until(self, count: int) -> Kept:
        """Return the mask of the first ``count`` tokens."""
        return Kept(self.token_ids[: self.offsets[count]], self.offsets[: count + 1])


def joined(parts: Sequence[tuple[Kept | None, int]]) -> Kept | None:
    """Concatenate the truncated-sampling masks of the parts of a response, each with its number of tokens.

    Example: for three ids that a tool wrote and one id sampled from 7 and 2, ``joined([(None, 3), (mask, 1)])`` has the
    offsets 0 0 0 0 2.

    Returns:
        None if no part has a mask.
    """
    if all(mask is None for mask, _ in parts):
        return None
    token_ids, offsets = array("i"), array("i", [0])
    for mask, count in parts:
        ends = mask.offsets[1:] if mask is not None else [0] * count
        offsets.extend([offsets[-1] + end for end in ends])
        token_ids.extend(mask.token_ids if mask is not None else ())
    return Kept(token_ids, offsets)


def joined_columns(parts: Sequence[tuple[Mapping[str, NDArray[np.float32]], int]]) -> dict[str, NDArray[np.float32]]:
    """Concatenate the engine's columns of the parts of a response, each with its number of tokens; 0 at the tokens of
    parts without a column."""
    widths = {name: column.shape[1] for columns, _ in parts for name, column in columns.items()}
    if not widths:
        return {}
    import numpy as np  # here, so that importing this module does not load numpy

    return {
        name: np.concatenate([columns.get(name, np.zeros((count, width), np.float32)) for columns, count in parts])
        for name, width in widths.items()
    }


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One response of an engine.

    Example, ``72`` and the end token, sampled from weights of version 3: ``Generation(array("i", [12, 7, 1]),
    array("f", [-0.39, -0.0, -0.0]), "stop", ("3",), "72<|end|>")``.

    Arguments:
        token_ids: int32, exactly what the engine sampled.
        log_probs: float32, natural, one per token.
        finish_reason: ``stop``: an end token or stop text; ``length``: ``max_new_tokens`` reached; ``abort``: the
            request was aborted, with the tokens so far.
        weight_versions: of the weights that sampled the tokens, oldest first, each once.
        weight_spans: the version that sampled each token, as ``(version, start, end)`` with ``end`` excluded.
        text: decoded by the engine; empty if the engine has no tokenizer.
        routed_experts: int8 (or int16, for numbers above 127) [prompt + response - 1, layers, k], the experts of a
            mixture that processed each token. None if not requested.
        spec_info: counters of speculative decoding. None if the engine does not speculate.
        kept: truncated-sampling mask, over which ``log_probs`` are normalised. None for the whole vocabulary.
        columns: name -> float32 [t, width], other data of each token (:class:`~slime_core.EngineColumn`).
        prompt_tokens: number of prompt tokens that the engine read, including placeholders of images. None if not
            reported.
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
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict, compare=False)
    prompt_tokens: int | None = field(default=None, compare=False)

    def until(self, count: int) -> Generation:
        """Return the first ``count`` tokens, as if the response had stopped there, without the engine's text."""
        spans = tuple((name, start, min(end, count)) for name, start, end in self.weight_spans if start < count)
        mask, routes = self.kept, self.routed_experts
        return replace(
            self,
            token_ids=self.token_ids[:count],
            log_probs=self.log_probs[:count],
            finish_reason="stop",
            weight_versions=tuple(dict.fromkeys(name for name, _, _ in spans)) or self.weight_versions,
            text="",
            routed_experts=None if routes is None else routes[: len(routes) - len(self.token_ids) + count],
            weight_spans=spans,
            kept=None if mask is None else mask.until(count),
            columns={name: column[:count] for name, column in self.columns.items()},
        )


NOTHING = Generation(array("i"), array("f"), "abort")
"""The response of a request that was not sent."""


def added(first: SpecInfo | None, second: SpecInfo | None) -> SpecInfo | None:
    """Return the sum of both counters, for a sample that consists of several answers."""
    if first is None or second is None:
        return first or second
    return SpecInfo(*map(add, astuple(first), astuple(second)))


LAST_STEP = 64
"""Tokens at the end of an aborted response that the engine has not checked for a stop; more than one with speculative
decoding."""


PATTERN_TOKENS = 256
"""Number of tokens that are searched for a match of ``stop_regex``. An engine searches as many as the longest match has
characters, which for most patterns means the whole response, again at each token."""


def until_stop(before: Sequence[int], answer: Generation, sampling: SamplingParams, encoder: Encoder) -> Generation:
    """Return ``answer`` up to its first stop condition; unchanged if the engine has reported the stop itself.

    Arguments:
        before: the tokens of the response before ``answer``; empty if the response starts with it.
        sampling: the sampling parameters of the whole response.
    """
    was_aborted = answer.finish_reason == "abort"
    if not was_aborted and not before:
        return answer  # one request sampled the whole response, and the engine has checked every token
    fields = sampling.fields(n=1)
    texts, patterns = _listed(fields["stop"]), _listed(fields.get("stop_regex"))
    # Each token is at least one byte of the text, so a stop text has no more tokens than bytes.
    reach = max([len(text.encode()) for text in texts] + [PATTERN_TOKENS] * bool(patterns), default=0)
    ids = answer.token_ids
    stops = fields["stop_token_ids"] if was_aborted and not fields["ignore_eos"] else ()
    stop_ids = set(stops) if isinstance(stops, Sequence) else set()
    num_checked = len(ids) - LAST_STEP if was_aborted else len(ids)
    tail = list(before[max(0, len(before) - reach) :])
    if not stop_ids and not (reach and (was_aborted or tail)):
        return answer  # the engine has checked every token
    for count, token in enumerate(ids, 1):
        is_searched = reach and (count > num_checked or (tail and count < reach))
        end = encoder.decode_all([*tail, *ids[:count]][-reach - 1 :]) if is_searched else ""
        is_stop = any(text in end for text in texts) or any(re.search(pattern, end) for pattern in patterns)
        if token in stop_ids or (is_searched and is_stop):
            return answer.until(count)
    return answer


def _listed(texts: JsonValue) -> list[str]:
    if isinstance(texts, str):
        return [texts]
    return [str(text) for text in texts] if isinstance(texts, Sequence) else []


FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Finish reason of the engine -> status of the sample."""

UNANSWERED = "engine"
"""Cause of a failure: no engine has answered."""


def is_finished(sample: Sample) -> bool:
    """Return whether the response of ``sample`` is complete."""
    return sample.status in (Status.COMPLETED, Status.TRUNCATED)


def fail(sample: Sample, failure: EngineError) -> None:
    """Mark ``sample`` as failed because of ``failure``; it is not trained on."""
    sample.status, sample.error = Status.FAILED, str(failure)
    sample.failure_cause = failure.cause if isinstance(failure, RequestFailed) else UNANSWERED


def keep(sample: Sample, kept: Kept | None) -> None:
    """Record the truncated-sampling mask of the response in ``sample``. None means no truncation."""
    sample.rollout_top_p_token_ids = None if kept is None else TokenIds(kept.token_ids)
    sample.rollout_top_p_token_offsets = None if kept is None else TokenIds(kept.offsets)


def mask_of(sample: Sample) -> Kept | None:
    """Return the truncated-sampling mask that :func:`keep` recorded in ``sample``, or None."""
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    return None if ids is None or offsets is None else Kept(array("i", ids), array("i", offsets))


class EngineInputs(TypedDict, total=False):
    """Arguments of :meth:`Client.generate` that a sample adds."""

    extra: Mapping[str, JsonValue]


def engine_inputs(sample: Sample) -> EngineInputs:
    """Return the arguments of a request that carry the sample's inputs other than text; empty: it has none.

    Example: ``multimodal_inputs = {"image": ["cat.png"]}`` gives ``{"extra": {"image_data": ["cat.png"]}}``, SGLang's
    field.
    """
    inputs = sample.multimodal_inputs
    if not isinstance(inputs, dict) or not inputs:
        return {}
    return {"extra": {f"{kind}_data": value for kind, value in inputs.items()}}


def routes_of(sample: Sample) -> NDArray[np.int8 | np.int16] | None:
    """Return the experts that took the sample's tokens as an array; a sample read from a file has lists."""
    import numpy as np  # here, so that importing this module does not load numpy

    routes = sample.rollout_routed_experts
    return np.asarray(routes, np.int16) if isinstance(routes, list) else routes


def join_routes(
    before: NDArray[np.int8 | np.int16] | None, routes: NDArray[np.int8 | np.int16] | None
) -> NDArray[np.int8 | np.int16] | None:
    """Extend ``before`` with the experts of the tokens that the newest answer added."""
    if before is None or routes is None:
        return routes if before is None else before
    import numpy as np

    all_routes: NDArray[np.int8 | np.int16] = np.concatenate([before, routes[len(before) :]])
    return all_routes


def pad_routes(routes: NDArray[np.int8 | np.int16] | None, count: int) -> NDArray[np.int8 | np.int16] | None:
    """Pad ``routes`` with -1 to ``count`` tokens: no engine read the tokens added after the last turn."""
    if routes is None or len(routes) >= count:
        return routes
    import numpy as np

    return np.pad(routes, ((0, count - len(routes)), (0, 0), (0, 0)), constant_values=-1)
