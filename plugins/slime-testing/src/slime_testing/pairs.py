"""A real tokenizer whose text does not determine the ids:
letters that an engine sampled one by one are encoded as pairs."""

from __future__ import annotations

import functools
import itertools
import json
import string
import tempfile
from pathlib import Path

from slime_core.prompts.chat import PromptEncoder

__all__ = ["END", "NUM_SAMPLED_IDS", "letters", "pairing_encoder", "start_id"]

END = 1
"""Id of the token that ends a response, as in the fake engine."""

SPECIAL = ("<pad>", "<end>", "<unk>", "<|user|>", "<|assistant|>")
PAIRED = (string.ascii_lowercase, string.digits)
LETTERS = (*PAIRED[0], *sorted({"\n", *map(chr, range(32, 127))} - set(PAIRED[0])))
NUM_SAMPLED_IDS = len(SPECIAL) + len(PAIRED[0])
"""Limit for ids of an engine that samples only lower-case letters, which encoding turns into pairs."""

START = "<|start|>"
"""Text that the chat template writes before the first message, and nowhere else."""

TEMPLATE = (
    f"{{{{ '{START}' }}}}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@functools.cache
def pairing_encoder(*, apply_chat_template: bool) -> PromptEncoder:
    """Return an encoder of printable ASCII with tokens for pairs of lower-case letters and pairs of digits.

    Example: ``encode("42")`` is one id; ``decode([FOUR, TWO])`` is ``"42"`` as well.
    """
    with tempfile.TemporaryDirectory() as name:
        _write(Path(name))
        return PromptEncoder(Path(name), apply_chat_template=apply_chat_template)


def letters(text: str) -> list[int]:
    """Return the ids of ``text`` letter by letter, unlike :meth:`PromptEncoder.encode`."""
    return [_vocabulary()[letter] for letter in text]


@functools.cache
def _vocabulary() -> dict[str, int]:
    pairs = ("".join(pair) for pair in _pairs())
    return {token: number for number, token in enumerate([*SPECIAL, *LETTERS, *pairs, START])}


def start_id() -> int:
    """Return the id of :data:`START`, which the engine of a suite never samples."""
    return _vocabulary()[START]


def _pairs() -> list[tuple[str, str]]:
    return [pair for letters in PAIRED for pair in itertools.product(letters, letters)]


def _write(folder: Path) -> None:
    """Write the tokenizer and a config in the format of a checkpoint."""
    model = {"type": "BPE", "vocab": _vocabulary(), "merges": _pairs(), "unk_token": SPECIAL[2]}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": _vocabulary()[token], "content": token, **special} for token in (*SPECIAL, START)]
    files = {
        "tokenizer.json": {"version": "1.0", "added_tokens": added, "model": model, "decoder": {"type": "Fuse"}},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=False)),
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
        },
        "config.json": {"model_type": "qwen3", "vocab_size": len(_vocabulary())},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
