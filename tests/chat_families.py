"""Tokenizers and chat templates that behave like those of the families in docs/models.md, made in the test.

Each tokenizer joins letters, spaces and line ends and writes any text in bytes. Each template has the header, the end
of a turn, the treatment of thoughts and the tokens of its family, in few words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.prompts.chat import PromptEncoder
from slime_datasets.masks import conversations


@dataclass(frozen=True)
class Family:
    """A template and the tokens that it writes.

    Arguments:
        special: added tokens that are special.
        added: added tokens that are not, as R1's roles and the tags of thoughts.
        stops: at which engines stop; the first is the tokenizer's end of sequence.
        end: what ends a turn of the assistant.
    """

    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    end: str
    added: tuple[str, ...] = ("<think>", "</think>")
    bos: str | None = None


CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + (c.function | tojson) + '\\n</tool_call>' }}{% endfor %}"
)
RESULT = "{% if m.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
SPLIT = (
    "{% set text = m.content or '' %}{% set thoughts = m.reasoning_content or '' %}{% if '</think>' in text %}"
    "{% set thoughts = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
CHATML_END = "{{ '<|im_end|>\\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
TOOLS = "{% if tools %}{{ '<|im_start|>system\\n' + tools[0]['name'] + '<|im_end|>\\n' }}{% endif %}"

PLAIN = (
    TOOLS
    + "{% for m in messages %}"
    + RESULT
    + "{% else %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}"
    + CALLS
    + "{% endif %}"
    + CHATML_END
    + "{% endfor %}"
)
RECENT = (
    LAST_USER
    + "{% for m in messages %}"
    + SPLIT
    + RESULT
    + "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thoughts) %}{{ '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}"
    "{% endif %}{{ text }}"
    + CALLS
    + "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% endif %}"
    + CHATML_END
    + "{% endfor %}"
)
"""Keeps thoughts after the last message of the user, and writes empty ones in the last turn."""

NEVER = (
    "{% for m in messages %}"
    + SPLIT
    + "{{ '<|im_start|>' + m.role + '\\n' + (text if m.role == 'assistant' else m.content) }}"
    + CHATML_END
    + "{% endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + (m.content.split('</think>')[-1]) + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{{ m.content | trim }}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GLM_CALLS = "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name + '</tool_call>' }}{% endfor %}"
GLM = (
    LAST_USER
    + "[gMASK]<sop>{% for m in messages %}"
    + SPLIT
    + "{% if m.role == 'assistant' %}{{ '<|assistant|>\\n<think>' + (thoughts if loop.index0 > ns.last else '') }}"
    "{{ '</think>' }}{% if text.strip() %}{{ '\\n' + text.strip() }}{% endif %}"
    + GLM_CALLS
    + "{% elif m.role == 'tool' %}{{ '<|observation|>\\n' + m.content }}"
    "{% else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OLD_GLM = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NEW_GLM = (
    LAST_USER + "[gMASK]<sop>{% for m in messages %}" + SPLIT + "{% if m.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{% if loop.index0 > ns.last and thoughts %}{{ '<think>' + thoughts }}{% endif %}{{ '</think>' + text.strip() }}"
    "{% else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
"""Opens thoughts in its generation prompt, without a line end."""

KIMI = (
    "{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)

IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
DEEP = {
    "special": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "added": ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    "stops": ("<｜end▁of▁sentence｜>",),
    "end": "<｜end▁of▁sentence｜>",
    "bos": "<｜begin▁of▁sentence｜>",
}
QWEN = {"special": IM, "stops": ("<|im_end|>", "<|endoftext|>"), "end": "<|im_end|>"}
OF_GLM = {
    "special": ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "stops": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "end": "<|user|>",
}
OF_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")
OF_KIMI = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>", "[EOS]")


def asks(text: str) -> str:
    """The end of a template whose generation prompt is ``text``."""
    return "{% if add_generation_prompt %}{{ '" + text + "' }}{% endif %}"


FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(PLAIN + ASKS, **QWEN),
    "qwen3": Family(RECENT + ASKS, **QWEN),
    "qwen3-thinking-2507": Family(RECENT + OPENS, **QWEN),
    "qwq": Family(NEVER + OPENS, **QWEN),
    "r1-distill": Family(DEEPSEEK + asks("<｜Assistant｜><think>\\n"), **DEEP),
    "deepseek-v3": Family(DEEPSEEK + asks("<｜Assistant｜>"), **DEEP),
    "llama3": Family(
        LLAMA, special=OF_LLAMA, stops=("<|eot_id|>", "<|end_of_text|>"), end="<|eot_id|>", bos=OF_LLAMA[0]
    ),
    "glm4": Family(OLD_GLM, **OF_GLM),
    "glm4.5": Family(GLM, **OF_GLM),
    "glm4.7": Family(NEW_GLM, **OF_GLM),
    "kimi-k2": Family(KIMI, special=OF_KIMI, stops=("<|im_end|>", "[EOS]"), end="<|im_end|>"),
}


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["assistant\n\n\nthe answer is the answer\n\n"] * 9, trainer)
    return tokenizer


def checkpoint(family: Family, folder: Path) -> Path:
    """Write config, generation config, tokenizer and template of ``family`` to ``folder``."""
    fast = PreTrainedTokenizerFast(tokenizer_object=_tokenizer())
    fast.add_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    fast.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    fast.eos_token, fast.bos_token = family.stops[0], family.bos
    fast.chat_template = family.template
    fast.save_pretrained(folder)
    stops = fast.convert_tokens_to_ids(list(family.stops))
    config = json.loads((ARITHMETIC / "model" / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "eos_token_id": stops[0], "vocab_size": len(fast), "pad_token_id": None})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder


def encoder_of(family: Family, folder: Path, **given: Any) -> PromptEncoder:
    """An encoder of ``family``; ``given`` are further arguments of PromptEncoder."""
    return PromptEncoder(checkpoint(family, folder), apply_chat_template=True, **given)


def mask_column(encoder: PromptEncoder) -> str:
    """What a table of templates says of loss masks: ``yes`` if both turns of a conversation are trained, with and
    without thoughts, up to a token at which engines stop, and nothing of the user; otherwise what falls short."""
    questions, answers = ("What is 2 + 2?", "And 3 + 3?"), ("four", "six")
    found: list[str] = []
    for thoughts in ("<think>\nadd them\n</think>\n\n", ""):
        messages = [
            {"role": role, "content": content}
            for question, answer in zip(questions, answers, strict=True)
            for role, content in (("user", question), ("assistant", thoughts + answer))
        ]
        try:
            sequences = conversations(encoder, messages)
        except DataError as problem:
            return f"refused: {problem}"
        ids = [one for of in sequences for one, trains in zip(of.token_ids, of.mask, strict=True) if trains]
        text, stops = encoder.decode_all(ids), [turn.stops for of in sequences for turn in of.turns]
        found += ["no stop token"] if not all(stops) or ids[-1] not in encoder.end_ids else []
        found += ["thoughts are not trained"] if thoughts and text.count("add them") != len(answers) else []
        found += ["an answer is not trained"] if [text.count(answer) for answer in answers] != [1, 1] else []
        found += ["a question is trained"] if any(question in text for question in questions) else []
    return ", ".join(dict.fromkeys(found)) or "yes"
