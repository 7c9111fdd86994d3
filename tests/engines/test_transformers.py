"""Models with transformers' own layers: the learner's rows against transformers' passes over single samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime_core import RunView
from slime_core.config.engines import MegatronConfig
from slime_core.errors import CheckpointError, ConfigError, PluginError
from tests.engines.families import packed_logits
from tests.engines.learners import EVERYTHING, LAST_BITS, NEAR, cut, distance, equal, settings
from tests.engines.transformers_models import ARCHITECTURES, UNPACKED, write

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LENGTHS = (5, 1, 17, 8)


def build(folder: Path, layout: Any, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> tuple[Any, Any]:
    """The spec, and the chunk with the weights of ``folder``."""
    from slime_transformers.spec import Transformers

    spec = Transformers(RunView(model_folder=folder))
    config = json.loads((folder / "config.json").read_text())
    chunks = spec.build(config, dtype=dtype, parallel=layout, overrides=overrides)
    spec.load_weights(chunks, folder)
    return spec, chunks[0]


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 16, (length,), generator=generator) for length in LENGTHS]


def alone(model: Any) -> torch.Tensor:
    return torch.cat([model(row[None]).logits[0] for row in rows()])


def log_probs(logits_TV: torch.Tensor) -> torch.Tensor:
    return logits_TV.log_softmax(-1).gather(1, torch.cat(rows()).roll(-1)[:, None])[:, 0]


def relative(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((values - expected).norm() / expected.norm()).detach())


@pytest.fixture(scope="module", params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str, tmp_path: Path) -> Any:
    return write(name, tmp_path)


# --- Every architecture -----------------------------------------------------------------------------------------------


def test_a_row_has_the_logits_and_gradients_of_its_samples_alone(megatron, name, model, tmp_path) -> None:
    _, chunk = build(tmp_path, megatron)
    assert chunk.shares_prompts == (name not in UNPACKED)
    logits, expected = packed_logits(chunk, rows()), alone(model)
    assert relative(logits, expected) < 1e-5
    log_probs(logits).mean().backward()
    log_probs(expected).mean().backward()
    gradients = {key: tensor.grad for key, tensor in chunk.named_tensors() if tensor.requires_grad}
    whole = torch.stack(
        [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    ).norm()
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:  # that of an expert without a token is None
            assert (gradients[key] - parameter.grad).norm() <= 1e-5 * max(parameter.grad.norm(), 1e-3 * whole), key


def test_a_sample_does_not_see_another_one_of_its_row(megatron, name, model, tmp_path) -> None:
    _, chunk = build(tmp_path, megatron)
    first, second, third, fourth = rows()
    with torch.no_grad():
        before = packed_logits(chunk, rows())
        after = packed_logits(chunk, [first, second, (third + 1) % 16, fourth])
    is_third = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    is_third[6:23] = True
    assert relative(after[~is_third], before[~is_third]) < 1e-6
    assert relative(after[is_third], before[is_third]) > 0.01


def test_the_exported_weights_are_those_of_the_file_bit_for_bit(megatron, model, tmp_path) -> None:
    spec, chunk = build(tmp_path, megatron)
    stored = load_file(tmp_path / "model.safetensors")
    exported = dict(spec.export_weights([chunk]))
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[key], stored[key]) for key in stored)


def test_recomputed_layers_give_the_same_gradients(megatron, model, tmp_path) -> None:
    gradients = []
    for granularity in (None, "full"):
        _, chunk = build(tmp_path, megatron, recompute_granularity=granularity)
        log_probs(packed_logits(chunk, rows())).mean().backward()
        gradients.append(
            torch.cat([parameter.grad.flatten() for parameter in chunk.parameters() if parameter.grad is not None])
        )
    assert torch.equal(*gradients)


# --- One architecture -------------------------------------------------------------------------------------------------


def test_sequences_that_continue_others_see_them_through_a_window(megatron, tmp_path) -> None:
    from slime_core.modeling.layers import PackedRow

    write("Olmo3ForCausalLM", tmp_path)
    _, chunk = build(tmp_path, megatron)
    prompt, *responses = rows()[2], rows()[0], rows()[3]
    ends = torch.tensor([0, 17, 22, 30], dtype=torch.int32)
    shared = PackedRow(
        **{"qkv_format": "thd", "cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 25, "max_seqlen_kv": 25},
        continues=torch.tensor([-1, 0, 0]),
    )
    positions = torch.cat([torch.arange(17), torch.arange(17, 22), torch.arange(17, 25)])
    with torch.no_grad():
        logits = chunk(torch.cat([prompt, *responses])[None], positions[None], None, packed_seq_params=shared)[0]
        repeated = packed_logits(chunk, [torch.cat([prompt, response]) for response in responses])
    assert relative(logits[17:22], repeated[17:22]) < 1e-6
    assert relative(logits[22:], repeated[39:]) < 1e-6


def test_a_critics_values_have_no_soft_cap(megatron, tmp_path) -> None:
    from slime_core.learner.critic import replace_output_layer

    write("Gemma2ForCausalLM", tmp_path)
    _, chunk = build(tmp_path, megatron)
    replace_output_layer([chunk])
    with torch.no_grad():
        chunk.output_layer.bias.fill_(100.0)
        assert torch.equal(packed_logits(chunk, rows()), torch.full((sum(LENGTHS), 1), 100.0))


def test_bfloat16_keeps_rotary_frequencies_in_float32(megatron, tmp_path) -> None:
    write("MistralForCausalLM", tmp_path)
    spec, chunk = build(tmp_path, megatron, dtype=torch.bfloat16)
    chunk.bfloat16()  # as Megatron's Float16Module does
    assert {buffer.dtype for buffer in chunk.buffers()} == {torch.float32}
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(weight, stored[key].bfloat16()) for key, weight in spec.export_weights([chunk]))


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_a_file_with_other_tensors_is_refused(megatron, tmp_path, change) -> None:
    from safetensors.torch import save_file

    write("MistralForCausalLM", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if change == "extra":
        weights["model.layers.0.extra.weight"] = torch.zeros(1)
    else:
        norm = weights.pop("model.norm.weight")
        weights |= {} if change == "missing" else {"model.norm.weight": norm[1:].clone()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"norm|extra"):
        build(tmp_path, megatron)


def test_a_field_of_megatrons_layers_is_refused(megatron, tmp_path) -> None:
    write("MistralForCausalLM", tmp_path)
    with pytest.raises(ConfigError, match="qk_layernorm"):
        build(tmp_path, megatron, qk_layernorm=True)


# --- The learner ------------------------------------------------------------------------------------------------------

MODEL = {"model_impl": "transformers"}


def test_a_learner_trains_as_with_layers_of_megatron(learners, qwen3, samples) -> None:
    (native,) = learners.train(settings(algorithm=EVERYTHING), qwen3, cut(samples))
    config = settings(algorithm=EVERYTHING, model=MODEL)
    (one,) = learners.train(config, qwen3, cut(samples))
    first, second = learners.train(config, qwen3, cut(samples, num_ranks=2), ranks=2)
    assert equal(first.weights, second.weights)
    for outcome in (one, first):
        assert outcome.metrics[0] == pytest.approx(native.metrics[0], rel=1e-5, abs=LAST_BITS)
        assert distance(outcome.weights, native.weights) < NEAR


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(learners, qwen3, samples, tmp_path) -> None:
    config = settings(model={**MODEL, "bf16": True}, algorithm=EVERYTHING).model_copy(
        update={
            "megatron": MegatronConfig(
                given=(("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
            )
        }
    )
    rollout = cut(samples)
    (uninterrupted,) = learners.train(config, qwen3, *[rollout] * 3)
    learners.train(config, qwen3, rollout, save=tmp_path)
    (resumed,) = learners.train(config, qwen3, *[rollout] * 2, load=tmp_path)
    assert resumed.metrics == uninterrupted.metrics[1:]
    assert equal(resumed.weights, uninterrupted.weights)


def test_a_model_split_over_ranks_is_refused(learners, qwen3, samples) -> None:
    with pytest.raises((ConfigError, PluginError), match="data parallel"):
        learners.train(settings(model=MODEL), qwen3, cut(samples) * 2, ranks=2, tensor=2)
