"""Log-probabilities and entropies of response tokens, over the tensor-parallel ranks of this process."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from slime_core.learner.packed.batches import MicroBatch
from slime_core.ops.log_probs import log_probs_and_entropy

__all__ = ["response_log_probs"]


def response_log_probs(
    logits_1TV: torch.Tensor,
    micro: MicroBatch,
    *,
    chunk_size: int | None,
    with_entropy: bool = True,
    consume: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(token) of every response token at the temperature that sampled it, and the entropy there; float32 [u].

    Where top-p or top-k left something out, p is the distribution over what they kept; the entropy is that of all.

    Arguments are those of :func:`slime_core.ops.log_probs.log_probs_and_entropy`.
    """
    return log_probs_and_entropy(
        logits_1TV[0],
        rows_U=micro.rows_U,
        targets_U=micro.targets_U,
        temperature=micro.temperature,
        chunk_size=chunk_size,
        group=parallel_state.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
        consume=consume,
        kept=micro.kept,
    )
