"""Plugin ``mlflow``: sends settings and metrics of a run to an MLflow tracking server.

Only client methods with an explicit run id are used: MLflow's functions for "the active run" keep state of the whole
process, which a reward function or another plugin may use for itself.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slime_core import Registration, hookimpl
from slime_trackers.tracked_run import TrackedRun, not_installed

if TYPE_CHECKING:
    from slime_core import RunView
    from slime_trackers.options import MlflowOptions

__all__ = ["MLflow"]

PARAMS_A_REQUEST = 100
LONGEST_PARAM = 6000
"""Limits of a tracking server (MLflow 3, ``mlflow/utils/validation.py``); of metrics it takes 1,000 per request."""


@hookimpl
def slime_register(add: Registration) -> None:
    add.options("slime_trackers.options:MlflowOptions")
    add.tracker("mlflow", MLflow)


@hookimpl
def slime_check(options: MlflowOptions) -> Iterator[str]:
    if missing := not_installed("mlflow", "mlflow"):
        yield missing
    if not options.uri:
        yield (
            "plugin mlflow needs the address of a tracking server: give --mlflow.tracking-uri, such as "
            "http://127.0.0.1:5000 for a server started with mlflow server, or set MLFLOW_TRACKING_URI."
        )
    elif urlsplit(options.tracking_uri or "").password is not None:
        yield (
            "mlflow.tracking_uri holds a password, and the run's files would hold it too. Give it in "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        )


class MLflow:
    """Settings and metrics to an MLflow server; a resumed run continues its run there."""

    def __init__(self, options: MlflowOptions) -> None:
        self._options = options
        self._client: Any = None
        self._run_id = ""

    def start(self, run: RunView) -> None:
        # MLflow's defaults wait minutes for an unreachable server, and the run would wait with it.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._options.uri)
        stored = TrackedRun(run.folder, "mlflow")
        run_id = stored.read()
        if run_id is None:
            self._run_id = self._created(run)
            stored.write(self._run_id)
        else:
            self._run_id = run_id
            self._client.update_run(run_id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        rows = [Metric(allowed(name), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self, error: BaseException | None) -> None:
        if self._run_id:
            self._client.set_terminated(self._run_id, status="FINISHED" if error is None else "FAILED")

    def _created(self, run: RunView) -> str:
        """Create a run on the server, with the settings as its parameters, which cannot be changed later."""
        from mlflow.entities import Param

        name = self._options.experiment
        existing = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
        run_id = str(self._client.create_run(experiment, run_name=run.folder and run.folder.name).info.run_id)
        params = [Param(allowed(key), _text(value)) for key, value in run.settings.items()]
        for start in range(0, len(params), PARAMS_A_REQUEST):
            self._client.log_batch(run_id, params=params[start : start + PARAMS_A_REQUEST])
        return run_id


def allowed(name: str) -> str:
    """Replace each character that MLflow does not allow in names by ``_``: ``eval/sums/digits=1`` becomes
    ``eval/sums/digits_1``."""
    return re.sub(r"[^\w/.\- :]", "_", name)


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:LONGEST_PARAM]
