"""From the command line, or a line of a settings file, to the rows at a tracker.

``slime run`` is called with the words of a user; two steps are tracked instead of starting processes.
"""

from __future__ import annotations

import shutil
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core import launch
from slime_core.checkpoint.folder import RunState
from slime_core.cli.main import main

OFFLINE = ("--wandb-mode", "offline")


@pytest.fixture
def during_run() -> list[Callable[[], object]]:
    """Functions that are called while the run is in progress."""
    return []


@pytest.fixture(autouse=True)
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    during_run: list[Callable[[], object]],
    wandb: object,
    mlflow: object,
    installed: Path,
) -> Path:
    """The run folder of the test."""
    monkeypatch.chdir(tmp_path)

    def two_steps(job: Any, *, track: Any, resume: Any = None) -> RunState:
        for step in range(2):
            with track.step(step) as metrics:
                metrics["train/loss"] = 0.5 - step / 4
        for function in during_run:
            function()
        return RunState(2)

    monkeypatch.setattr(launch, "run", two_steps)
    return tmp_path / "run"


def slime_run(*words: str) -> int:
    return main(["run", "--plugin", "grpo", "--device", "cpu", "--output-dir", "run", *words])


@pytest.mark.parametrize("words", [("--use-wandb",), ("--plugin", "wandb"), ("--wandb-project", "sums"), ()])
def test_a_run_that_names_wandb_or_sets_one_of_its_options_tracks(wandb: list[Any], words: tuple[str, ...]) -> None:
    assert slime_run(*words, *OFFLINE) == 0
    assert [row["step"] for row in wandb[0].rows] == [0, 1]


@pytest.mark.parametrize(
    ("table", "tracks"),
    [('mode = "offline"', True), ('use_wandb = true\nmode = "offline"', True), ("use_wandb = false", False)],
)
def test_a_table_of_wandb_in_a_file_tracks_unless_it_says_no(wandb: list[Any], table: str, tracks: bool) -> None:
    Path("mine.toml").write_text(f"[wandb]\n{table}\n")
    assert slime_run("--config", "mine.toml") == 0
    assert bool(wandb) is tracks


def test_the_settings_that_a_run_wrote_track_again(run: Path, wandb: list[Any]) -> None:
    assert slime_run("--use-wandb", *OFFLINE) == 0
    assert main(["run", "--config", str(run / "config.toml"), "--output-dir", "second"]) == 0
    assert [[row["step"] for row in tracked.rows] for tracked in wandb] == [[0, 1]] * 2


@pytest.mark.parametrize("words", [("--use-tensorboard",), ("--use-wandb",), ("--use-wandb", *OFFLINE)])
def test_what_cannot_track_is_refused(
    run: Path, installed: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """An unknown flag, an upload without a key, and a missing client."""
    if OFFLINE[0] in words:
        shutil.rmtree(installed / "wandb-1.0.dist-info")
    assert slime_run(*words) == 2
    assert words[0].removeprefix("--use-") in capsys.readouterr().err
    assert not run.exists()


def test_an_address_of_mlflow_tracks(mlflow: Any) -> None:
    assert slime_run("--mlflow.tracking-uri", "http://127.0.0.1:5000") == 0
    assert {step for _, _, step in mlflow.runs["run-0"]["metrics"]} == {0, 1}


def test_prometheus_answers_during_the_run(run: Path, during_run: list[Callable[[], object]]) -> None:
    texts: list[str] = []

    def scrape() -> None:
        url = (run / "trackers" / "prometheus.yml").read_text().partition('["')[2].partition('"')[0]
        key = (run / "trackers" / "prometheus.key").read_text()
        request = urllib.request.Request(f"http://{url}/metrics", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            texts.append(answer.read().decode())

    during_run.append(scrape)
    assert slime_run("--plugin", "prometheus", "--prometheus.port", "0") == 0
    assert 'slime_train_loss{metric="train/loss",run="run"} 0.25' in texts[0]


def test_a_tracker_that_cannot_start_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert slime_run("--plugin", "prometheus", "--prometheus.port", str(taken.getsockname()[1])) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len([line for line in warnings if "prometheus" in line]) == 1
