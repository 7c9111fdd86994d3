"""Every model family of slime-models computes what Hugging Face's computes, and holds the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_core.errors import ConfigError
from slime_models.refusals import LLAMA_3
from tests.engines.conftest import campaign
from tests.engines.families import (
    FAMILIES,
    GAP,
    build,
    by_expert,
    config_of,
    of_hugging_face,
    packed_logits,
    router_biases,
    smallest_gap,
    spec_of,
    weights_of,
    write,
)

# Megatron warns about its own calls between its own modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

LENGTHS = (5, 1, 12, 3, 17, 2, 8, 9)


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(name, tmp_path_factory.mktemp("model"))


@pytest.fixture
def hugging_face(folder: Path) -> Any:
    return of_hugging_face(folder)


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 16, (length,), generator=generator) for length in LENGTHS]


def alone(model: Any) -> torch.Tensor:
    """Logits of each row alone, one after the other."""
    return torch.cat([model(row[None]).logits[0] for row in rows()])


def log_probs(logits_TV: torch.Tensor) -> torch.Tensor:
    targets_T = torch.cat(rows()).roll(-1)
    return logits_TV.log_softmax(-1).gather(1, targets_T[:, None])[:, 0]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def assert_no_ties(model: Any) -> None:
    """The last expert that a token takes is clearly ahead of the first that it does not."""
    gaps = []

    def watch(router: Any, _: Any, output: Any) -> None:
        gaps.append(smallest_gap(router, output[0]))

    routers = [module for key, module in model.named_modules() if key.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(watch) for router in routers]
    with torch.no_grad():
        alone(model)
    for hook in hooks:
        hook.remove()
    assert min(gaps, default=1.0) > GAP


def test_packed_logits_and_log_probs_equal_those_of_each_row_alone(megatron, name, folder, hugging_face) -> None:
    assert_no_ties(hugging_face)
    _, (chunk,) = build(name, folder, megatron)
    with torch.no_grad():
        found, expected = packed_logits(chunk, rows()), alone(hugging_face)
    assert relative(found, expected) < 1e-5
    assert relative(log_probs(found), log_probs(expected)) < 1e-5


def test_the_gradient_of_a_packed_loss_equals_hugging_faces(megatron, name, folder, hugging_face) -> None:
    spec, (chunk,) = build(name, folder, megatron)
    log_probs(packed_logits(chunk, rows())).mean().backward()
    log_probs(alone(hugging_face)).mean().backward()
    expected = by_expert({key: parameter.grad for key, parameter in hugging_face.named_parameters()})
    for parameter in chunk.parameters():
        parameter.data = parameter.grad  # exported under Hugging Face names like weights
    exported = ((key, found) for key, found in spec.export_weights([chunk]) if "correction_bias" not in key)
    for key, gradient in exported:
        # Both are zero where no token takes an expert.
        assert (gradient - expected.pop(key)).norm() <= 1e-5 * gradient.norm(), key
    assert not expected


def test_weights_come_back_bit_for_bit(megatron, name, folder, hugging_face) -> None:
    spec, chunks = build(name, folder, megatron)
    exported = dict(spec.export_weights(chunks))
    original = weights_of(hugging_face)
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], original[key]) for key in original)


def of_one_shape(model: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Pairs of tensors of ``model`` that could be taken for each other: each with the next one of its shape."""
    last: dict[torch.Size, tuple[str, torch.Tensor]] = {}
    for key, tensor in [*model.named_parameters(), *router_biases(model).items()]:
        if tensor.shape in last:
            other, twin = last[tensor.shape]
            yield f"{other} and {key}", twin.data, tensor.data
        last[tensor.shape] = key, tensor


