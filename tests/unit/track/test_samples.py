"""What the file of a rollout says of a sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.track.samples import SampleWriter
from slime_core.types import Sample, Status


@pytest.mark.parametrize(
    ("versions", "spans"), [(["3"], None), (["3", "4"], [["3", 0, 2], ["4", 2, 5]]), ([], None)], ids=str
)
def test_a_response_of_several_versions_records_which_tokens_are_whose(
    tmp_path: Path, versions: list[str], spans: list[list[object]] | None
) -> None:
    drawn = [("3", 0, 2), ("4", 2, 5)][: len(versions)]
    sample = Sample(group_index=0, index=1, weight_versions=versions, weight_spans=drawn, status=Status.COMPLETED)
    path = SampleWriter(tmp_path).write("train", 3, [sample])
    assert path is not None
    row = json.loads(path.read_text())
    assert (row["weight_versions"], row.get("weight_spans")) == (versions, spans)


def test_half_a_surrogate_pair_is_written_as_json_escapes_it(tmp_path: Path) -> None:
    sample = Sample(prompt="\U0001f600 \ud83d", response="é", metadata={"source": "\udc00"}, error="\ud83d")
    path = SampleWriter(tmp_path).write("train", 3, [sample])
    assert path is not None
    row = json.loads(path.read_text(encoding="utf-8"))
    assert (row["prompt"], row["response"], row["error"]) == ("\U0001f600 \ud83d", "é", "\ud83d")
    assert row["metadata"] == {"source": "\udc00"}
