"""A real engine whose model says what a script says: in its checkpoint every token has one successor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slime_testing.harness.engines import real_engine

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer"


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def block(command: str) -> str:
    return f"THOUGHT: I\n```mswea_bash_command\n{command}\n```"


SCRIPTS = {
    "add": (f"So.\n{call('add', a=37, b=45)}", "82"),
    "bash": (call("bash", command="echo $((37+45)) > answer"), call("bash", command=SUBMIT)),
    "blocks": (block("echo 82 > answer"), block(SUBMIT)),
}
"""Name -> the first turn, and the one after the result of a tool or a command."""

SPECIAL = ("<pad>", "<eos>", "<unk>", *(f"<|{script}-{turn}|>" for script in SCRIPTS for turn in (0, 1)))
EOS_ID = SPECIAL.index("<eos>")
WIDTH = 64
CONTEXT = 512
LOGIT = 40.0
"""Of a token's successor; that of every other token is 0."""

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ '[' + message['role'] + ']' + (message['content'] or '') | string }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{% set last = messages[-1] %}"
    "{% set turn = 1 if last['role'] == 'tool' or '<returncode>' in last['content'] else 0 %}"
    "{{ '<|' ~ script ~ '-' ~ turn ~ '|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Scripted:
    """A running engine and its checkpoint.

    Arguments:
        url: of the engine.
        model: Hugging Face folder; its chat template takes ``script``.
        turns: what it says.
    """

    url: str
    model: Path
    turns: Mapping[str, tuple[str, str]] = field(default_factory=lambda: SCRIPTS)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """One engine for all scripts."""
    folder = tmp_path_factory.mktemp("scripted")
    write_model(folder / "model")
    with real_engine(folder / "model", logs=folder) as url:
        yield Scripted(url, folder / "model")


def write_model(folder: Path) -> None:
    """A Qwen3 whose layer adds nothing, so that the logits follow from the last token alone."""
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary, successors = list(SPECIAL), {}
    for script, turns in SCRIPTS.items():
        for turn, text in enumerate(turns):
            last = SPECIAL.index(f"<|{script}-{turn}|>")
            half = len(text) // 2
            for piece in (text[:half], text[half:]):  # no other turn has one of them
                successors[last] = len(vocabulary)
                last = len(vocabulary)
                vocabulary.append(piece)
            successors[last] = EOS_ID
    assert len(set(vocabulary)) == len(vocabulary) <= WIDTH
    tokenizer = Tokenizer(models.WordLevel({text: at for at, text in enumerate(vocabulary)}, unk_token="<unk>"))
    longest_first = sorted(vocabulary[len(SPECIAL) :], key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(vocabulary), WIDTH))
        model.lm_head.weight.zero_()
        for one, following in successors.items():  # the last norm makes WIDTH ** 0.5 of the one
            model.lm_head.weight[following, one] = LOGIT / WIDTH**0.5
    model.save_pretrained(folder)
