"""Rollouts as files: the same bits come back, and every damage is reported with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_core.errors import DataError
from slime_core.rollout.rollout_files import Recorded, read_numbered, read_rollout, write_rollout
from slime_core.types import Sample, Status

HEADER = '{"format": "slime rollout", "version": 1, "rollout": 0, "temperature": 1.0, "samples": 4, "cursor": {}'


def sample(index: int, **more: object) -> Sample:
    values = {"tokens": [3, 1, 4], "response_length": 2, "rollout_log_probs": [-0.25, -2.5], "reward": 1.0}
    return Sample(group_index=index // 2, index=index, status=Status.COMPLETED, **(values | more))  # type: ignore[arg-type]


def recorded(rollout: int = 0, **more: object) -> Recorded:
    trained = [sample(0), sample(1, reward=0.0), sample(2)]
    return Recorded(rollout, 0.7, trained, [Sample(index=9, status=Status.FAILED, error="late")], {"next": 4}, **more)  # type: ignore[arg-type]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_rollout(tmp_path / "0.jsonl", recorded())


def test_a_rollout_comes_back_as_it_was(file: Path) -> None:
    assert read_rollout(file) == recorded()


def test_the_file_reads_as_the_page_says(file: Path) -> None:
    header, first, *rest = (json.loads(line) for line in file.read_text().splitlines())
    assert header == {
        **{"format": "slime rollout", "version": 1, "rollout": 0, "temperature": 0.7},
        **{"trained": 3, "samples": 4, "cursor": {"next": 4}},
    }
    assert first == sample(0).to_dict()
    assert len(rest) == 3


def test_every_float32_comes_back_bit_for_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    numbers = np.concatenate([bits[np.isfinite(bits)], [np.float32(1e-45), np.float32(-0.0), np.float32(-np.inf)]])
    one = sample(0, tokens=[1] * (len(numbers) + 1), response_length=len(numbers))
    one.rollout_log_probs = numbers.astype(np.float32).tolist()
    (again,) = read_rollout(write_rollout(tmp_path / "0.jsonl", Recorded(0, 1.0, [one]))).trained
    assert np.asarray(again.rollout_log_probs, np.float32).tobytes() == numbers.astype(np.float32).tobytes()


def test_inputs_for_the_model_come_back_exactly(tmp_path: Path) -> None:
    rows = torch.tensor([[0.5, -2.0, 3.0]]).bfloat16()
    one = sample(0, multimodal_train_inputs={"pixels": rows, "grid": np.array([[1, 2, 3]])})
    (again,) = read_rollout(write_rollout(tmp_path / "0.jsonl", Recorded(0, 1.0, [one]))).trained
    found = again.multimodal_train_inputs
    assert np.array_equal(found["pixels"], rows.float().numpy())
    assert (found["grid"].dtype, found["grid"].tolist()) == (np.int64, [[1, 2, 3]])


def test_a_share_takes_whole_groups_from_the_front() -> None:
    groups = [[one.index for one in group] for group in recorded().subsampled(0.5).groups]
    assert groups == [[0, 1]]
    assert [one.index for one in recorded().subsampled(0.01).trained] == [0, 1]
    assert recorded().subsampled(None) == recorded()


@pytest.mark.parametrize(
    ("line", "text", "names"),
    [
        (1, "{", "property name"),
        (1, "[]", "list"),
        (1, '{"format": "other"}', "other"),
        (1, '{"format": "slime rollout", "version": 2}', "slime rollout"),
        (1, '{"format": "slime rollout", "version": 1}', "version 1"),
        (1, f'{HEADER}, "trained": -1}}', "4 samples, -1 "),
        (1, f'{HEADER}, "trained": 5}}', "4 samples, 5 "),
        pytest.param(1, "[" * 200_000, "recursion", id="deep"),
        (3, '{"tokens": [1', "Expecting"),
        (3, '{"tokens": [1], "colour": 3}', "colour"),
        (3, '{"tokens": ["a"]}', "integer"),
        (3, '{"tokens": [99999999999]}', ""),
        (3, '{"status": "asleep"}', "'asleep'"),
        (3, '{"metadata": {"__array__": "|O8", "shape": [1], "data": ""}}', "OBJECT|object"),
    ],
)
def test_damage_is_reported_with_file_and_line(file: Path, line: int, text: str, names: str) -> None:
    lines = file.read_text().splitlines()
    lines[line - 1] = text
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"^{file}, line {line}: .*({names})"):
        read_rollout(file)


def test_a_file_under_another_number_is_refused_unless_it_is_named_alone(file: Path) -> None:
    other = file.rename(file.with_name("3.jsonl"))
    template = file.parent / "{rollout_id}.jsonl"
    with pytest.raises(DataError, match=r"3\.jsonl, line 1: .*rollout 0, .* 3;"):
        read_numbered(template, 3)
    assert read_numbered(other, 3).rollout == 0


def test_a_write_that_fails_leaves_what_was_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_rollout(file, recorded(1))
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["0.jsonl"]


def test_a_file_that_was_cut_is_refused(file: Path) -> None:
    file.write_text("\n".join(file.read_text().splitlines()[:-1]))
    with pytest.raises(DataError, match=r"line 1: .*4 samples, .*3 follow"):
        read_rollout(file)
