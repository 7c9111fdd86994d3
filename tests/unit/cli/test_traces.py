"""The new folder of a refused run is removed; one with results and one that was there stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.cli.run import no_trace_if_refused, writing
from slime_core.errors import ConfigError, DataError, EngineError, PlacementError, SlimeError
from slime_core.track.record import RunRecord


def end(folder: Path, error: SlimeError) -> None:
    """A run in ``folder`` that wrote a log and ended with ``error``."""
    is_new = not folder.exists()
    record = RunRecord(folder)
    record.write_text("config.toml", "")
    (record.logs / "engine-0.log").write_text("loading\n")
    with pytest.raises(type(error)), no_trace_if_refused(record, is_new=is_new):
        raise error


@pytest.mark.parametrize("error", [DataError("line 5"), PlacementError("1 too few")])
def test_a_refused_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: SlimeError) -> None:
    monkeypatch.chdir(tmp_path)
    end(tmp_path / "outputs" / "run", error)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_keeps_its_logs(tmp_path: Path) -> None:
    end(tmp_path / "run", EngineError("ended"))
    assert (tmp_path / "run" / "logs" / "engine-0.log").exists()


def test_a_folder_that_was_there_stays_and_can_be_used_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    end(tmp_path / "run", DataError("line 5"))
    assert RunRecord(tmp_path / "run").logs.is_dir()


def test_a_run_with_results_stays_whole(tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run")
    record.metrics.write_text('{"step": 0}\n')
    with pytest.raises(DataError), no_trace_if_refused(record, is_new=True):
        raise DataError("line 5")
    assert record.metrics.exists()
    assert record.logs.is_dir()


def test_a_folder_that_cannot_be_made_is_a_mistake_in_the_settings() -> None:
    says = r"output_dir: /proc/slime/run cannot be written: .*--output-dir"
    with pytest.raises(ConfigError, match=says), writing(Path("/proc/slime/run")) as folder:
        RunRecord(folder)
