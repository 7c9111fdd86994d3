"""What a forward pass over a sequence costs, read off a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ForwardFlops", "forward_flops"]

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
SHARED = "shared_expert_intermediate_size"


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Floating-point operations of a forward pass: a multiplication and an addition are two.

    Example: a model of 100 operations a token and 8 a pair works 3 x 100 + 6 x 8 = 348 on a sequence of 3 tokens.

    Arguments:
        per_token: of the matrix products that every token passes, logits included.
        per_pair: of attention, for a token and one that it sees; itself and all before it.
    """

    per_token: int
    per_pair: int

    def of(self, length: int) -> int:
        """Of a sequence of ``length`` tokens that attends causally, ``length (length + 1) / 2`` pairs."""
        return self.per_token * length + self.per_pair * (length * (length + 1) // 2)


def forward_flops(described: Mapping[str, Any]) -> ForwardFlops:
    """Of the decoder that ``config.json`` describes: grouped-query attention, gated MLPs or experts, and logits.

    A matrix of n x m costs 2 n m a token (Kaplan et al., 2001.08361, section 2.1). Of h hidden entries, q query heads
    and k key-value heads of d entries, a layer has ``2 h d (2 q + 2 k)`` for its projections, ``6 h i`` for a gated MLP
    of width i (three matrices), or ``6 h i_e`` for each of the experts that a token is sent to and for a shared one,
    and ``2 h`` for each number that routes; a pair costs ``2 d q`` for the score and as much for the value. Left out
    are norms, rotations and softmax, which grow with the tokens as well and are below a hundredth of the whole.

    Raises:
        ValueError: something is missing, or the attention is of another kind; the text says what.
    """
    missing = [name for name in NEEDED if not isinstance(described.get(name), int)]
    if missing:
        raise ValueError(f"does not say {', '.join(missing)}")
    if described.get("kv_lora_rank"):
        raise ValueError("describes latent attention (kv_lora_rank), whose work is not counted")
    hidden, layers, heads = (int(described[name]) for name in NEEDED[:3])
    width = int(described.get("head_dim") or hidden // heads)
    key_values = int(described.get("num_key_value_heads") or heads)
    projections = 2 * hidden * width * (2 * heads + 2 * key_values)
    experts = _layers_of_experts(described)
    mlps = (layers - experts) * 6 * hidden * int(described["intermediate_size"]) + experts * _expert_flops(described)
    logits = 2 * hidden * int(described["vocab_size"])
    return ForwardFlops(layers * projections + mlps + logits, layers * 4 * heads * width)


def _num_experts(described: Mapping[str, Any]) -> int:
    return next((int(described[name]) for name in EXPERTS if described.get(name)), 0)


def _layers_of_experts(described: Mapping[str, Any]) -> int:
    """Layers whose MLP is a mixture, as Qwen (``decoder_sparse_step``, ``mlp_only_layers``) and DeepSeek
    (``first_k_dense_replace``) write them down."""
    if not _num_experts(described):
        return 0
    every, dense = int(described.get("decoder_sparse_step") or 1), described.get("mlp_only_layers") or ()
    first = int(described.get("first_k_dense_replace") or 0)
    layers = range(first, int(described["num_hidden_layers"]))
    return sum((layer + 1) % every == 0 and layer not in dense for layer in layers)


def _expert_flops(described: Mapping[str, Any]) -> int:
    hidden, width = int(described["hidden_size"]), described.get("moe_intermediate_size")
    each = int(width or described["intermediate_size"])
    shared = int(described.get(SHARED) or 0)
    gate = 2 * hidden if shared else 0
    shared = shared or each * int(described.get("n_shared_experts") or 0)
    used = int(described.get("num_experts_per_tok") or 1)
    return 6 * hidden * (used * each + shared) + 2 * hidden * _num_experts(described) + gate
