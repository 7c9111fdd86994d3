"""Reads the answers of engines: tokens, log-probabilities, routed experts, and the mask of truncated sampling.

    read_answer      the responses in the bytes of an answer
    read_generation  one response with its log-probabilities, weight versions, routes and counters
    read_load        number of sequences of an engine, and counters that advance while it computes
    take_routes      the routed experts of a mixture, removed from the bytes before these are parsed
    read_mask        the tokens that top-p, top-k and min-p left to sample from, and log-probabilities over these, as
                     the engine reports them
    truncate         the same, computed from the likeliest tokens
    spec_metrics     share of drafted tokens that engines accepted

**Routes.** SGLang sends them as int32 in base64, token after token (0.5.23, srt/state_capturer/routed_experts.py:166):
66 MB for a response of 32,000 tokens of 48 layers with 8 experts a token, nearly all of the answer. They are decoded in
pieces, so that neither their text nor their int32 numbers are in memory at once.

**Truncated sampling.** For ``return_sampling_mask`` an engine sends the tokens from which each token was sampled, and
its log-probability among these. The router drops that field of a request, so a request through it reads the likeliest
tokens instead: an engine reports log-probabilities after the temperature and before it cuts (sglang
0.5.23, layers/sampler.py:309), and the likeliest tokens with theirs. The cut is computed from these by the engine's
rule (``top_k_top_p_min_p_sampling_from_probs_torch`` there): of the tokens in falling order of probability, those
stay

    whose rank, from 0, is below top_k; before which at most top_p of the mass stands; of at least min_p times the first

All three read the probabilities before any cut, without renormalisation in between. A token that a grammar or a minimum
number of new tokens forbids has probability 0 there and never stays. Then, with ``S`` the tokens that stayed,

    log q(t) = log p(t) - log sum_{v in S} p(v)

The engine compares float32 numbers that it has not sent, and breaks ties in an unknown order. A sampled token at the
border is therefore always counted among those that stayed; elsewhere it is an error.
"""

from __future__ import annotations

import binascii
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import EngineError, RequestRefused
from slime_core.generation import FinishReason, Generation
from slime_core.generation.sampling import Kept
from slime_core.types import EngineColumn, Sample, SpecInfo
from slime_core.untrusted import parse_long_json

NO_COLUMNS: Mapping[str, EngineColumn] = MappingProxyType({})

BODY_SHOWN = 400
"""Characters of an answer that an error quotes."""


def read_answer(content: bytes) -> list[Any]:
    """Return the responses in an answer, with their routes as numbers.

    Raises:
        ValueError: it is no answer of an engine.
    """
    try:
        text, routes = take_routes(content)
        answer = parse_long_json(text)
    except ValueError as error:
        raise ValueError(f"an answer that is no JSON: {error}") from error
    rows = answer if isinstance(answer, list) else [answer]
    if not all(map(_is_response, rows)):
        shown = text.decode(errors="replace")[:BODY_SHOWN]
        raise ValueError(f"the answer {shown}, which is not a response of SGLang's")
    for row in rows if routes else ():
        place = row["meta_info"].get(ROUTES)
        if isinstance(place, int) and 0 <= place < len(routes):
            row["meta_info"][ROUTES] = routes[place]
    return rows


LOADS = "/v1/loads"
"""The path at which SGLang publishes the load of each scheduler, also of one that is busy."""

COUNTERS = ("decode_moments", "total_prefill_uncached_tokens", "num_used_tokens")
"""Sums over decode steps, prefilled tokens, tokens in the KV cache. The lengths of queues also change while an engine
stands still."""

SEQUENCES = ("num_running_reqs", "num_waiting_reqs")


@dataclass(frozen=True, slots=True)
class Load:
    """The load of an engine (sglang 0.5.23, srt/managers/load_snapshot.py), summed over its schedulers.

    Arguments:
        sequences: responses that it generates, or queues.
        counters: of each scheduler, :data:`COUNTERS`.
    """

    sequences: int
    counters: tuple[tuple[Any, ...], ...]


