"""What is asked of an engine, and what it answers: how tokens are drawn, and the tokens that were."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import EngineError
from slime_core.rollout.engines.speculation import spec_info
from slime_core.rollout.nucleus import Cut, Kept, kept_tokens
from slime_core.types import SpecInfo

FinishReason = Literal["stop", "length", "abort"]

MAX_KEPT = 64
"""Each costs about 30 bytes of an answer, a token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Arguments:
        temperature: 0 takes the likeliest token; log-probabilities are those of the distribution *after* this scaling.
        top_p: keep the likeliest tokens up to this mass; 1 keeps all.
        top_k: keep that many; -1 keeps all.
        max_new_tokens: longest response in tokens.
        min_new_tokens: no end before that many.
        stop: texts that end a response; what matched is kept in the ids.
        stop_token_ids: ids that end a response, besides the tokenizer's end-of-sequence token; kept in the ids.
        ignore_eos: go on after the end-of-sequence token.
        extra: further fields of SGLang's sampling parameters (``json_schema``, ``repetition_penalty``); they win.
        max_kept: tokens that top_p keeps at most, where top_k does not say it; with it, log-probabilities are those
            after the cut, and what was kept is recorded. None: they are those before it, as for an evaluation.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 1024
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    max_kept: int | None = MAX_KEPT

    def fields(self, *, n: int) -> dict[str, Any]:
        """The ``sampling_params`` of a request for ``n`` responses."""
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
            # Texts are for reading only, and then whole.
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            **self.extra,
        }


@dataclass(frozen=True, slots=True)
class Generation:
    """One response.

    Example, ``72`` and the end token, drawn from weights of version 3: ``Generation(array("i", [12, 7, 1]),
    array("f", [-0.39, -0.0, -0.0]), "stop", ("3",), "72<|end|>")``.

    Arguments:
        token_ids: int32, exactly what the engine drew.
        log_probs: float32, natural, one a token.
        finish_reason: ``stop``: an end token or stop text; ``length``: cut; ``abort``: ended from outside, with what
            there was.
        weight_versions: of the weights that drew the tokens, oldest first, each once.
        weight_spans: which of them drew which tokens, ``(version, start, end)`` with ``end`` excluded.
        text: decoded by the engine; empty when its tokenizer was left out.
        routed_experts: int16 [prompt + response - 1, layers, k], which experts of a mixture each token took; None: not
            asked for.
        spec_info: counters of speculative decoding; None: the engine does none.
        kept: what each token was drawn from, which ``log_probs`` are about; None: from all.
        prompt_tokens: that the engine read, placeholders of images included; None: it does not say.
    """

    token_ids: array[int]
    log_probs: array[float]
    finish_reason: FinishReason
    weight_versions: tuple[str, ...] = ()
    text: str = ""
    routed_experts: NDArray[np.int16] | None = field(default=None, compare=False)
    weight_spans: tuple[tuple[str, int, int], ...] = ()
    spec_info: SpecInfo | None = None
    kept: Kept | None = field(default=None, compare=False)
    prompt_tokens: int | None = field(default=None, compare=False)

    def until(self, count: int) -> Generation:
        """The first ``count`` of its tokens, as if what they say had ended it; the engine's text is left out."""
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
