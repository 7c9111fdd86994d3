from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slime_core.config.model_config import ForwardFlops, forward_flops

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}


def test_a_dense_model_by_hand():
    # A layer: q and out 32 x 64, k and v 32 x 32, three of 32 x 80; then 32 x 48 logits; two operations an entry.
    layer = 2 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 80)
    assert forward_flops(SHAPE) == ForwardFlops(per_token=3 * layer + 2 * 32 * 48, per_pair=3 * 4 * 4 * 16)


def test_a_sequence_is_linear_in_tokens_and_in_pairs():
    assert ForwardFlops(100, 8).of(3) == 348
    assert [ForwardFlops(0, 1).of(length) for length in range(4)] == [0, 1, 3, 6]


def counted(config, length: int) -> int:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None])
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["Qwen3Config", "LlamaConfig", "Qwen2Config"])
def test_dense_models_are_counted_as_torch_counts_them(name):
    import transformers

    config = getattr(transformers, name)(**SHAPE)
    work = forward_flops(config.to_dict())
    # Eager attention computes all pairs, those that are masked as well.
    assert counted(config, 7) == work.per_token * 7 + work.per_pair * 7 * 7


@pytest.mark.parametrize("more", [{}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_mixtures_count_the_experts_that_a_token_is_sent_to(more):
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(**{**SHAPE, **EXPERTS, **more})
    config._experts_implementation = "eager"
    work = forward_flops(config.to_dict())
    assert counted(config, 7) == work.per_token * 7 + work.per_pair * 7 * 7


def test_shared_experts_count_with_their_gate():
    alone = forward_flops({**SHAPE, **EXPERTS}).per_token
    qwen = forward_flops({**SHAPE, **EXPERTS, "shared_expert_intermediate_size": 40}).per_token
    assert qwen - alone == 3 * (6 * 32 * 40 + 2 * 32)
    deep = {**SHAPE, **EXPERTS, "n_shared_experts": 2, "first_k_dense_replace": 1}
    assert forward_flops(deep).per_token - alone == 2 * 6 * 32 * 48 + 6 * 32 * 80 - (6 * 32 * 48 + 2 * 32 * 4)


def test_a_model_whose_flops_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="hidden_size, vocab_size"):
        forward_flops({key: value for key, value in SHAPE.items() if key not in ("hidden_size", "vocab_size")})
    with pytest.raises(ValueError, match="kv_lora_rank"):
        forward_flops({**SHAPE, "kv_lora_rank": 8})
