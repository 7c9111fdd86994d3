"""The planned memory of a rank is what torch keeps, for small models on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_core import RunView
from slime_core.modeling.memory import Cut, ModelSize, Training, usage
from slime_core.modeling.spec import MBridgeSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Megatron calls collectives by names that torch has renamed
]

TOKENS = 512
TRAINING = Training(tokens=TOKENS, item=4)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DENSE = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
WIDE = {**DENSE, "hidden_size": 96, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 4}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
MIXTURE = {**DENSE, "model_type": "qwen3_moe", **EXPERTS}
MODELS: dict[str, dict[str, Any]] = {"dense": DENSE, "wide": WIDE, "mixture": MIXTURE}


def build(megatron: Any, model: str, layers: int, **overrides: object) -> Any:
    fields = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "rope_theta": 1e4, **MODELS[model]}
    config = {**fields, "num_hidden_layers": layers, "tie_word_embeddings": False}
    (chunk,) = MBridgeSpec(RunView()).build(config, dtype=torch.float32, parallel=megatron, overrides=overrides)
    return chunk


def size_of(chunk: Any, model: str, layers: int) -> ModelSize:
    fields = {"num_key_value_heads": 2, **MODELS[model]}
    numbers = {name: parameter.numel() for name, parameter in chunk.named_parameters()}
    routed = sum(number for name, number in numbers.items() if "local_experts" in name)
    ends = 64 * fields["hidden_size"]
    return ModelSize(
        layers=layers,
        hidden=fields["hidden_size"],
        vocab=64,
        heads=fields["num_attention_heads"],
        key_heads=fields["num_key_value_heads"],
        head=16,
        inner=0 if model == "mixture" else fields["intermediate_size"],
        experts=fields.get("num_experts", 0),
        taken=fields.get("num_experts_per_tok", 0),
        expert_inner=fields.get("moe_intermediate_size", 0),
        embedding=ends,
        output=ends,
        dense=sum(numbers.values()) - routed - 2 * ends,
        routed=routed,
    )


def kept_bytes(chunk: Any) -> int:
    """What a forward pass keeps for the backward pass, parameters left out; each memory once."""
    from megatron.core.packed_seq_params import PackedSeqParams

    own = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    ends = torch.arange(0, TOKENS + 1, 64, dtype=torch.int32)
    row = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=64, max_seqlen_kv=64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tokens, places = torch.zeros(1, TOKENS, dtype=torch.int64), torch.arange(TOKENS)[None]
        output = chunk(tokens, places, None, packed_seq_params=row)
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


RECOMPUTED: dict[str, tuple[dict[str, object], Cut]] = {
    "none": ({}, Cut(recompute="none")),
    "mlp": ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, Cut(recompute="mlp")),
    "full": (FULL, Cut()),
    "two together": ({**FULL, "recompute_num_layers": 2}, Cut(together=2)),
    "the first": ({**FULL, "recompute_method": "block"}, Cut(first=1)),
}


@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("model", MODELS)
def test_activations_of_layers_are_as_planned_within_a_tenth(megatron, model, recompute) -> None:
    """Of the second and third pair of layers, because what is kept at the ends of the model is not planned."""
    settings, cut = RECOMPUTED[recompute]
    if model == "mixture" and recompute == "mlp":
        cut = Cut(recompute="none")  # Megatron's mlp is that of layers without experts
    small, large = (build(megatron, model, layers, **settings) for layers in (2, 4))
    measured = kept_bytes(large) - kept_bytes(small)
    planned = [
        usage(size_of(chunk, model, layers), cut, TRAINING).parts["activations"]
        for chunk, layers in ((small, 2), (large, 4))
    ]
    assert planned[1] - planned[0] == pytest.approx(measured, rel=0.1)


def test_a_shared_critic_adds_a_model_without_output_weights(megatron) -> None:
    size = size_of(build(megatron, "dense", 2), "dense", 2)
    alone, both = (usage(size, Cut(), Training(tokens=TOKENS, item=4, critic=critic)) for critic in (False, True))
    assert both.parts["weights"] - alone.parts["weights"] == alone.parts["weights"] - 4 * size.output
    assert both.parts["optimizer"] - alone.parts["optimizer"] == 2 * (both.parts["weights"] - alone.parts["weights"])
    assert (both.parts["activations"], both.parts["logits"]) == (alone.parts["activations"], alone.parts["logits"])


@pytest.mark.parametrize("model", MODELS)
def test_weights_gradients_and_optimizer_are_as_held(megatron, model) -> None:
    from slime_core.config.learning import OptimizerConfig
    from slime_core.learner.optimizer import build_optimizer, wrap

    chunk = build(megatron, model, 2)
    planned = usage(size_of(chunk, model, 2), Cut(), TRAINING)
    assert planned.parts["weights"] == sum(parameter.nbytes for parameter in chunk.parameters())
    wrapped = wrap([chunk], bf16=False)
    buffers = [*wrapped[0].buffers, *wrapped[0].expert_parallel_buffers]
    assert sum(buffer.grad_data.nbytes for buffer in buffers) == pytest.approx(planned.parts["gradients"], rel=0.1)
    optimizer = build_optimizer(wrapped, OptimizerConfig(), bf16=False)
    for parameter in chunk.parameters():
        parameter.main_grad.fill_(1.0)
    optimizer.step()
    state = [
        value.nbytes
        for part in optimizer.chained_optimizers
        for held in part.optimizer.state.values()
        for name, value in held.items()
        if name != "step"
    ]
    assert sum(state) == pytest.approx(planned.parts["optimizer"], rel=0.1)
