"""Malformed and malicious files from outside: a command ends at once with one clear error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_core.checkpoint.folder import RunState, drafted, write_state
from slime_core.cli.main import main
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import CheckpointError
from slime_core.track.ledger import JOURNAL
from slime_core.track.samples import read_samples
from tests.fuzz import KINDS, findings

INDEX = "model.safetensors.index.json"
Stderr = Callable[..., str]


@pytest.fixture
def stderr_of(capsys: pytest.CaptureFixture[str]) -> Stderr:
    def of(*words: str, code: int = 2) -> str:
        started_s = time.process_time()
        assert main(words) == code
        assert time.process_time() - started_s < 30
        return capsys.readouterr().err

    return of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ARITHMETIC / "model", tmp_path / "model"))


@pytest.fixture
def words(model: Path, tmp_path: Path) -> list[str]:
    """``slime check`` of a model with prompts of its own."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    lengths = ["--rollout-max-response-len", "8", "--prompt-data", str(tmp_path / "p.jsonl")]
    return ["check", "--plugin", "grpo", "--hf-checkpoint", str(model), *lengths]


MALFORMED = ["[]", "3", '"x"', '{"weight_map": []}', "{", "[" * 5000, '{"a": ' + "9" * 5000]
OUTSIDE = ["../model.safetensors", "/etc/passwd", "", "..", 3, None, ["a"]]


@pytest.mark.parametrize(
    "content", [*MALFORMED, *(json.dumps({"weight_map": {"lm_head.weight": file}}) for file in OUTSIDE)]
)
def test_a_malformed_index_or_one_of_files_elsewhere_is_refused(
    content: str, model: Path, words: list[str], stderr_of: Stderr
) -> None:
    (model / INDEX).write_text(content)
    assert f"{model / INDEX}" in stderr_of(*words)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: list[tuple[int | None, object]] = [
    (2**63, {}),
    (2**40, {}),
    (None, []),
    (None, {"a": []}),
    (None, {"a": ENTRY | {"shape": None}}),
    (None, {"a": ENTRY | {"shape": [-2]}}),
    (None, {"a": ENTRY | {"shape": [1e300]}}),
    (None, {"a": ENTRY | {"data_offsets": [0, 2**70]}}),
    (None, {"a": ENTRY | {"data_offsets": [0]}}),
]


@pytest.mark.parametrize(("length", "header"), HEADERS)
def test_a_malformed_safetensors_header_is_refused(
    length: int | None, header: object, model: Path, words: list[str], stderr_of: Stderr
) -> None:
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes((length or len(text)).to_bytes(8, "little") + text + b"\0" * 8)
    assert "model.safetensors" in stderr_of(*words)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX, "f.jsonl", "f.parquet"])
def test_a_fifo_is_not_waited_for(name: str, model: Path, words: list[str], stderr_of: Stderr) -> None:
    is_prompts = name.startswith("f.")
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert str(model) in stderr_of(*(words[:-1] if is_prompts else words), *([str(model / name)] if is_prompts else []))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a checkpoint whose ledger is empty."""
    with drafted(tmp_path / "run" / "checkpoints", 1) as draft:
        write_state(draft, RunState(1, cursor={"ledger": {"journal": 0}}))
    (tmp_path / "run" / "samples").mkdir()
    (tmp_path / "run" / "samples" / JOURNAL).write_text("")
    return tmp_path / "run"


LINES = ["[]", "3", "{}", '{"take": [3]}', '{"close": "x"}', '{"base": [[[], 1]]}', '{"back": 1}']


@pytest.mark.parametrize("line", LINES)
def test_a_malformed_line_of_a_ledger_is_refused(line: str, run: Path, stderr_of: Stderr) -> None:
    (run / "samples" / JOURNAL).write_text(line + "\n")
    assert JOURNAL in stderr_of("ledger", str(run), code=1)


@pytest.mark.parametrize("row", ["[]", "null", "{}", '{"group": []}', '{"group": 0, "status": "completed"}'])
def test_a_malformed_row_of_samples_is_refused(row: str, run: Path, stderr_of: Stderr) -> None:
    (run / "samples" / JOURNAL).write_text('{"take": [[0, [0]]]}\n{"close": 0}\n')
    (run / "samples" / "train-000000.jsonl").write_text(row + "\n")
    assert str(run / "samples") in stderr_of("ledger", str(run), code=1)
    with pytest.raises(CheckpointError, match=r"train-000000\.jsonl"):
        list(read_samples(run / "samples", "train", 0))


STATES = [[], {"step": "1"}, {"step": 1, "cursor": []}, {"step": 1, "cursor": {"ledger": {"journal": "x"}}}]


@pytest.mark.parametrize("state", [*STATES, {"step": 1, "cursor": {"ledger": {"held": 3}}}])
def test_a_malformed_state_of_a_checkpoint_is_refused(state: object, run: Path, stderr_of: Stderr) -> None:
    (run / "checkpoints" / "step-000001" / "state.json").write_text(json.dumps(state))
    assert "state.json" in stderr_of("ledger", str(run), code=1)


def test_a_distribution_with_broken_entry_points_is_named(tmp_path: Path) -> None:
    about = tmp_path / "bad-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: bad\nVersion: 1.0\n")
    (about / "entry_points.txt").write_bytes(b"[slime]\nx = \xff\n")
    words = [sys.executable, "-m", "slime_core", "check", "--plugin", "grpo"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert f"{tmp_path} cannot be read (UnicodeDecodeError" in done.stderr


# --- Cases of make fuzz -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_ends_in_one_clear_error(kind: str) -> None:
    assert list(findings(range(100_000, 100_012), seed=1, kind=kind)) == []


@pytest.mark.parametrize("number", [2657, 3028, 4413, 5240])
def test_inputs_that_the_fuzz_campaign_found_are_handled(number: int) -> None:
    """A file that is /, a header without a dtype, a required version of 5,000 digits."""
    assert list(findings(range(number, number + 1), seed=1)) == []
