"""What the trackers ask of W&B and MLflow, and what is refused before a run starts.

The clients are stand-ins that note their calls; ``clients/check.py`` makes the same calls to the real ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime_core import RunView
from slime_testing import TrackerSuite
from slime_trackers import mlflow as mlflow_plugin
from slime_trackers import weights_and_biases as wandb_plugin
from slime_trackers.mlflow import MLflow, MlflowOptions, allowed
from slime_trackers.tracked_run import TrackedRun
from slime_trackers.weights_and_biases import WandbOptions, WeightsAndBiases


class WandbRun:
    """What ``wandb.init`` returns."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.rows, self.exit_code = given, list[dict[str, Any]](), None
        self.id = given["id"] or "made-by-wandb"
        self.axes = dict[str, str]()

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class MlflowServer:
    """What every client of a test talks to."""

    def __init__(self) -> None:
        self.experiments = dict[str, str]()
        self.runs = dict[str, dict[str, Any]]()

    def client(self, tracking_uri: str) -> MlflowServer:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = str(len(self.experiments) + 1)
        return self.experiments[name]

    def create_run(self, experiment_id: str, run_name: str | None) -> Any:
        run_id = f"run-{len(self.runs)}"
        self.runs[run_id] = {"name": run_name, "status": "RUNNING", "params": {}, "metrics": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100  # a real server refuses more
        self.runs[run_id]["params"] |= dict(params)
        self.runs[run_id]["metrics"] += [(key, value, step) for key, value, _, step in metrics]

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    set_terminated = update_run


@pytest.fixture(autouse=True)
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[WandbRun]:
    """The runs that were started at W&B."""
    runs = list[WandbRun]()
    module: Any = ModuleType("wandb")
    module.Settings = dict
    module.init = lambda **given: runs.append(WandbRun(given)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


@pytest.fixture(autouse=True)
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    server = MlflowServer()
    module: Any = ModuleType("mlflow")
    module.MlflowClient = server.client
    entities: Any = ModuleType("mlflow.entities")
    entities.Metric = lambda key, value, timestamp, step: (key, value, timestamp, step)
    entities.Param = lambda key, value: (key, value)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    # The tracker sets these where they are unset; a test must not leave them behind.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    return server


class TestWeightsAndBiases(TrackerSuite):
    component = "wandb"


class TestMLflow(TrackerSuite):
    component = "mlflow"


def view(folder: Path) -> RunView:
    return RunView(folder=folder, settings={"lr": 1e-6, "corrections": ["tis"], "rm_type": "math"})


def track(tracker: Any, folder: Path, error: BaseException | None = None) -> None:
    """Two steps and the late evaluation of the first."""
    tracker.start(view(folder))
    tracker.log(0, {"train/loss": 0.5})
    tracker.log(1, {"train/loss": 0.25})
    tracker.log(0, {"eval/sums/digits=1": 0.75})
    tracker.close(error)


def test_rows_of_wandb_carry_their_step_and_evaluations_may_come_late(wandb: list[Any], tmp_path: Path) -> None:
    track(WeightsAndBiases(WandbOptions(mode="offline", group="seeds"), view(tmp_path)), tmp_path)
    (run,) = wandb
    assert run.rows == [
        {"train/loss": 0.5, "step": 0},
        {"train/loss": 0.25, "step": 1},
        {"eval/sums/digits=1": 0.75, "step": 0},
    ]
    assert (run.axes, run.exit_code) == ({"*": "step"}, 0)
    given = {name: run.given[name] for name in ("project", "entity", "group", "name", "id", "mode", "dir", "config")}
    assert given == {
        "project": "slime",
        "entity": None,
        "group": "seeds",
        "name": tmp_path.name,
        "id": None,
        "mode": "offline",
        "dir": tmp_path,
        "config": dict(view(tmp_path).settings),
    }


def test_a_resumed_run_goes_on_under_its_id_and_a_failure_is_marked(wandb: list[Any], tmp_path: Path) -> None:
    for error in (None, RuntimeError("an engine died")):
        track(WeightsAndBiases(WandbOptions(mode="offline"), view(tmp_path)), tmp_path, error)
    assert [run.given["id"] for run in wandb] == [None, "made-by-wandb"]
    assert [run.exit_code for run in wandb] == [0, 1]


def test_switched_off_wandb_is_not_called(wandb: list[Any], tmp_path: Path) -> None:
    track(WeightsAndBiases(WandbOptions(use_wandb=False), view(tmp_path)), tmp_path)
    assert wandb == []


def test_mlflow_gets_settings_once_and_metrics_under_names_that_it_allows(mlflow: Any, tmp_path: Path) -> None:
    options = MlflowOptions(tracking_uri="http://127.0.0.1:5000", experiment="sums")
    track(MLflow(options, view(tmp_path)), tmp_path)
    assert (mlflow.uri, mlflow.experiments) == ("http://127.0.0.1:5000", {"sums": "1"})
    assert mlflow.runs["run-0"] == {
        "name": tmp_path.name,
        "status": "FINISHED",
        "params": {"lr": "1e-06", "corrections": '["tis"]', "rm_type": "math"},
        "metrics": [("train/loss", 0.5, 0), ("train/loss", 0.25, 1), ("eval/sums/digits_1", 0.75, 0)],
    }


def test_a_resumed_run_goes_on_in_its_run_of_mlflow(mlflow: Any, tmp_path: Path) -> None:
    options = MlflowOptions(tracking_uri="http://127.0.0.1:5000")
    for error in (None, RuntimeError("an engine died")):
        track(MLflow(options, view(tmp_path)), tmp_path, error)
    (run,) = mlflow.runs.values()
    assert (len(run["metrics"]), run["status"]) == (6, "FAILED")


def test_hundreds_of_settings_are_sent_in_requests_of_100(mlflow: Any, tmp_path: Path) -> None:
    many = RunView(folder=tmp_path, settings={f"setting_{number}": "x" * 7000 for number in range(250)})
    MLflow(MlflowOptions(tracking_uri="http://127.0.0.1:5000"), many).start(many)
    params = mlflow.runs["run-0"]["params"]
    assert len(params) == 250
    assert {len(text) for text in params.values()} == {6000}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("train/loss", "train/loss"), ("eval/sums/digits=1", "eval/sums/digits_1"), ("eval/a-pass@1", "eval/a-pass_1")],
)
def test_names_for_mlflow(name: str, expected: str) -> None:
    assert allowed(name) == expected


