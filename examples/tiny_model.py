"""Shared parts of the examples' tiny models: a Qwen3 in float32, a word-level tokenizer, and numbers of the warm-up."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EOS_ID", "PAD_ID", "SPECIAL_TOKENS", "WarmUp", "model_files", "tokenizer_files", "write_files"]

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>")
"""The first tokens of every vocabulary."""
PAD_ID = SPECIAL_TOKENS.index("<pad>")
EOS_ID = SPECIAL_TOKENS.index("<eos>")
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The numbers of a supervised warm-up with AdamW.

    Arguments:
        steps: optimizer steps, at least 1.
        batch_size: rows per step.
        lr: peak learning rate.
        lr_warmup_steps: steps of linear warm-up; a cosine over all ``steps`` multiplies it and ends at zero.
        weight_decay, adam_beta1, adam_beta2: parameters of AdamW.
        seed: seed of the rows and of the initial weights.
    """

    steps: int = 1500
    batch_size: int = 256
    lr: float = 3e-3
    lr_warmup_steps: int = 50
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    seed: int = 0

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step ``step``, counted from 0."""
        rise = min(1.0, (step + 1) / self.lr_warmup_steps)
        return self.lr * rise * (1 + math.cos(math.pi * step / self.steps)) / 2


def model_files(*, vocab_size: int, num_layers: int, context_length: int, rope_theta: float) -> dict[str, str]:
    """Return name -> content of a checkpoint's configuration files: a Qwen3 of width 64, untied, in float32."""
    config: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-06,
        "rope_theta": rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": context_length,
        "max_window_layers": num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
    }
    generation = {"do_sample": True, "temperature": 1.0, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return {
        "config.json": json.dumps(config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }


def tokenizer_files(vocabulary: Sequence[str], *, pattern: str, context_length: int) -> dict[str, str]:
    """Return name -> content of the tokenizer's files for ``transformers.AutoTokenizer``; it has no merges.

    Arguments:
        vocabulary: the tokens in the order of their ids, :data:`SPECIAL_TOKENS` first.
        pattern: regular expression of one token.
    """
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special_token(token_id) for token_id in range(len(SPECIAL_TOKENS))],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {token: index for index, token in enumerate(vocabulary)},
            "unk_token": "<unk>",
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "additional_special_tokens": ["<|user|>", "<|assistant|>"],
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, indent=2) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def _special_token(token_id: int) -> dict[str, object]:
    return {
        "id": token_id,
        "content": SPECIAL_TOKENS[token_id],
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def write_files(folder: Path, *, files: Mapping[str, str]) -> None:
    """Write each file of ``files`` into ``folder``, which is created if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode("utf-8"))
