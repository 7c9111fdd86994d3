"""Counts the parameters of a model: in total, and active for one token.

The count is the sum over the matrices of each layer; a matrix of n x m has n m parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime_models.shape import Shape

__all__ = ["Counts", "Parameters", "count"]

Counts = Literal["all", "without_embeddings", "next_token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of each part of a model.

    Arguments:
        embedding: the input embedding.
        output: the output weights; 0: tied to the embedding.
        dense: all other weights outside of routed experts: attention, norms, MLPs, shared experts, routers.
        experts: routed experts of all layers.
        active_experts: routed experts that one token uses.
        biases: biases with which routers select experts; in checkpoints, but never trained. Not in ``total``.
        next_token: multi-token prediction layers of the checkpoint with their experts; not in ``total``.
        active_next_token: parameters of these layers that one token uses.
        stored_next_token: numbers of these layers in the checkpoint, including copies of embedding and output weights.
    """

    embedding: int
    output: int
    dense: int
    experts: int
    active_experts: int
    biases: int
    next_token: int
    active_next_token: int
    stored_next_token: int

    @property
    def stored(self) -> int:
        """Number of stored numbers in the files of a checkpoint."""
        return self.total + self.biases + self.stored_next_token

    @property
    def total(self) -> int:
        """Number of trained parameters."""
        return self.embedding + self.output + self.dense + self.experts

    @property
    def active(self) -> int:
        """Number of parameters that one token uses, including embedding and output weights."""
        return self.embedding + self.output + self.dense + self.active_experts

    def published(self, counts: Counts) -> tuple[int, int]:
        """Return (total, active) parameters as the publishers count them.

        Arguments:
            counts: ``without_embeddings`` leaves out embedding and output weights; ``next_token`` leaves them out as
                well and adds the multi-token prediction layers to the first number.
        """
        if counts == "all":
            return self.total, self.active
        further = self.next_token if counts == "next_token" else 0
        return self.dense + self.experts + further, self.dense + self.active_experts


def count(shape: Shape) -> Parameters:
    """Count the parameters of a decoder of this shape."""
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    norms = hidden * (4 if shape.sandwich_norm else 2)
    mlps = shape.dense_layers * 3 * hidden * shape.intermediate_size
    expert = routed = shared = number = 0
    if shape.experts is not None:
        expert, number = 3 * hidden * shape.experts.moe_intermediate_size, layers - shape.dense_layers
        routed = shape.experts.n_routed_experts
        shared = expert * shape.experts.n_shared_experts + hidden * routed  # and the router
    active_experts = shape.experts.num_experts_per_tok if shape.experts else 0
    layer = _attention(shape) + norms
    outside = layer + shared + 2 * hidden * hidden + 3 * hidden  # a prediction layer adds a projection and three norms
    sigmoid = shape.experts is not None and shape.experts.scoring_func == "sigmoid"
    further = shape.num_nextn_predict_layers
    return Parameters(
        embedding=shape.vocab_size * hidden,
        output=0 if shape.tie_word_embeddings else shape.vocab_size * hidden,
        dense=layers * layer + mlps + number * shared + hidden,
        experts=number * routed * expert,
        active_experts=number * active_experts * expert,
        biases=number * routed if sigmoid else 0,
        next_token=further * (outside + routed * expert),
        active_next_token=further * (outside + active_experts * expert),
        stored_next_token=further * (outside + routed * expert + 2 * shape.vocab_size * hidden + sigmoid * routed),
    )


def _attention(shape: Shape) -> int:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    if (latent := shape.latent) is None:
        queries, pairs = heads * shape.head_dim, 2 * shape.num_key_value_heads * shape.head_dim
        biases = queries + pairs if shape.attention_bias else 0
        return hidden * (2 * queries + pairs) + biases + (2 * shape.head_dim if shape.use_qk_norm else 0)
    query = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    rank = latent.q_lora_rank
    queries = hidden * query if rank is None else hidden * rank + rank + rank * query
    down = hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim) + latent.kv_lora_rank
    up = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    return queries + down + up + heads * latent.v_head_dim * hidden
