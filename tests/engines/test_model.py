"""The Megatron model computes what the Hugging Face model computes, and holds the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime_core import RunView
from slime_core.errors import CheckpointError, ConfigError
from slime_core.modeling.layout import ParallelLayout
from slime_core.modeling.spec import MBridgeSpec
from slime_core.opaque import column

# Megatron warns about its own calls between its own modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

LENGTHS = (5, 1, 12, 3, 17, 2, 8, 9)
ROUNDING = 1e-5
"""Logits differ by up to 1.5e-6, most on a CPU without AVX; where two sequences attend to each other, by 2.5."""


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 checkpoint of 3 layers, whose norms are not all ones."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_theta=1e4,
        tie_word_embeddings=request.param,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    target = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(target)
    return target


@pytest.fixture
def hugging_face(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def build(folder: Path, layout: ParallelLayout, **overrides: Any) -> tuple[MBridgeSpec, list[Any]]:
    spec = MBridgeSpec(None, RunView())
    chunks = spec.build(config_of(folder), dtype=torch.float32, parallel=layout, overrides=overrides)
    spec.load_weights(chunks, folder)
    return spec, chunks


def rows(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 96, (length,), generator=generator) for length in lengths]


def packed_logits(chunk: Any, sequences: list[torch.Tensor], *, tail: int = 0) -> torch.Tensor:
    """Logits of all sequences as one row, ``tail`` padding tokens at its end left out."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *(len(sequence) for sequence in sequences)]).cumsum(0).int()
    tokens = torch.cat([*sequences, torch.zeros(tail, dtype=torch.int64)])[None]
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences] + [torch.arange(tail)])[None]
    longest = max(len(sequence) for sequence in sequences)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    logits: torch.Tensor = chunk(tokens, positions, None, packed_seq_params=packed)
    return logits[0, : int(ends[-1])]


def test_packed_logits_equal_those_of_each_row_alone(megatron, folder, hugging_face):
    _, (chunk,) = build(folder, megatron)
    with torch.no_grad():
        alone = torch.cat([hugging_face(row[None]).logits[0] for row in rows()])
        assert (packed_logits(chunk, rows()) - alone).abs().max() < ROUNDING


def test_padding_at_the_end_of_the_row_changes_nothing(megatron, folder):
    _, (chunk,) = build(folder, megatron)
    with torch.no_grad():
        assert torch.allclose(packed_logits(chunk, rows(), tail=7), packed_logits(chunk, rows()), rtol=0, atol=ROUNDING)


def test_the_order_of_sequences_in_the_row_does_not_matter(megatron, folder):
    _, (chunk,) = build(folder, megatron)
    sequences, order = rows(), [3, 0, 7, 5, 1, 6, 2, 4]
    with torch.no_grad():
        straight = packed_logits(chunk, sequences).split(LENGTHS)
        shuffled = packed_logits(chunk, [sequences[i] for i in order]).split([LENGTHS[i] for i in order])
    for position, original in enumerate(order):
        assert torch.allclose(shuffled[position], straight[original], rtol=0, atol=ROUNDING)


def test_the_gradient_of_a_packed_loss_equals_hugging_faces(megatron, folder, hugging_face):
    spec, (chunk,) = build(folder, megatron)
    log_probabilities(packed_logits(chunk, rows())).backward()
    log_probabilities(torch.cat([hugging_face(row[None]).logits[0] for row in rows()])).backward()
    gradients = {name: parameter.grad for name, parameter in hugging_face.named_parameters()}
    for parameter in chunk.parameters():
        parameter.data = parameter.grad  # exported under Hugging Face names like weights
    for name, gradient in spec.export_weights([chunk]):
        assert (gradient - gradients.pop(name)).norm() < 1e-5 * gradient.norm(), name
    assert not gradients


def log_probabilities(logits_TV: torch.Tensor) -> torch.Tensor:
    targets_T = torch.cat(rows()).roll(-1)
    return logits_TV.log_softmax(-1).gather(1, targets_T[:, None]).mean()


def test_weights_come_back_bit_for_bit(megatron, folder, hugging_face):
    spec, chunks = build(folder, megatron)
    exported = dict(spec.export_weights(chunks))
    original = dict(hugging_face.named_parameters())
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)


def test_bfloat16_weights_come_back_rounded_once(megatron, folder, hugging_face):
    spec = MBridgeSpec(None, RunView())
    chunks = spec.build(config_of(folder), dtype=torch.bfloat16, parallel=megatron)
    spec.load_weights(chunks, folder)
    original = dict(hugging_face.named_parameters())
    assert all(torch.equal(weight, original[name].bfloat16()) for name, weight in spec.export_weights(chunks))


