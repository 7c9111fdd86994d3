"""The command that shows the tokens of samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.errors import DataError
from slime_plots.tokens import Tokens, main, read_tokens

MODEL = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"
ROW = {
    "group": 3,
    "index": 7,
    "prompt": "1+1",
    "response": "22",
    "label": "2",
    "reward": 0.0,
    "response_length": 3,
    "tokens": [3, 6, 4, 7, 7, 1],
    "loss_mask": [1, 0, 1],
    "rollout_log_probs": [-0.01, -1.0, -9.0],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    samples = tmp_path / "samples"
    samples.mkdir()
    (samples / "train-000001.jsonl").write_text(json.dumps({**ROW, "index": 0}))
    (samples / "train-000002.jsonl").write_text(f"{json.dumps(ROW)}\n{json.dumps({'group': 3})}\n")
    return tmp_path


def test_a_token_has_the_colour_of_its_probability_and_one_that_does_not_train_is_grey(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main([str(run), "--model", str(MODEL)]) == 0
    printed = capsys.readouterr().out
    assert "group 3 index 7 reward 0.0 label 2" in printed
    assert (
        "\x1b[36m<|user|>1<|assistant|>\x1b[0m\x1b[32m2\x1b[0m\x1b[38;5;244;48;5;235m2\x1b[0m\x1b[31m<eos>" in printed
    )


def test_without_colours_each_token_has_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0  # it has no checkpoint, so no tokenizer
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[-3:] == [
        ["3", "7", "7", "1", "-0.0100"],
        ["4", "7", "7", "0", "-1.0000"],
        ["5", "1", "1", "1", "-9.0000"],
    ]
    assert ["0", "3", "3", "prompt"] in lines


def test_a_file_gives_the_samples_that_hold_tokens(run: Path) -> None:
    (found,) = read_tokens(run / "samples" / "train-000002.jsonl")
    assert found == Tokens(
        "group 3 index 7 reward 0.0 label 2", (3, 6, 4), ((7, True, -0.01), (7, False, -1.0), (1, True, -9.0)), 7
    )


@pytest.mark.parametrize(
    ("given", "versions"),
    [
        ({"weight_versions": ["5"]}, ("5", "5", "5")),
        ({"weight_versions": ["5", "6"], "weight_spans": [["5", 0, 1], ["6", 2, 3]]}, ("5", None, "6")),
        ({"weight_versions": []}, ()),
    ],
)
def test_a_token_has_the_version_that_sampled_it(tmp_path: Path, given: dict[str, object], versions: object) -> None:
    (tmp_path / "train-000000.jsonl").write_text(json.dumps(ROW | given))
    (found,) = read_tokens(tmp_path / "train-000000.jsonl")
    assert found.versions == versions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"group": 1}', "--num-token-samples 8"),
        ("no json", "is not a file of samples"),
        ('{"tokens": [1]}', "is not a file of samples"),
    ],
)
def test_a_file_without_tokens_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train-000000.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        list(read_tokens(tmp_path / "train-000000.jsonl"))


def test_a_folder_without_samples_and_a_file_that_is_no_tokenizer_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no samples/\*\.jsonl"):
        main([str(run / "samples")])
    with pytest.raises(DataError, match="folder with --model"):
        main([str(run), "--model", str(tmp_path)])
