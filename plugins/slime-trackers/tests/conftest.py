"""Stand-ins for the clients of W&B and MLflow that record their calls; ``clients/check.py`` uses the real ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime_core import RunView

SETTINGS = {"lr": 1e-6, "corrections": ["tis"], "rm_type": "math"}


class WandbRun:
    """The result of ``wandb.init``."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.id = arguments["id"] or "made-by-wandb"
        self.rows: list[dict[str, Any]] = []
        self.axes: dict[str, str] = {}
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class MlflowServer:
    """The server that every client of a test talks to."""

    def __init__(self) -> None:
        self.uri = ""
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}

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


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[WandbRun]:
    """The runs that were started at W&B."""
    runs: list[WandbRun] = []

    def init(**arguments: Any) -> WandbRun:
        runs.append(WandbRun(**arguments))
        return runs[-1]

    install(monkeypatch, "wandb", Settings=dict, init=init)
    return runs


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    server = MlflowServer()
    install(monkeypatch, "mlflow", MlflowClient=server.client)
    install(monkeypatch, "mlflow.entities", Metric=lambda *metric: metric, Param=lambda *param: param)
    # The tracker sets these if they are unset; a test must not leave them behind.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    return server


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with the metadata of both clients; no key, no address and no login of the user's are visible."""
    for name in ("wandb", "mlflow"):
        metadata = tmp_path / "site" / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "site"


@pytest.fixture
def track(tmp_path: Path) -> Callable[..., None]:
    """Tracks a run in ``tmp_path``: two steps and the late evaluation of the first."""

    def track(tracker: Any, error: BaseException | None = None, **more: float) -> None:
        tracker.start(RunView(folder=tmp_path, settings=SETTINGS))
        tracker.log(0, {"train/loss": 0.5})
        tracker.log(1, {"train/loss": 0.25, **more})
        tracker.log(0, {"eval/sums/digits=1": 0.75})
        tracker.close(error)

    return track