def test_two_swapped_tensors_of_one_shape_are_noticed(megatron, name, folder, hugging_face) -> None:
    """A mapping that confuses two tensors computes something else, however it confuses them on the way back."""
    _, (chunk,) = build(name, folder, megatron)
    longest = LENGTHS.index(max(LENGTHS))
    row = rows()[longest][None]
    with torch.no_grad():
        found = packed_logits(chunk, rows()).split(LENGTHS)[longest]
        for pair, one, other in of_one_shape(hugging_face):
            one[:], other[:] = other.clone(), one.clone()
            assert relative(found, hugging_face(row).logits[0]) > 1e-4, pair
            one[:], other[:] = other.clone(), one.clone()
        assert relative(found, hugging_face(row).logits[0]) < 1e-5


@pytest.mark.parametrize("scaled", ["llama, scaled", "deepseek_v3", "kimi_k2"])
def test_scaled_positions_matter_at_these_lengths(scaled, tmp_path) -> None:
    write(scaled, tmp_path)
    with torch.no_grad():
        right = alone(of_hugging_face(tmp_path))
        config = json.loads((tmp_path / "config.json").read_text())
        plain = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
        (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": plain}))
        assert relative(alone(of_hugging_face(tmp_path)), right) > 1e-4


def test_bfloat16_weights_come_back_rounded_once(megatron, name, folder, hugging_face) -> None:
    spec = spec_of(name)
    config = json.loads((folder / "config.json").read_text())
    chunks = spec.build(config, dtype=torch.bfloat16, parallel=megatron)
    spec.load_weights(chunks, folder)
    for chunk in chunks:
        chunk.bfloat16()  # as Megatron's Float16Module does; the biases of routers keep their bits
    original = weights_of(hugging_face)
    for key, weight in spec.export_weights(chunks):
        assert torch.equal(weight, original[key].to(weight.dtype)), key
        assert weight.dtype == (torch.float32 if "correction_bias" in key else torch.bfloat16)


def rotary(**changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e5, "factor": 8.0, **changes}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *[(family, rotary(rope_type="dynamic"), "'dynamic'") for family in FAMILIES],
    ("qwen2, tied", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "sliding-window"),
    ("llama", {"attention_bias": True}, "attention_bias"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", rotary(rope_type="linear"), "'linear'"),
    ("llama", rotary(**{**LLAMA_3, "rope_type": "llama3", "low_freq_factor": 2.0}), "low_freq_factor = 2.0"),
    ("llama", rotary(rope_type="llama3", high_freq_factor=4.0), "low_freq_factor .*original_max_position_embeddings"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias = True"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size = 8"),
]


@pytest.mark.parametrize(("refusing", "changes", "named"), REFUSED, ids=lambda value: f"{value}"[:40])
def test_a_field_that_is_not_built_is_refused_by_name(megatron, refusing, changes, named) -> None:
    fields = {} if "rope_parameters" in changes else changes  # transformers refuses some positions itself
    config = config_of(refusing, **fields).to_dict() | changes
    with pytest.raises(ConfigError, match=named):
        spec_of(refusing).build(config, dtype=torch.float32, parallel=megatron)


# --- Several ranks ----------------------------------------------------------------------------------------------------

LAYOUTS = (
    "qwen2, tied: TP2",
    "qwen2, tied: PP2",
    "llama: PP2",
    "qwen3_moe: TP2, SP",
    "qwen3_moe: PP2",
    "qwen3_moe: EP2",
    "glm4: TP2",
    "deepseek_v3: PP2",
    "moonlight: TP2, SP",
    "glm4_moe: TP2 x EP2, SP",
    "qwen3_moe: one rank, recompute moe, replay",
    "qwen3_moe: TP2, SP, replay",
    "qwen3_moe: EP2, replay",
    "qwen3_moe: CP2, replay",
    "qwen3_moe: PP2, VPP2, recompute, replay",
)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By case; the rest is in ``make families``."""
    rows = campaign("families", tmp_path_factory.mktemp("families") / "rows.json", "--only", *LAYOUTS)
    return {row["case"]: row for row in rows}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_hugging_face_computes_and_gives_every_bit_back(compared, layout) -> None:
    row = compared[layout]
    assert row["mean"] < 1e-5
    assert row["gradient"] < 1e-5, row["worst"]
    assert row["step"] < 1e-5
    assert row["weights"] == 0
