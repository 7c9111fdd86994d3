"""What an engine answers to one request for one response."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from slime_core.generation.kept import Kept
from slime_core.types import SpecInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["NOTHING", "FinishReason", "Generation"]

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
        routed_experts: int16 [prompt + response - 1, layers, k], which experts of a mixture each token took; None: not
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
    routed_experts: NDArray[np.int16] | None = field(default=None, compare=False)
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
