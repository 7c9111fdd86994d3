"""The check of prompt files before anything starts; lengths are those that the sampler will count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.prompts import screen as room_of_screen
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.row_checks import RowChecks
from slime_core.prompts.rows import numbered_prompts
from slime_core.prompts.screen import Room, screen, writes_tools
from slime_core.provisional import PromptRequest

MODEL = ARITHMETIC / "model"


def request(path: Path, **changed: Any) -> PromptRequest:
    return PromptRequest(path, label_key=None, **changed)


def room(**changed: Any) -> Room:
    values = {"context": 20, "response": 8, "folder": MODEL, "apply_chat_template": False, **changed}
    return Room(**values)


def look(folder: Path, /, *prompts: object, **changed: Any) -> None:
    path = write(folder, *({"prompt": prompt} for prompt in prompts))
    screen(request(path), room=room(**changed), setting="prompt_data")


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_longest_prompt_that_fits_is_accepted_and_one_token_more_is_not(tmp_path: Path) -> None:
    look(tmp_path, "1" * 12)
    numbers = r"line 2: .* 13 tokens in prompt_data, .* 8, .* 21; .* 20\. .* 12 tokens: .*--rollout-max-prompt-len 12"
    with pytest.raises(DataError, match=numbers):
        look(tmp_path, "1", "1" * 13)


@pytest.mark.parametrize("own", [20, 16])
def test_a_row_that_names_a_longer_response_of_its_own_has_less_room(tmp_path: Path, own: int) -> None:
    first, second = {"prompt": "1" * 12}, {"prompt": "1" * 5, "metadata": {"sampling_params": {"max_new_tokens": own}}}
    with pytest.raises(DataError, match=rf"line 2: .* 5 tokens .* {own}, .* {5 + own};"):
        screen(request(write(tmp_path, first, second)), room=room(), setting="prompt_data")
    second["metadata"] = {"sampling_params": {"max_new_tokens": 15}}
    screen(request(write(tmp_path, first, second)), room=room(), setting="prompt_data")


@pytest.mark.parametrize(
    "prompt", ["37+45", [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]]
)
def test_the_chat_template_counts_as_in_the_sampler(tmp_path: Path, prompt: Any) -> None:
    counted = len(PromptEncoder(MODEL, apply_chat_template=True).encode(prompt))
    look(tmp_path, prompt, apply_chat_template=True, context=counted + 8)
    with pytest.raises(DataError, match=f" {counted} tokens"):
        look(tmp_path, prompt, apply_chat_template=True, context=counted + 7)


def warned(folder: Path, /, *prompts: str, **changed: Any) -> list[str]:
    path = write(folder, *({"prompt": prompt} for prompt in prompts))
    found: list[str] = []
    settings = room(**{"context": 128, **changed})
    screen(request(path), room=settings, setting="prompt_data", warn=found.append)
    return found


def test_prompts_that_the_tokenizer_does_not_know_are_counted(tmp_path: Path) -> None:
    (found,) = warned(tmp_path, "Add 3 to 4", "1+1")
    assert found.startswith(f"{tmp_path}/prompts.jsonl: 62% ")
    assert f" {MODEL} " in found
    (found,) = warned(tmp_path, "Add 3 to 4", "1+1", apply_chat_template=True)
    assert ": 47% " in found  # the template adds two tokens to each
    assert warned(tmp_path, *["1+1"] * 40, "a") == []


def test_prompts_that_the_run_leaves_out_may_be_long(tmp_path: Path) -> None:
    look(tmp_path, "1" * 50, "1", leaves_out=12)
    with pytest.raises(DataError, match=r"line 2: .* 14 tokens"):
        look(tmp_path, "1" * 50, "1" * 14, leaves_out=14)


def test_a_file_without_readable_rows_is_an_error_even_with_skip(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("5\n6\n")
    with pytest.raises(DataError, match=r" 2 rows .*prompts\.jsonl, line 1"):
        screen(request(tmp_path / "prompts.jsonl", skips_bad=True), room=room(), setting="prompt_data")


OFFERED = {
    "generate_function": {"single_turn": ""},
    "rm_type": {"exact_match": "", "length": "", "remote_rm": "rm_url"},
}


def name(folder: Path, *rows: dict[str, Any], offered: Any = OFFERED) -> None:
    path = write(folder, *({"prompt": "1" * 4, "metadata": row} for row in rows))
    screen(request(path, filter=RowChecks(offered)), room=room(), setting="prompt_data")


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
        screen(request(path, tool_key="tools"), room=limits, setting="prompt_data")
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
    screen(request(path), room=room(apply_chat_template=True, context=128), setting="prompt_data")
    ((_, row),) = numbered_prompts(request(path))
    assert PromptEncoder(MODEL, apply_chat_template=True).text(row.prompt) == text


@pytest.mark.parametrize("changed", [{"unk_token": None}, {"unk_token": "<unk>", "byte_fallback": True}])
def test_a_tokenizer_that_writes_everything_has_no_unknown_tokens(tmp_path: Path, changed: dict[str, Any]) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    described = json.loads(file.read_text())
    described["model"] = {"type": "BPE", "vocab": described["model"]["vocab"], "merges": [], **changed}
    file.write_text(json.dumps(described))
    assert warned(tmp_path, "Add 3 to 4", folder=tmp_path / "model") == []


def test_a_tokenizer_with_code_of_its_own_is_left_to_the_sampler(tmp_path: Path) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "mine.Mine"}}')
    look(tmp_path, "1" * 50, folder=tmp_path)


def test_the_check_of_a_large_file_reads_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_of_screen, "MOST_BYTES", 30)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1"}\n{"prompt": "a longer one"}\nnonsense\n')
    screen(request(path), room=None, setting="prompt_data")
    monkeypatch.setattr(room_of_screen, "MOST_BYTES", 60)
    with pytest.raises(DataError, match="line 3, column 1: "):
        screen(request(path), room=None, setting="prompt_data")


def test_a_limit_that_leaves_no_prompt_is_refused(tmp_path: Path) -> None:
    look(tmp_path, "1" * 9, "1" * 5, leaves_out=5)
    with pytest.raises(DataError, match=r"prompts\.jsonl: all 2 .* 5 tokens .* 6; .*--rollout-max-prompt-len"):
        look(tmp_path, "1" * 9, "1" * 6, leaves_out=5)


@pytest.mark.parametrize("changed", [{"context": None}, {"context": 10_000}])
def test_no_tokenizer_is_read_where_no_prompt_can_be_too_long(tmp_path: Path, changed: dict[str, Any]) -> None:
    look(tmp_path, "1" * 50, folder=tmp_path / "nothing", **changed)


def test_rows_that_the_template_refuses_are_left_out_if_bad_rows_are(tmp_path: Path) -> None:
    prompts = ["1+1", "x", chat(("note", "4"), ("user", "4")), "2"]
    path = write(tmp_path, *({"prompt": prompt} for prompt in prompts))
    limits = room(folder=with_template(tmp_path, REFUSES_X), apply_chat_template=True)
    bad = screen(request(path, skips_bad=True), room=limits, setting="prompt_data")
    assert [text.partition(": ")[0] for text in bad] == [f"{path}, line {line}" for line in (2, 3)]