def read_load(answer: Any) -> Load | None:
    """Return the load in the answer to :data:`LOADS`, or None if the answer is not SGLang's."""
    loads = answer.get("loads") if isinstance(answer, dict) else None
    schedulers = [load for load in loads if isinstance(load, dict)] if isinstance(loads, list) else []
    if not schedulers:
        return None
    numbers = [load.get(name) for load in schedulers for name in SEQUENCES]
    return Load(
        sequences=sum(number for number in numbers if isinstance(number, int)),
        counters=tuple(tuple(load.get(name) for name in COUNTERS) for load in schedulers),
    )


def _is_response(row: Any) -> bool:
    meta = row.get("meta_info") if isinstance(row, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    return isinstance(reason, dict) and "type" in reason and isinstance(row.get("output_ids"), list)


def read_generation(
    row: Mapping[str, Any],
    routes: tuple[int, int] | None,
    cut: Truncation | None = None,
    columns: Mapping[str, EngineColumn] = NO_COLUMNS,
) -> Generation:
    """Return one response of an engine.

    Arguments:
        row: as SGLang's ``/generate`` sends it, with routes as numbers (:func:`read_answer`).
        routes: layers of the model and experts per token, if routes were requested.
        cut: the top-p and top-k limits, if log-probabilities are those of the truncated distribution.
        columns: further data to read for each token, by name.

    Raises:
        EngineError: the answer contradicts itself, or a field is missing or of another type.
    """
    try:
        return replace(_generation(row, routes, cut), columns=_columns(row, columns))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as problem:
        reported = f"The engine sent a response that is not SGLang's ({problem!r}): {str(row)[:BODY_SHOWN]}"
        raise EngineError(reported) from problem


def _generation(row: Mapping[str, Any], routes: tuple[int, int] | None, cut: Truncation | None) -> Generation:
    meta = row["meta_info"]
    token_ids, entries = row["output_ids"], meta.get("output_token_logprobs") or []
    if len(token_ids) != len(entries):
        raise EngineError(f"The engine sent {len(token_ids)} tokens with {len(entries)} log-probabilities")
    kept, log_probs = None, array("f", [entry[0] for entry in entries])
    if cut is not None:
        if cut.is_reported:
            kept, log_probs = read_mask(token_ids, meta)
        else:
            kept, log_probs = truncate(token_ids, log_probs, meta.get("output_top_logprobs") or [], cut)
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"The engine ended a response with {meta['finish_reason']}; known are stop, length and abort")
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version", "")}]
    return Generation(
        token_ids=array("i", token_ids),
        log_probs=log_probs,
        finish_reason=cast(FinishReason, reason),
        weight_versions=tuple(dict.fromkeys(span["version"] for span in spans)),
        text=row.get("text") or "",
        routed_experts=None if routes is None else shaped(meta, *routes),
        weight_spans=tuple(_span(span, len(token_ids)) for span in spans if span["version"]),
        spec_info=spec_info(meta),
        kept=kept,
        prompt_tokens=meta.get("prompt_tokens"),
    )


