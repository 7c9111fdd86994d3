"""The row of a sample in the file of a rollout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.track.record import SampleWriter
from slime_core.types import Sample, Status


@pytest.mark.parametrize(
    ("versions", "spans"), [(["3"], None), (["3", "4"], [["3", 0, 2], ["4", 2, 5]]), ([], None)], ids=str
)
def test_a_response_of_several_versions_records_which_tokens_are_whose(
    tmp_path: Path, versions: list[str], spans: list[list[object]] | None
) -> None:
    recorded = [("3", 0, 2), ("4", 2, 5)][: len(versions)]
    sample = Sample(group_index=0, index=1, weight_versions=versions, weight_spans=recorded, status=Status.COMPLETED)
    path = SampleWriter(tmp_path).write("train", 3, [sample])
    assert path is not None
    row = json.loads(path.read_text())
    assert (row["weight_versions"], row.get("weight_spans")) == (versions, spans)


def test_the_first_rows_hold_tokens_masks_and_log_probs(tmp_path: Path) -> None:
    tokens = {"tokens": [7, 8, 9], "response_length": 2}
    samples = [
        Sample(index=0, **tokens, loss_mask=[1, 0], rollout_log_probs=[-0.5, 0.0]),
        Sample(index=1, **tokens),
        Sample(index=2, **tokens),
    ]
    path = SampleWriter(tmp_path, num_with_tokens=3).write("train", 3, samples[:1], dropped=[("zero_std", samples[1])])
    assert path is not None
    keys = ("tokens", "loss_mask", "rollout_log_probs")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [[row[key] for key in keys] for row in rows] == [[[7, 8, 9], [1, 0], [-0.5, 0.0]], [[7, 8, 9], [1, 1], None]]
    path = SampleWriter(tmp_path, num_with_tokens=1).write("train", 4, samples)
    assert path is not None
    assert ["tokens" in json.loads(line) for line in path.read_text().splitlines()] == [True, False, False]


def test_half_a_surrogate_pair_is_written_as_json_escapes_it(tmp_path: Path) -> None:
    sample = Sample(prompt="\U0001f600 \ud83d", response="é", metadata={"source": "\udc00"}, error="\ud83d")
    path = SampleWriter(tmp_path).write("train", 3, [sample])
    assert path is not None
    row = json.loads(path.read_text(encoding="utf-8"))
    assert (row["prompt"], row["response"], row["error"]) == ("\U0001f600 \ud83d", "é", "\ud83d")
    assert row["metadata"] == {"source": "\udc00"}
