"""A small model of Megatron's, and a pass of it over samples whose first tokens may stand once for several."""

from __future__ import annotations

from typing import Any

import torch

from slime_core import RunView
from slime_core.modeling.layout import ParallelLayout

__all__ = ["build", "gradients", "train"]


def build(shape: dict[str, Any]) -> Any:
    """Build a Megatron GPTModel with random weights."""
    from transformers import Qwen3Config

    from slime_core.modeling.spec import MBridgeSpec

    torch.manual_seed(0)
    config = Qwen3Config(
        **shape, tie_word_embeddings=False, max_position_embeddings=4096, architectures=["Qwen3ForCausalLM"]
    )
    (chunk,) = MBridgeSpec(RunView()).build(config.to_dict(), dtype=torch.float32, parallel=ParallelLayout())
    return chunk


def train(chunk: Any, micro: Any) -> torch.Tensor:
    """Compute the gradients of a policy loss in the parameters; return the log-probs of the responses."""
    from slime_core.learner.trained_model import response_log_probs

    chunk.zero_grad()
    logits = chunk(micro.tokens_1T, micro.position_ids_1T, None, packed_seq_params=micro.packed_sequence)
    log_probs_U, _ = response_log_probs(logits, micro, chunk_size=1024, with_entropy=False)
    (-log_probs_U * micro.advantages_U * micro.weights_U).sum().backward()
    return log_probs_U.detach()


def gradients(chunk: Any) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in chunk.parameters()]