def request_fields(columns: Mapping[str, EngineColumn], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request for ``columns``, and those of ``more``; the largest value of each."""
    fields = dict(more)
    for column in columns.values():
        more_fields: Mapping[str, Any] = column.request
        for name, value in more_fields.items():
            fields[name] = max(fields.get(name, value), value)
    return fields


def _columns(row: Mapping[str, Any], columns: Mapping[str, EngineColumn]) -> dict[str, NDArray[np.float32]]:
    count, arrays = len(row["output_ids"]), dict[str, NDArray[np.float32]]()
    for name, column in columns.items():
        array = np.array(column.read(row["meta_info"]) if count else np.zeros((0, column.width)), np.float32)
        if array.shape != (count, column.width):
            raise EngineError(
                f"engine column {name!r} of a response has the shape {list(array.shape)}; expected: [{count}, "
                f"{column.width}]. Does a router drop {', '.join(column.request)} from requests?"
            )
        arrays[name] = array
    return arrays


def _span(span: Mapping[str, Any], count: int) -> tuple[str, int, int]:
    return span["version"], span.get("start", 0), span.get("end", count)


def spec_info(meta: Mapping[str, Any]) -> SpecInfo | None:
    """Return the counters of speculative decoding (sglang 0.5.23, srt/managers/tokenizer_manager.py:3150), or None if
    the engine does not speculate. A draft proposes tokens; the model verifies them in one pass and keeps some."""
    if "spec_verify_ct" not in meta:
        return None
    return SpecInfo(
        spec_accept_token_num=int(meta.get("spec_num_correct_drafts", 0)),
        spec_draft_token_num=int(meta.get("spec_num_proposed_drafts", 0)),
        spec_verify_ct=int(meta["spec_verify_ct"]),
        completion_token_num=int(meta.get("completion_tokens", 0)),
    )


def spec_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """Return ``rollout/spec/accept_rate``, the accepted share of drafted tokens, and ``rollout/spec/accept_length``,
    tokens a verification pass; empty if no engine speculates."""
    infos = [sample.spec_info for sample in samples if sample.spec_info.spec_verify_ct]
    if not infos:
        return {}
    drafted = sum(info.spec_draft_token_num for info in infos)
    accepted = sum(info.spec_accept_token_num for info in infos)
    tokens = sum(info.completion_token_num for info in infos)
    return {
        "rollout/spec/accept_rate": accepted / drafted if drafted else 0.0,
        "rollout/spec/accept_length": tokens / sum(info.spec_verify_ct for info in infos),
    }


# --- Routes -----------------------------------------------------------------------------------------------------------

Routes = NDArray[np.int8 | np.int16]

ROUTES = "routed_experts"
_START = re.compile(rb'"routed_experts":\s*"')
# No string of JSON can hold these bytes: quotes in it have a backslash before them.

PIECE = 2**20
"""Characters of base64 decoded at once; a multiple of 16, which are three int32."""


def take_routes(content: bytes) -> tuple[bytes, list[Routes]]:
    """Return JSON with each array of routes replaced by its place in the list, and the flat arrays.

    Raises:
        ValueError: routes are no int32 numbers in base64.
    """
    text: list[bytes] = []
    routes: list[Routes] = []
    end = 0
    for start in _START.finditer(content):
        last = content.index(b'"', start.end())
        text += [content[end : start.end() - 1], str(len(routes)).encode()]
        routes.append(_narrow(memoryview(content)[start.end() : last]))
        end = last + 1
    return (b"".join([*text, content[end:]]), routes) if routes else (content, routes)


def _narrow(text: memoryview) -> Routes:
    size, padding = len(text) // 4 * 3, bytes(text[-2:]).count(b"=")
    count, remainder = divmod(size - padding, 4)
    if remainder:
        raise ValueError(f"{size - padding} bytes of routes are no int32 numbers")
    routes: Routes = np.empty(count, np.int8)
    done = 0
    for start in range(0, len(text), PIECE):
        numbers = np.frombuffer(binascii.a2b_base64(text[start : start + PIECE], strict_mode=True), np.int32)
        if routes.dtype == np.int8 and numbers.max(initial=0) > np.iinfo(np.int8).max:
            routes = routes.astype(np.int16)
        routes[done : done + numbers.size] = numbers
        done += numbers.size
    return routes


def shaped(meta: Mapping[str, Any], layers: int, experts: int) -> Routes:
    """Return the routes of a response, [tokens, layers, experts a token].

    Raises:
        EngineError: routes are missing, or have the shape of another model.
    """
    flat = meta.get(ROUTES)
    if flat is None:
        raise EngineError(
            "The engine sent no routed experts, which the request needs; it must run with "
            "--enable-return-routed-experts, as the engines of a run with --use-rollout-routing-replay do"
        )
    if flat.size % (layers * experts):
        raise EngineError(
            f"The engine sent {flat.size} numbers of experts, which are no multiple of {layers} layers x {experts} "
            "experts a token; does it serve the model of the run?"
        )
    routes: Routes = flat.reshape(-1, layers, experts)
    return routes


# --- Truncated sampling -----------------------------------------------------------------------------------------------

FORBID = ("min_new_tokens", "json_schema", "regex", "ebnf", "structural_tag")
"""Fields of SGLang's sampling parameters that forbid tokens before probabilities are taken."""

BORDER = 1e-3
"""Share of a probability, and of the total mass, within which a token is at the border of the cut."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """The limits of the tokens that may be sampled.

    Example: ``Truncation.of({"top_p": 0.9, "top_k": -1}, most=64, vocab_size=16)`` is ``Truncation(16, 0.9, 0.0)``.

    Arguments:
        top_k: largest number of tokens that are kept, and the number that is requested.
        top_p: mass in (0, 1] before the last token that stays.
        min_p: of the likeliest token's probability; 0: no bound.
        is_reported: the engine reports the tokens that stay.
    """

    top_k: int
    top_p: float = 1.0
    min_p: float = 0.0
    is_reported: bool = False

    @property
    def request_fields(self) -> dict[str, Any]:
        """The fields of a request for the input of :func:`read_mask` or :func:`truncate`."""
        return {"return_sampling_mask": True} if self.is_reported else {"top_logprobs_num": self.top_k}

    @staticmethod
    def of(fields: Mapping[str, Any], *, most: int | None, vocab_size: int | None) -> Truncation | None:
        """Return the cut of a request, or None if all tokens stay or the likeliest token is sampled.

        Arguments:
            fields: SGLang's sampling parameters.
            most: largest number of tokens that are kept without top_k. None: the mask is not needed.
            vocab_size: bound of top_k. None: unknown.

        Raises:
            RequestRefused: min_p is combined with another cut; the result depends on the engine's backend.
        """
        top_k, top_p, min_p = fields.get("top_k", -1), fields.get("top_p", 1.0), fields.get("min_p", 0.0)
        if most is not None and min_p > 0 and (top_p < 1 or top_k != -1):
            raise RequestRefused(
                f"min_p {min_p:g} with top_p {top_p:g} and top_k {top_k}: with min_p, an engine cuts by its sampling "
                "backend's rule (pytorch takes top_p of the total mass, flashinfer of the mass after top_k), so the "
                "set that a token was sampled from is unknown. Train with min_p alone, or with top_p and top_k"
            )
        is_cut = top_k != -1 or top_p < 1 or min_p > 0 or any(fields.get(name) for name in FORBID)
        if most is None or fields.get("temperature") == 0 or not is_cut:
            return None
        return Truncation(min(top_k if top_k > 0 else most, vocab_size or 2**30), top_p, min_p)

    def stays(self, probs_TK: NDArray[np.float64], *, slack: float = 0.0) -> NDArray[np.bool_]:
        """Return which of the K likeliest tokens, in falling order, stay; with ``slack``, also tokens at the border."""
        before_TK = probs_TK.cumsum(axis=1) - probs_TK
        in_mass_TK = before_TK <= self.top_p + slack
        likely_TK = probs_TK >= probs_TK[:, :1] * self.min_p * (1 - slack)
        stays_TK = in_mass_TK & likely_TK & (probs_TK > 0)
        stays_TK[:, self.top_k :] = False
        return np.asarray(stays_TK)


def read_mask(token_ids: Sequence[int], meta: Mapping[str, Any]) -> tuple[Kept, array[float]]:
    """Return the tokens kept at each of t positions, and the log-probability of each sampled token among them, float32.

    Arguments:
        token_ids: the sampled tokens.
        meta: ``meta_info`` of the answer to a request with ``return_sampling_mask`` (sglang 0.5.23,
            srt/managers/tokenizer_manager.py:2540).

    Raises:
        EngineError: the engine sent another number of masks, or sampled a token outside of its mask.
    """
    rows = meta.get("output_token_sampling_mask") or []
    log_probs = array("f", meta.get("output_token_sampling_logprobs") or [])
    if not len(token_ids) == len(rows) == len(log_probs):
        raise EngineError(
            f"The engine sent {len(token_ids)} tokens with {len(rows)} masks and {len(log_probs)} log-probabilities "
            "over them; return_sampling_mask requests both for each token. Is it sglang 0.5.23?"
        )
    outside = next(
        (place for place, (token, row) in enumerate(zip(token_ids, rows, strict=True)) if token not in row), None
    )
    if outside is not None:
        raise EngineError(
            f"The engine sampled token {token_ids[outside]} at place {outside}, which its mask leaves out"
        )
    return Kept(array("i", chain.from_iterable(rows)), array("i", [0, *accumulate(map(len, rows))])), log_probs


def truncate(
    token_ids: Sequence[int], log_probs: Sequence[float], top: Sequence[Sequence[Sequence[Any]]], cut: Truncation
) -> tuple[Kept, array[float]]:
    """Return the tokens kept at each of t positions, and the log-probability of each sampled token among them, float32.

    Arguments:
        token_ids: the sampled tokens.
        log_probs: of these tokens, before the cut.
        top: ``[log-prob, id, ...]`` of the likeliest tokens at each place, in falling order, before the cut.

    Raises:
        EngineError: the engine sent fewer than ``cut.top_k`` of them, or sampled a token that the cut leaves out.
    """
    if not token_ids:
        return Kept(array("i"), array("i", [0])), array("f")
    ids_TK, logs_TK = _table(token_ids, top, cut)
    sampled_T, logs_T = np.asarray(token_ids, np.int64), np.asarray(log_probs, np.float64)
    probs_TK = np.exp(logs_TK)
    stays_TK = cut.stays(probs_TK)
    sampled_TK = ids_TK == sampled_T[:, None]
    outside_T = ~(stays_TK & sampled_TK).any(axis=1)
    if outside_T.any():
        least_T = np.where(stays_TK, probs_TK, np.inf).min(axis=1)
        ties_T = np.exp(logs_T) >= least_T * (1 - BORDER)
        near_T = (cut.stays(probs_TK, slack=BORDER) & sampled_TK).any(axis=1)
        forbidden = np.flatnonzero(outside_T & ~ties_T & ~near_T)
        if len(forbidden):
            place = forbidden[0]
            raise EngineError(
                f"The engine sampled token {sampled_T[place]} of probability {np.exp(logs_T[place]):.3g} at place "
                f"{place} of a response, which top_p {cut.top_p:g}, top_k {cut.top_k} and min_p {cut.min_p:g} leave "
                "out. Its sampling rule differs from that of sglang 0.5.23, or a proxy changed the request; leave "
                "--rollout-top-p and --rollout-top-k out"
            )
    # Sampled tokens at the border are appended, even if they are among the K.
    mass_T = (probs_TK * stays_TK).sum(axis=1) + np.where(outside_T, np.exp(logs_T), 0.0)
    ids_TJ = np.concatenate([ids_TK, sampled_T[:, None]], axis=1)
    stays_TJ = np.concatenate([stays_TK, outside_T[:, None]], axis=1)
    offsets = np.concatenate([[0], stays_TJ.sum(axis=1).cumsum()])
    kept = Kept(_array("i", ids_TJ[stays_TJ], np.int32), _array("i", offsets, np.int32))
    return kept, _array("f", logs_T - np.log(mass_T), np.float32)


def _array(code: str, values: NDArray[Any], dtype: type[np.generic]) -> array[Any]:
    return array(code, values.astype(dtype).tobytes())


def _table(
    token_ids: Sequence[int], top: Sequence[Sequence[Sequence[Any]]], cut: Truncation
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the ids and the log-probabilities of the likeliest tokens, each [t, k]."""
    counts = {len(row) for row in top}
    if len(top) != len(token_ids) or min(counts) < cut.top_k or len(counts) > 1:
        raise EngineError(
            f"The engine sent {sorted(counts)} likeliest tokens at {len(top)} places; {cut.top_k} at each of "
            f"{len(token_ids)} were requested, to compute which tokens top_p and top_k kept"
        )
    shape = (len(top), counts.pop())
    ids = np.fromiter((entry[1] for entry in chain.from_iterable(top)), np.int64, shape[0] * shape[1])
    # JSON has no infinity: SGLang writes null for the logarithm of a probability that is 0 in float32.
    logs = (-np.inf if entry[0] is None else entry[0] for entry in chain.from_iterable(top))
    return ids.reshape(shape), np.fromiter(logs, np.float64, shape[0] * shape[1]).reshape(shape)
