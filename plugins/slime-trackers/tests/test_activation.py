"""A flag, or a line of a settings file, that activates a tracker's plugin leads to rows at the tracker.

Only the processes of the run are left out: ``slime run`` is called with the words of a user, and two steps are tracked.
"""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core.checkpoint.folder import RunState
from slime_core.cli.main import main
from slime_core.runtime import launch

CLIENTS = {
    "wandb": """
import json
from pathlib import Path

def Settings(**given):
    return given

class Run:
    id = "made-by-wandb"
    def __init__(self, dir):
        self.rows = (Path(dir) / "rows.jsonl").open("a")
    def define_metric(self, name, step_metric):
        pass
    def log(self, row):
        self.rows.write(json.dumps(row) + "\\n")
    def finish(self, exit_code):
        self.rows.close()

def init(*, dir, **given):
    return Run(dir)
""",
    "mlflow": """
import json
from pathlib import Path
from types import SimpleNamespace
from mlflow.entities import rows

class MlflowClient:
    def __init__(self, tracking_uri):
        self.file = Path(tracking_uri)
    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id="1")
    def create_run(self, experiment_id, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id="run-1"))
    def log_batch(self, run_id, metrics=(), params=()):
        with self.file.open("a") as file:
            for step, value in rows(metrics):
                file.write(json.dumps({"step": step, "value": value}) + "\\n")
    def set_terminated(self, run_id, status):
        pass
""",
    "mlflow.entities": """
def Metric(key, value, timestamp, step):
    return step, value

def Param(key, value):
    return key, value

def rows(metrics):
    return metrics
""",
}


@pytest.fixture
def seen() -> list[Callable[[], object]]:
    """Questions to ask of a tracker while the run runs."""
    return []


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Callable[[], object]]) -> Path:
    """A folder with stand-ins for the clients; the run folder of every test is ``run`` in it."""
    for name, code in CLIENTS.items():
        package, _, module = name.partition(".")
        folder = tmp_path / "site" / package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{module or '__init__'}.py").write_text(code)
        metadata = tmp_path / "site" / f"{package}-1.0.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in CLIENTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def two_steps(job: Any, *, track: Any, resume: Any = None) -> RunState:
        for step in range(2):
            with track.step(step) as metrics:
                metrics["train/loss"] = 0.5 - step / 4
        for question in seen:
            question()
        return RunState(2)

    monkeypatch.setattr(launch, "run", two_steps)
    return tmp_path / "run"


def slime_run(*words: str) -> int:
    return main(["run", "--plugin", "grpo", "--device", "cpu", "--output-dir", "run", *words])


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_the_flag_of_wandb_tracks(run: Path) -> None:
    assert slime_run("--use-wandb", "--wandb-mode", "offline") == 0
    assert steps(run / "rows.jsonl") == [0, 1]
    assert json.loads((run / "trackers" / "wandb.json").read_text()) == {"run_id": "made-by-wandb"}


def test_the_flag_of_wandb_without_its_client_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site" / "wandb-1.0.dist-info" / "METADATA").unlink()
    (tmp_path / "site" / "wandb-1.0.dist-info").rmdir()
    assert slime_run("--use-wandb", "--wandb-mode", "offline") == 2
    assert "pip install wandb" in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.parametrize(
    ("table", "tracks"),
    [('mode = "offline"', True), ('use_wandb = true\nmode = "offline"', True), ("use_wandb = false", False)],
)
def test_a_table_of_wandb_in_a_file_tracks_unless_it_says_no(run: Path, tmp_path: Path, table: str, tracks: bool):
    (tmp_path / "mine.toml").write_text(f"[wandb]\n{table}\n")
    assert slime_run("--config", "mine.toml") == 0
    assert (run / "rows.jsonl").exists() is tracks


def test_the_settings_that_a_run_wrote_track_again(run: Path, tmp_path: Path) -> None:
    assert slime_run("--use-wandb", "--wandb-mode", "offline") == 0
    (tmp_path / "written.toml").write_text((run / "config.toml").read_text())
    (run / "rows.jsonl").unlink()
    assert main(["run", "--config", "written.toml", "--output-dir", "second"]) == 0
    assert steps(tmp_path / "second" / "rows.jsonl") == [0, 1]


def test_a_named_mlflow_tracks(tmp_path: Path) -> None:
    assert slime_run("--plugin", "mlflow", "--mlflow.tracking-uri", str(tmp_path / "rows.jsonl")) == 0
    assert sorted({*steps(tmp_path / "rows.jsonl")}) == [0, 1]


def test_a_named_prometheus_answers_while_the_run_runs(run: Path, seen: list[Callable[[], object]]) -> None:
    found: list[str] = []

    def scrape() -> None:
        url = (run / "trackers" / "prometheus.yml").read_text().partition('["')[2].partition('"')[0]
        key = (run / "trackers" / "prometheus.key").read_text()
        request = urllib.request.Request(f"http://{url}/metrics", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found.append(answer.read().decode())

    seen.append(scrape)
    assert slime_run("--plugin", "prometheus", "--prometheus.port", "0") == 0
    assert 'slime_train_loss{metric="train/loss",run="run"} 0.25' in found[0]


def test_a_tracker_that_cannot_start_is_reported_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert slime_run("--plugin", "prometheus", "--prometheus.port", str(port)) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len([line for line in warnings if "prometheus" in line]) == 1


@pytest.mark.parametrize("words", [("--use-tensorboard",), ("--wandb-project", "x"), ("--mlflow.tracking-uri", "x")])
def test_a_flag_that_would_track_nothing_is_refused(run: Path, words: tuple[str, ...]) -> None:
    assert slime_run(*words) == 2
    assert not run.exists()
