"""What the Megatron model of every family has in common; ``test_families.py`` compares each with Hugging Face."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime_core import RunView
from slime_core.errors import CheckpointError, ConfigError
from slime_core.modeling.spec import MBridgeSpec
from slime_core.opaque import column
from tests.engines.families import build, config_of, of_hugging_face, packed_logits, write

# Megatron warns about its own calls between its own modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

FAMILY = "qwen3"
LENGTHS = (5, 1, 12, 3, 17, 2, 8, 9)
ROUNDING = 1e-5
"""Logits differ by up to 1.5e-6, most on a CPU without AVX; where two sequences attend to each other, by 2.5."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(FAMILY, tmp_path_factory.mktemp("model"))


@pytest.fixture
def chunk(megatron, folder: Path) -> Any:
    _, (chunk,) = build(FAMILY, folder, megatron)
    return chunk


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 16, (length,), generator=generator) for length in LENGTHS]


@torch.no_grad()
def test_padding_at_the_end_of_the_row_changes_nothing(chunk) -> None:
    assert torch.allclose(packed_logits(chunk, rows(), tail=7), packed_logits(chunk, rows()), rtol=0, atol=ROUNDING)


@torch.no_grad()
def test_the_order_of_sequences_in_the_row_does_not_matter(chunk) -> None:
    sequences, order = rows(), [3, 0, 7, 5, 1, 6, 2, 4]
    straight = packed_logits(chunk, sequences).split(LENGTHS)
    shuffled = packed_logits(chunk, [sequences[i] for i in order]).split([LENGTHS[i] for i in order])
    for position, original in enumerate(order):
        assert torch.allclose(shuffled[position], straight[original], rtol=0, atol=ROUNDING)


def test_a_tied_model_leaves_no_trace_for_an_untied_one(megatron, tmp_path) -> None:
    from mbridge.models.qwen3 import Qwen3Bridge

    build(FAMILY, write(FAMILY, tmp_path, tie_word_embeddings=True), megatron)
    assert Qwen3Bridge._DIRECT_MAPPING["output_layer.weight"] == "lm_head.weight"


def test_a_checkpoint_with_a_foreign_weight_is_refused(megatron, folder, tmp_path) -> None:
    model = of_hugging_face(folder)
    model.register_parameter("stranger", torch.nn.Parameter(torch.zeros(2)))
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="stranger"):
        build(FAMILY, tmp_path, megatron)


@pytest.mark.parametrize(
    ("family", "fields", "overrides", "named"),
    [
        ("qwen3_moe", {}, {"moe_z_loss_coeff": 0.1}, r"moe_z_loss_coeff 0\.1"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, {}, "'yarn'"),
    ],
)
def test_a_router_loss_of_a_wrong_weight_and_scaled_positions_are_refused(
    megatron, family, fields, overrides, named
) -> None:
    config = config_of(family).to_dict() | fields
    with pytest.raises(ConfigError, match=named):
        MBridgeSpec(RunView()).build(config, dtype=torch.float32, parallel=megatron, overrides=overrides)


@pytest.mark.parametrize(
    ("size", "named"),
    [("context_parallel_size", "context parallel size 2"), ("tensor_model_parallel_size", "--sequence-parallel")],
)
def test_layouts_in_which_multi_latent_attention_does_not_train_are_refused(chunk, size, named) -> None:
    from slime_models.latent_attention import PackedLatentAttention

    setattr(chunk.config, size, 2)
    with pytest.raises(ConfigError, match=named):
        PackedLatentAttention(chunk.config)


@pytest.mark.parametrize(("embeds", "names"), [(True, {"pixels"}), (False, set())])
def test_only_a_chunk_that_embeds_tokens_is_handed_inputs(megatron, embeds, names) -> None:
    from slime_core.learner.micro_batches import RowInputs
    from slime_core.learner.trained_model import model_inputs

    pixels = {"pixels": column([np.array([[1.0], [2.0]]), np.array([[3.0]])])}
    wrapped: Any = SimpleNamespace(module=SimpleNamespace(pre_process=embeds))
    assert model_inputs(wrapped, RowInputs(pixels, (1, 0)), torch.device("cpu")).keys() == names
    assert model_inputs(wrapped, RowInputs(), torch.device("cpu")) == {}


def test_rotary_positions_wait_for_no_device(megatron) -> None:
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


def test_the_kernel_for_unequal_lengths_gives_the_same_logits_and_gradients(chunk, monkeypatch) -> None:
    from torch.nn.attention import varlen

    from slime_core.modeling import rows as room
    from tests.unit.modeling.test_attention import loop

    monkeypatch.setattr(varlen, "varlen_attn", loop)
    results = []
    for takes in (False, True):
        monkeypatch.setattr(room, "takes_spans", lambda *_, takes=takes, **__: takes)
        chunk.zero_grad()
        logits = packed_logits(chunk, rows())
        logits.square().sum().backward()
        results.append([logits.detach(), *(parameter.grad.clone() for parameter in chunk.parameters())])
    for padded, spanned in zip(*results, strict=True):
        assert torch.allclose(padded, spanned, rtol=1e-4, atol=1e-4 * float(padded.abs().max()))
