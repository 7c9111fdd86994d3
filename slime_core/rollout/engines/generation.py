"""One response out of an engine's answer."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import EngineError
from slime_core.generation import FinishReason, Generation
from slime_core.rollout.engines.speculation import spec_info
from slime_core.rollout.nucleus import Cut, kept_tokens

__all__ = ["read_generation"]


def read_generation(row: Mapping[str, Any], routes: tuple[int, int] | None, cut: Cut | None = None) -> Generation:
    """One response out of an engine's answer.

    Arguments:
        row: as SGLang's ``/generate`` sends it.
        routes: layers of the model and experts a token, where routes were asked for.
        cut: what was left to draw from, where log-probabilities are those after the cut.

    Raises:
        EngineError: the answer contradicts itself, or lacks what was asked for.
    """
    meta = row["meta_info"]
    token_ids, entries = row["output_ids"], meta.get("output_token_logprobs") or []
    if len(token_ids) != len(entries):
        raise EngineError(f"The engine sent {len(token_ids)} tokens with {len(entries)} log-probabilities")
    kept, log_probs = None, array("f", (entry[0] for entry in entries))
    if cut is not None:
        kept, log_probs = kept_tokens(token_ids, log_probs, meta.get("output_top_logprobs") or [], cut)
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
            "The engine was asked for the routes of a mixture and sent none; it has to run with "
            "--enable-return-routed-experts, as the engines of a run with --use-rollout-routing-replay do"
        )
    flat = np.frombuffer(base64.b64decode(sent), np.int32)
    if flat.size % (layers * experts):
        raise EngineError(
            f"The engine sent {flat.size} numbers of experts, which are no multiple of {layers} layers x {experts} "
            "experts a token; does it serve the model of the run?"
        )
    return flat.reshape(-1, layers, experts).astype(np.int16)