def test_a_file_without_an_id_is_named(tmp_path: Path) -> None:
    kept = TrackedRun(tmp_path, "wandb")
    kept.write("abc")
    assert kept.read() == "abc"
    (tmp_path / "trackers" / "wandb.json").write_text("[]")
    with pytest.raises(ValueError, match="not hold a run_id"):
        kept.read()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Both clients are installed; no key, no address and no login of the user's are seen."""
    for module in (wandb_plugin, mlflow_plugin):
        monkeypatch.setattr(module, "not_installed", lambda plugin, library: None)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return monkeypatch


def test_an_upload_without_a_key_is_refused(installed: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (mistake,) = wandb_plugin.slime_check(WandbOptions())
    assert "API key: set WANDB_API_KEY" in mistake
    assert list(wandb_plugin.slime_check(WandbOptions(mode="offline"))) == []
    assert list(wandb_plugin.slime_check(WandbOptions(use_wandb=False))) == []
    installed.setenv("WANDB_MODE", "offline")
    assert list(wandb_plugin.slime_check(WandbOptions())) == []
    installed.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert list(wandb_plugin.slime_check(WandbOptions())) == []
    assert len(list(wandb_plugin.slime_check(WandbOptions(host="https://wandb.example.org")))) == 1


def test_mlflow_without_an_address_or_with_a_password_in_it_is_refused(installed: pytest.MonkeyPatch) -> None:
    (mistake,) = mlflow_plugin.slime_check(MlflowOptions())
    assert "--mlflow.tracking-uri" in mistake
    (mistake,) = mlflow_plugin.slime_check(MlflowOptions(tracking_uri="http://me:secret@127.0.0.1:5000"))
    assert "holds a password" in mistake
    assert "secret" not in mistake
    installed.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert list(mlflow_plugin.slime_check(MlflowOptions())) == []


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_plugin, "not_installed", lambda plugin, library: wandb_missing(plugin))
    monkeypatch.setenv("WANDB_API_KEY", "key")
    (mistake,) = wandb_plugin.slime_check(WandbOptions())
    assert "--plugin wandb needs" in mistake


def wandb_missing(plugin: str) -> str | None:
    from slime_trackers.tracked_run import not_installed

    return not_installed(plugin, "no-such-package")
