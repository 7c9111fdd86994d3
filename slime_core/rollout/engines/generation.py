"""Parses the answer of an engine: one response with its log-probabilities, weight versions, routes and counters."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import EngineError
from slime_core.generation import FinishReason, Generation
from slime_core.rollout.truncated_sampling import Truncation, truncate
from slime_core.types import Sample, SpecInfo

__all__ = ["read_generation", "spec_info", "spec_metrics"]


def read_generation(
    row: Mapping[str, Any], routes: tuple[int, int] | None, cut: Truncation | None = None
) -> Generation:
    """One response of an engine.

    Arguments:
        row: as SGLang's ``/generate`` sends it.
        routes: layers of the model and experts per token, where routes were requested.
        cut: the top-p and top-k limits, where log-probabilities are those of the truncated distribution.

    Raises:
        EngineError: the answer contradicts itself, or lacks what was asked for.
    """
    meta = row["meta_info"]
    token_ids, entries = row["output_ids"], meta.get("output_token_logprobs") or []
    if len(token_ids) != len(entries):
        raise EngineError(f"The engine sent {len(token_ids)} tokens with {len(entries)} log-probabilities")
    kept, log_probs = None, array("f", (entry[0] for entry in entries))
    if cut is not None:
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
        routed_experts=None if routes is None else _routed_experts(meta, *routes),
        weight_spans=tuple(_span(span, len(token_ids)) for span in spans if span["version"]),
        spec_info=spec_info(meta),
        kept=kept,
        prompt_tokens=meta.get("prompt_tokens"),
    )


def _span(span: Mapping[str, Any], count: int) -> tuple[str, int, int]:
    return span["version"], span.get("start", 0), span.get("end", count)


def _routed_experts(meta: Mapping[str, Any], layers: int, experts: int) -> NDArray[np.int16]:
    """int32 in base64, token after token (sglang 0.5.23, srt/state_capturer/routed_experts.py:166)."""
    sent = meta.get("routed_experts")
    if sent is None:
        raise EngineError(
            "The request asked for the routed experts of a mixture and the engine sent none; it must run with "
            "--enable-return-routed-experts, as the engines of a run with --use-rollout-routing-replay do"
        )
    flat = np.frombuffer(base64.b64decode(sent), np.int32)
    if flat.size % (layers * experts):
        raise EngineError(
            f"The engine sent {flat.size} numbers of experts, which are no multiple of {layers} layers x {experts} "
            "experts a token; does it serve the model of the run?"
        )
    return flat.reshape(-1, layers, experts).astype(np.int16)


def spec_info(meta: Mapping[str, Any]) -> SpecInfo | None:
    """Counters of speculative decoding in ``meta_info`` (sglang 0.5.23, srt/managers/tokenizer_manager.py:3150); None:
    the engine does not speculate. A draft proposes tokens; the model verifies them in one pass and keeps a part."""
    if "spec_verify_ct" not in meta:
        return None
    return SpecInfo(
        spec_accept_token_num=int(meta.get("spec_num_correct_drafts", 0)),
        spec_draft_token_num=int(meta.get("spec_num_proposed_drafts", 0)),
        spec_verify_ct=int(meta["spec_verify_ct"]),
        completion_token_num=int(meta.get("completion_tokens", 0)),
    )


def spec_metrics(samples: Iterable[Sample]) -> dict[str, float]:
    """``rollout/spec/accept_rate``, accepted of the drafted tokens, and ``rollout/spec/accept_length``, tokens a
    verification pass; none where no engine speculates."""
    infos = [sample.spec_info for sample in samples if sample.spec_info.spec_verify_ct]
    if not infos:
        return {}
    drafted, passes = (sum(info.spec_draft_token_num for info in infos), sum(info.spec_verify_ct for info in infos))
    accepted, tokens = (
        sum(info.spec_accept_token_num for info in infos),
        sum(info.completion_token_num for info in infos),
    )
    return {
        "rollout/spec/accept_rate": accepted / drafted if drafted else 0.0,
        "rollout/spec/accept_length": tokens / passes,
    }
