"""The check of prompt files before anything starts; lengths are those that the sampler will count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.prompts.chat import PromptEncoder, writes_tools
from slime_core.provisional import PromptLimits, PromptRequest, PromptScreen
from slime_core.rollout.row_checks import RowChecks
from slime_datasets import screen as screen_module
from slime_datasets.rows import prompts_of
from slime_datasets.screen import screen_paths

MODEL = ARITHMETIC / "model"


def request(path: Path, **changed: Any) -> PromptRequest:
    return PromptRequest(path, label_key=None, **changed)


def room(**changed: Any) -> PromptLimits:
    values = {"context": 20, "response": 8, "folder": MODEL, "apply_chat_template": False, **changed}
    return PromptLimits(**values)


def screen(request: PromptRequest, *, room: PromptLimits | None) -> list[str]:
    return screen_paths([request.path], request, PromptScreen(setting="prompt_data", limits=room))


def look(folder: Path, /, *prompts: object, **changed: Any) -> None:
    path = write(folder, *({"prompt": prompt} for prompt in prompts))
    screen(request(path), room=room(**changed))


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_key_that_no_row_of_any_file_has_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "1"}, {"prompt": "1", "tools": []})
    screen_paths([path], request(path), PromptScreen(setting="prompt_data", keys={"tool_key": "tools"}))
    with pytest.raises(DataError, match="tool_key"):
        screen_paths([path], request(path), PromptScreen(setting="prompt_data", keys={"tool_key": "toolz"}))


def test_the_longest_prompt_that_fits_is_accepted_and_one_token_more_is_not(tmp_path: Path) -> None:
    look(tmp_path, "1" * 12)
    with pytest.raises(DataError, match=r"line 2: .* 13 tokens .*--rollout-max-prompt-len 12"):
        look(tmp_path, "1", "1" * 13)


@pytest.mark.parametrize("own", [20, 16])
def test_a_row_that_names_a_longer_response_of_its_own_has_less_room(tmp_path: Path, own: int) -> None:
    first, second = {"prompt": "1" * 12}, {"prompt": "1" * 5, "metadata": {"sampling_params": {"max_new_tokens": own}}}
    with pytest.raises(DataError, match=rf"line 2: .* 5 tokens .* {own}"):
        screen(request(write(tmp_path, first, second)), room=room())
    second["metadata"] = {"sampling_params": {"max_new_tokens": 15}}
    screen(request(write(tmp_path, first, second)), room=room())


@pytest.mark.parametrize(
    "prompt", ["37+45", [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]]
)
def test_the_chat_template_counts_as_in_the_sampler(tmp_path: Path, prompt: Any) -> None:
    counted = len(PromptEncoder(MODEL, apply_chat_template=True).encode(prompt))
    look(tmp_path, prompt, apply_chat_template=True, context=counted + 8)
    with pytest.raises(DataError, match=f" {counted} tokens"):
        look(tmp_path, prompt, apply_chat_template=True, context=counted + 7)


def test_prompts_that_the_run_leaves_out_may_be_long(tmp_path: Path) -> None:
    look(tmp_path, "1" * 50, "1", leaves_out=12)
    with pytest.raises(DataError, match=r"line 2: .* 14 tokens"):
        look(tmp_path, "1" * 50, "1" * 14, leaves_out=14)


def test_a_file_without_readable_rows_is_an_error_even_with_skip(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("5\n6\n")
    with pytest.raises(DataError, match=r"prompts\.jsonl, line 1"):
        screen(request(tmp_path / "prompts.jsonl", skips_bad=True), room=room())


OFFERED = {
    "generate_function": {"single_turn": ""},
    "rm_type": {"exact_match": "", "length": "", "remote_rm": "rm_url"},
}


def name(folder: Path, *rows: dict[str, Any], offered: Any = OFFERED) -> None:
    path = write(folder, *({"prompt": "1" * 4, "metadata": row} for row in rows))
    screen(request(path, filter=RowChecks(offered)), room=room())


def test_rows_may_name_what_the_plugins_of_the_run_offer(tmp_path: Path) -> None:
    name(tmp_path, {}, {"rm_type": "length", "generate_function": "single_turn"}, {"rm_type": None, "other": 3})
    name(tmp_path, {"reward_key": "acc"}, {"rm_type": "", "reward_key": ""})
    name(tmp_path, {"rm_type": "anything"}, offered={})


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"rm_type": "lenght"}, "rm_type = 'lenght' .* length"),
        ({"rm_type": ["length"]}, r"rm_type = \['length'\] "),
        ({"rm_type": "0.5*length + 1*remote_rm"}, r"rm_type = .*'remote_rm' .* rm_url, .*--rm-url"),
        ({"rm_type": "mine.py:reward"}, "rm_type = 'mine.py:reward' "),
        ({"reward_key": 3}, "reward_key = 3 "),
        ({"generate_function": "my.code:f"}, "generate_function = 'my.code:f' "),
    ],
)
def test_a_name_that_no_plugin_offers_is_refused_with_file_and_line(tmp_path: Path, row: Any, found: str) -> None:
    with pytest.raises(DataError, match=rf"^{tmp_path}/prompts\.jsonl, line 2: metadata {found}"):
        name(tmp_path, {}, row)


REFUSES_X = (
    "{% for m in messages %}{% if m.content is string and 'x' in m.content %}{{ raise_exception('no x') }}{% endif %}"
    "{% if m.role != 'note' %}{{ m.content }}{% endif %}{% endfor %}"
)


def with_template(folder: Path, template: str) -> Path:
    """Return a copy of the model with another chat template."""
    model = shutil.copytree(MODEL, folder / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return model


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize("line", [1, 2, 200, 4000])
def test_a_row_of_another_form_is_rendered_wherever_it_stands(tmp_path: Path, line: int) -> None:
    rows: list[Any] = ["1+1"] * 4000
    rows[line - 1] = chat(("note", "4"), ("user", "4"))
    settings: dict[str, Any] = {"folder": with_template(tmp_path, REFUSES_X), "apply_chat_template": True}
    with pytest.raises(DataError, match=rf"line {line}: message 1 of 2 \(role 'note'\)"):
        look(tmp_path, *rows, context=128, **settings)


def test_tools_that_the_template_leaves_out_are_refused_with_their_row(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "mul"}}]
    path = write(tmp_path, {"prompt": "1+1"}, {"prompt": "2+2", "tools": tools})
    limits = room(folder=with_template(tmp_path, REFUSES_X), apply_chat_template=True)
    with pytest.raises(DataError, match=r"line 2: .*--tool-key"):
        screen(request(path, tool_key="tools"), room=limits)
    assert not writes_tools(limits.folder, {})
    assert writes_tools(MODEL, {})


CASES: list[tuple[Any, str]] = [
    ([{"role": "user", "content": [{"type": "text", "text": "1+2"}]}], "<|user|>1+2<|assistant|>"),
    (chat(("developer", "4"), ("user", "1+2")), "<|system|>4<|user|>1+2<|assistant|>"),
    (json.dumps(chat(("system", "4"), ("user", "1+2"))), "<|system|>4<|user|>1+2<|assistant|>"),
    ([{"role": "user", "content": "1+2", "tool_calls": None}], "<|user|>1+2<|assistant|>"),
]


@pytest.mark.parametrize(("prompt", "text"), CASES, ids=["parts", "developer", "JSON text", "nulls"])
def test_a_row_is_the_text_that_its_messages_mean(tmp_path: Path, prompt: Any, text: str) -> None:
    path = write(tmp_path, {"prompt": prompt})
    screen(request(path), room=room(apply_chat_template=True, context=128))
    ((_, row),) = prompts_of(request(path))
    assert PromptEncoder(MODEL, apply_chat_template=True).text(row.prompt) == text


def test_a_tokenizer_with_code_of_its_own_is_left_to_the_sampler(tmp_path: Path) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "mine.Mine"}}')
    look(tmp_path, "1" * 50, folder=tmp_path)


def test_the_check_of_a_large_file_reads_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen_module, "MOST_BYTES", 30)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1"}\n{"prompt": "a longer one"}\nnonsense\n')
    screen(request(path), room=None)
    monkeypatch.setattr(screen_module, "MOST_BYTES", 60)
    with pytest.raises(DataError, match="line 3, column 1: "):
        screen(request(path), room=None)


@pytest.mark.parametrize("changed", [{"context": None}, {"context": 10_000}])
def test_no_tokenizer_is_read_where_no_prompt_can_be_too_long(tmp_path: Path, changed: dict[str, Any]) -> None:
    look(tmp_path, "1" * 50, folder=tmp_path / "nothing", **changed)


def test_rows_that_the_template_refuses_are_left_out_if_bad_rows_are(tmp_path: Path) -> None:
    prompts = ["1+1", "x", chat(("note", "4"), ("user", "4")), "2"]
    path = write(tmp_path, *({"prompt": prompt} for prompt in prompts))
    limits = room(folder=with_template(tmp_path, REFUSES_X), apply_chat_template=True)
    bad = screen(request(path, skips_bad=True), room=limits)
    assert [text.partition(": ")[0] for text in bad] == [f"{path}, line {line}" for line in (2, 3)]
