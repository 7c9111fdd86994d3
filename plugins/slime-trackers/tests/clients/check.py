"""The trackers with the real clients, which the stand-ins of ``conftest.py`` are held to: W&B offline, and a real
MLflow server. ``make trackers`` runs this."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_trackers.mlflow import MLflow
from slime_trackers.options import MlflowOptions, WandbOptions
from slime_trackers.weights_and_biases import WeightsAndBiases

START_S = 600
Track = Callable[..., None]


def records(path: Path) -> Iterator[Any]:
    """What is in a ``.wandb`` file: protobuf records in the log format of LevelDB (blocks of 32 KiB; a record in one
    or several fragments, each with checksum, length and kind in front), after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last of its fragments
            yield Record.FromString(record)
            record = b""


def test_wandb_offline_holds_settings_and_rows(track: Track, tmp_path: Path) -> None:
    track(WeightsAndBiases(WandbOptions(mode="offline", project="sums")), **{"train/ratio": float("nan")})
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    stored = list(records(path))
    (run,) = [record.run for record in stored if record.HasField("run")]
    settings = {entry.key: json.loads(entry.value_json) for entry in run.config.update}
    assert (run.project, run.display_name) == ("sums", tmp_path.name)
    assert settings.items() >= {"lr": 1e-6, "corrections": ["tis"], "rm_type": "math"}.items()
    history = [record.history.item for record in stored if record.HasField("history")]
    rows = [{(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in row} for row in history]
    ours = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
    assert ours[0] == {"train/loss": 0.5, "step": 0}
    assert (ours[1]["train/loss"], ours[1]["step"]) == (0.25, 1)
    assert ours[2] == {"eval/sums/digits=1": 0.75, "step": 0}
    assert any(record.metric.glob_name == "*" and record.metric.step_metric == "step" for record in stored)


def test_a_resumed_run_has_the_same_id_at_wandb(track: Track, tmp_path: Path) -> None:
    for error in (None, RuntimeError("an engine died")):
        track(WeightsAndBiases(WandbOptions(mode="offline")), error)
    paths = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    ends = [record.exit.exit_code for path in paths for record in records(path) if record.HasField("exit")]
    assert len({path.stem for path in paths}) == 1
    assert sorted(ends) == [0, 1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an MLflow server with SQLite."""
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["--host", "127.0.0.1", "--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/runs.db"]
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", *words]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(f"{url}/health", process, folder / "log")
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text()[-2000:]}")


def runs_of(server: str, experiment: str) -> Any:
    from mlflow import MlflowClient

    stored = MlflowClient(server).get_experiment_by_name(experiment)
    assert stored is not None
    return MlflowClient(server).search_runs([stored.experiment_id])


def test_mlflow_holds_settings_metrics_and_the_end(track: Track, server: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    options, history = MlflowOptions(tracking_uri=server, experiment="sums"), MlflowClient(server).get_metric_history
    track(MLflow(options), **{"train/ratio": float("nan")})
    (run,) = runs_of(server, "sums")
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    assert run.data.params == {"lr": "1e-06", "corrections": '["tis"]', "rm_type": "math"}
    losses = history(run.info.run_id, "train/loss")
    assert sorted((loss.step, loss.value) for loss in losses) == [(0, 0.5), (1, 0.25)]
    (late,) = history(run.info.run_id, "eval/sums/digits_1")
    assert (late.step, late.value) == (0, 0.75)

    track(MLflow(options), RuntimeError("an engine died"))
    (run,) = runs_of(server, "sums")
    assert (run.info.status, len(history(run.info.run_id, "train/loss"))) == ("FAILED", 4)


def test_mlflow_takes_hundreds_of_settings_and_long_ones(server: str, tmp_path: Path) -> None:
    tracker = MLflow(MlflowOptions(tracking_uri=server, experiment="many"))
    tracker.start(RunView(folder=tmp_path, settings={f"setting_{number}": "x" * 7000 for number in range(250)}))
    tracker.close(None)
    (run,) = runs_of(server, "many")
    assert len(run.data.params) == 250


def test_a_server_that_is_down_is_given_up_in_a_minute_or_two(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = time.monotonic()
    tracker = MLflow(MlflowOptions(tracking_uri=f"http://127.0.0.1:{port}"))
    with pytest.raises(Exception, match="Max retries exceeded"):
        tracker.start(RunView(folder=tmp_path))
    assert time.monotonic() - started < 120
