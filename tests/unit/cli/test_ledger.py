"""``slime ledger``: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core.cli.main import main
from slime_core.track.ledger import Journal
from slime_core.track.record import SampleWriter
from slime_core.types import Sample, Status


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder: of three groups one was trained, one dropped, and one is held by the checkpoint."""
    samples = tmp_path / "samples"
    journal = Journal(samples)
    journal.took({number: [number] for number in range(3)})
    done, dropped = (Sample(group_index=one, index=one, status=Status.COMPLETED) for one in range(2))
    SampleWriter(samples).write("train", 0, [done], dropped=[("zero_std", dropped)])
    journal.closed(0)
    kept = {"journal": journal.position(), "in_flight": [], "held": [[2, [2]]]}
    save(tmp_path, kept)
    journal.took({3: [3]})
    return tmp_path


def save(folder: Path, kept: dict[str, Any]) -> None:
    checkpoint = folder / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": 1, "cursor": {"ledger": kept}}))


def test_the_ledger_shows_the_counts_at_the_checkpoint_and_at_the_end(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", str(run)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["step-000001,", "1", "rollouts:", "balances"],
        ["trained", "1"],
        ["filtered", "zero_std", "1"],
        ["in_flight", "0"],
        ["held", "1"],
        ["returned", "0"],
        ["taken", "3"],
        ["end", "of", "the", "files,", "1", "rollouts"],
        ["trained", "1"],
        ["filtered", "zero_std", "1"],
        ["open", "2"],
        ["returned", "0"],
        ["taken", "4"],
    ]


def test_a_group_that_the_checkpoint_lacks_is_an_error(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = json.loads((run / "checkpoints" / "step-000001" / "state.json").read_text())["cursor"]["ledger"]
    save(run, {**kept, "held": []})
    assert main(["ledger", str(run)]) == 1
    assert "groups 2 handed out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "slime ledger"), (["nowhere"], "nowhere is not"), (["--load", "x"], "slime ledger --load x")],
)
def test_anything_else_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", *words]) == 2
    assert message in capsys.readouterr().err