def test_a_tied_model_leaves_no_trace_for_an_untied_one(megatron):
    from mbridge.models.qwen3 import Qwen3Bridge

    assert Qwen3Bridge._DIRECT_MAPPING["output_layer.weight"] == "lm_head.weight"


def test_a_checkpoint_with_a_foreign_weight_is_refused(megatron, folder, hugging_face, tmp_path):
    hugging_face.register_parameter("stranger", torch.nn.Parameter(torch.zeros(2)))
    hugging_face.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"no place for \['stranger'\]"):
        build(tmp_path, megatron)


def test_losses_of_a_router_that_would_be_weighted_wrongly_are_refused(megatron):
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    ).to_dict()
    MBridgeSpec(None, RunView()).build(config, dtype=torch.float32, parallel=megatron)
    with pytest.raises(ConfigError, match=r"moe_z_loss_coeff 0\.1"):
        MBridgeSpec(None, RunView()).build(
            config, dtype=torch.float32, parallel=megatron, overrides={"moe_z_loss_coeff": 0.1}
        )


def test_full_recomputation_gives_the_same_logits(megatron, folder):
    _, (plain,) = build(folder, megatron)
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    _, (chunk,) = build(folder, megatron, **recomputed)
    assert torch.equal(packed_logits(chunk, rows()), packed_logits(plain, rows()))


@pytest.mark.parametrize(
    ("size", "said"),
    [("context_parallel_size", "context parallel size 2"), ("tensor_model_parallel_size", "add --sequence-parallel")],
)
def test_layouts_in_which_multi_latent_attention_does_not_train_are_refused(megatron, folder, size, said):
    from megatron.core.transformer.enums import AttnMaskType

    from slime_core.modeling.layers import PackedAttention

    _, (chunk,) = build(folder, megatron)
    setattr(chunk.config, size, 2)
    chunk.config.multi_latent_attention = True
    with pytest.raises(ConfigError, match=said):
        PackedAttention(chunk.config, 1, AttnMaskType.causal, "self")


def test_scaled_rotary_positions_are_refused(megatron, folder):
    scaled = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}
    with pytest.raises(ConfigError, match="'yarn'"):
        MBridgeSpec(None, RunView()).build({**config_of(folder), **scaled}, dtype=torch.float32, parallel=megatron)


@pytest.mark.parametrize(("embeds", "names"), [(True, {"pixels"}), (False, set())])
def test_only_a_chunk_that_embeds_tokens_is_handed_inputs(megatron, embeds, names):
    from slime_core.learner.micro_batches import RowInputs
    from slime_core.learner.trained_model import model_inputs

    pixels = {"pixels": column([np.array([[1.0], [2.0]]), np.array([[3.0]])], "float64")}
    wrapped: Any = SimpleNamespace(module=SimpleNamespace(pre_process=embeds))
    assert model_inputs(wrapped, RowInputs(pixels, (1, 0)), torch.device("cpu")).keys() == names
    assert model_inputs(wrapped, RowInputs(), torch.device("cpu")) == {}


def test_rotary_positions_wait_for_no_device(megatron):
    """Reading a number of a meta tensor fails, as it waits on a GPU; what Megatron reads is on the host."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    from slime_core.modeling.rows import Positions

    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
    angles, keys = torch.empty(5, 1, 1, 8, device="meta"), torch.empty(5, 2, 8, device="meta")
    whole = Positions.of(torch.tensor([0, 2, 5]), num_tokens=5).whole
    rotated = apply_rotary_pos_emb(keys, angles, config, cu_seqlens=whole, cp_group=group)
    assert rotated.shape == (5, 2, 8)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        apply_rotary_pos_emb(keys, angles, config, cu_seqlens=whole.to("meta"), cp_group=group)


def test_the_kernel_for_unequal_lengths_gives_the_same_logits_and_gradients(megatron, folder, monkeypatch):
    from torch.nn.attention import varlen

    from slime_core.modeling import rows as room
    from tests.unit.modeling.test_attention import loop

    _, (chunk,) = build(folder, megatron)
    found = []
    for taken in (False, True):
        monkeypatch.setattr(room, "takes_spans", lambda *_, taken=taken, **__: taken)
        monkeypatch.setattr(varlen, "varlen_attn", loop)
        chunk.zero_grad()
        logits = packed_logits(chunk, rows())
        logits.square().sum().backward()
        found.append([logits.detach(), *(parameter.grad.clone() for parameter in chunk.parameters())])
    for padded, taken in zip(*found, strict=True):
        assert torch.allclose(padded, taken, rtol=1e-4, atol=1e-4 * float(padded.abs().max()))
