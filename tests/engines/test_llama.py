"""The Llama of slime-models says what Hugging Face's says, and holds the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime_core.errors import ConfigError
from slime_core.learner.layout import ParallelLayout

# Megatron warns about its own calls between its own modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

LENGTHS = (5, 1, 12, 3, 17)


def small(**changes: Any) -> Any:
    """A Llama of 3 layers with the proportions of SmolLM2: 3 query heads share one key head."""
    from transformers import LlamaConfig

    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_theta": 1e5,
        "initializer_range": 0.1,
    }
    return LlamaConfig(**{**settings, **changes})


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama checkpoint, whose norms are not all ones."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(small(tie_word_embeddings=request.param))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    target = tmp_path_factory.mktemp("llama")
    model.save_pretrained(target)
    return target


@pytest.fixture
def hugging_face(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def build(folder: Path, layout: ParallelLayout) -> tuple[Any, list[Any]]:
    from transformers import AutoConfig

    from slime_models.llama import Llama

    spec = Llama()
    chunks = spec.build(AutoConfig.from_pretrained(folder), dtype=torch.float32, parallel=layout)
    spec.load_weights(chunks, folder)
    return spec, chunks


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 96, (length,), generator=generator) for length in LENGTHS]


def packed_logits(chunk: Any) -> torch.Tensor:
    """Logits of all rows, packed into one."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS)
    )
    logits: torch.Tensor = chunk(torch.cat(rows())[None], positions, None, packed_seq_params=packed)
    return logits[0]


def test_packed_logits_equal_those_of_each_row_alone(megatron, folder, hugging_face):
    _, (chunk,) = build(folder, megatron)
    with torch.no_grad():
        alone = torch.cat([hugging_face(row[None]).logits[0] for row in rows()])
        assert (packed_logits(chunk) - alone).abs().max() < 1e-5


def test_weights_come_back_bit_for_bit(megatron, folder, hugging_face):
    spec, chunks = build(folder, megatron)
    exported = dict(spec.export_weights(chunks))
    original = dict(hugging_face.named_parameters())
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)


def test_the_copy_of_a_tied_embedding_on_a_last_stage_is_that_embedding(megatron, folder):
    spec, _ = build(folder, megatron)
    tied = "lm_head.weight" not in dict(spec.export_weights(build(folder, megatron)[1]))
    bridge = spec._built()
    assert bridge._weight_name_mapping_mcore_to_hf("output_layer.weight") == [
        "model.embed_tokens.weight" if tied else "lm_head.weight"
    ]


@pytest.mark.parametrize(("name", "place"), [("attention_bias", "attention"), ("mlp_bias", "MLP")])
def test_biases_are_refused(megatron, name, place):
    from slime_models.llama import Llama

    with pytest.raises(ConfigError, match=rf"biases in its {place} \({name}\)"):
        Llama().build(small(**{name: True}), dtype=torch.float32, parallel=megatron)


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_scaled_rotary_positions_are_refused(megatron, kind):
    from slime_models.llama import Llama

    config = small()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e5, "factor": 8.0}
    with pytest.raises(ConfigError, match=f"rotary positions of type '{kind}'"):
        Llama().build(config, dtype=torch.float32, parallel=megatron)
