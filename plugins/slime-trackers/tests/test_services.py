"""The calls of the trackers to W&B and MLflow, and what is refused before a run starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_testing import TrackerSuite
from slime_trackers import mlflow as mlflow_plugin
from slime_trackers import weights_and_biases as wandb_plugin
from slime_trackers.mlflow import MLflow
from slime_trackers.options import MlflowOptions, WandbOptions
from slime_trackers.tracked_run import TrackedRun
from slime_trackers.weights_and_biases import WeightsAndBiases

pytestmark = pytest.mark.usefixtures("wandb", "mlflow", "installed")
SERVER = MlflowOptions(tracking_uri="http://127.0.0.1:5000", experiment="sums")
ENDS = (None, RuntimeError("an engine died"))
Track = Callable[..., None]


class TestWeightsAndBiases(TrackerSuite):
    component = "wandb"


class TestMLflow(TrackerSuite):
    component = "mlflow"


def test_rows_of_wandb_have_their_step_and_evaluations_may_come_late(
    track: Track, wandb: list[Any], tmp_path: Path
) -> None:
    track(WeightsAndBiases(WandbOptions(mode="offline", group="seeds")))
    track(WeightsAndBiases(WandbOptions(use_wandb=False)))
    (run,) = wandb
    assert [row.pop("step") for row in run.rows] == [0, 1, 0]
    assert run.rows == [{"train/loss": 0.5}, {"train/loss": 0.25}, {"eval/sums/digits=1": 0.75}]
    assert (run.axes, run.exit_code) == ({"*": "step"}, 0)
    names = ("project", "entity", "group", "name", "id", "mode", "dir")
    expected = ["slime", None, "seeds", tmp_path.name, None, "offline", tmp_path]
    assert [run.arguments[name] for name in names] == expected
    assert run.arguments["config"] == {"lr": 1e-6, "corrections": ["tis"], "rm_type": "math"}


def test_a_resumed_run_continues_under_its_id_and_a_failure_is_marked(track: Track, wandb: list[Any]) -> None:
    for error in ENDS:
        track(WeightsAndBiases(WandbOptions(mode="offline")), error)
    assert [(run.arguments["id"], run.exit_code) for run in wandb] == [(None, 0), ("made-by-wandb", 1)]


def test_mlflow_gets_settings_once_and_metrics_under_names_that_it_allows(
    track: Track, mlflow: Any, tmp_path: Path
) -> None:
    track(MLflow(SERVER))
    assert (mlflow.uri, mlflow.experiments) == ("http://127.0.0.1:5000", {"sums": "1"})
    assert mlflow.runs["run-0"] == {
        "name": tmp_path.name,
        "status": "FINISHED",
        "params": {"lr": "1e-06", "corrections": '["tis"]', "rm_type": "math"},
        "metrics": [("train/loss", 0.5, 0), ("train/loss", 0.25, 1), ("eval/sums/digits_1", 0.75, 0)],
    }


def test_a_resumed_run_continues_in_its_run_of_mlflow(track: Track, mlflow: Any) -> None:
    for error in ENDS:
        track(MLflow(SERVER), error)
    (run,) = mlflow.runs.values()
    assert (len(run["metrics"]), run["status"]) == (6, "FAILED")


def test_hundreds_of_settings_are_sent_in_requests_of_100(mlflow: Any, tmp_path: Path) -> None:
    MLflow(SERVER).start(RunView(folder=tmp_path, settings={f"setting_{n}": "x" * 7000 for n in range(250)}))
    params = mlflow.runs["run-0"]["params"]
    assert len(params) == 250
    assert {len(text) for text in params.values()} == {6000}


def test_a_file_without_an_id_is_named(tmp_path: Path) -> None:
    stored = TrackedRun(tmp_path, "wandb")
    stored.write("abc")
    assert stored.read() == "abc"
    (tmp_path / "trackers" / "wandb.json").write_text("[]")
    with pytest.raises(ValueError, match=r"wandb\.json"):
        stored.read()


def test_an_upload_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def mistakes(**options: Any) -> list[str]:
        return list(wandb_plugin.slime_check(WandbOptions(**options)))

    (mistake,) = mistakes()
    assert "WANDB_API_KEY" in mistake
    assert mistakes(mode="offline") == mistakes(use_wandb=False) == []
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert mistakes() == []
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert mistakes() == []
    assert len(mistakes(host="https://wandb.example.org")) == 1


def test_mlflow_without_an_address_or_with_a_password_in_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistakes(**options: Any) -> list[str]:
        return list(mlflow_plugin.slime_check(MlflowOptions(**options)))

    (missing,), (secret,) = mistakes(), mistakes(tracking_uri="http://me:secret@127.0.0.1:5000")
    assert "--mlflow.tracking-uri" in missing
    assert "MLFLOW_TRACKING_PASSWORD" in secret
    assert "secret" not in secret
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert mistakes() == []


@pytest.mark.parametrize(
    ("check", "options", "name"),
    [(wandb_plugin.slime_check, WandbOptions(mode="offline"), "wandb"), (mlflow_plugin.slime_check, SERVER, "mlflow")],
)
def test_a_missing_client_is_named(installed: Path, check: Any, options: object, name: str) -> None:
    shutil.rmtree(installed / f"{name}-1.0.dist-info")
    (mistake,) = check(options)
    assert f"pip install {name}" in mistake
