"""The settings of the three trackers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from slime_core import Flag, PluginOptions

__all__ = ["MlflowOptions", "PrometheusOptions", "WandbOptions"]

CLOUD = "https://api.wandb.ai"


class WandbOptions(PluginOptions):
    """Project and server at Weights & Biases. The API key comes from WANDB_API_KEY or from ``wandb login``."""

    use_wandb: Annotated[bool, Flag("--use-wandb")] = True
    """Track the run with Weights & Biases. False: the other settings have no effect."""
    mode: Annotated[Literal["online", "offline", "disabled"] | None, Flag("--wandb-mode")] = None
    """online: upload during the run. offline: write a folder for wandb sync. None: WANDB_MODE, else online."""
    project: Annotated[str | None, Flag("--wandb-project", value="NAME")] = None
    """Project of the run. None: WANDB_PROJECT, else slime."""
    team: Annotated[str | None, Flag("--wandb-team", value="NAME")] = None
    """Team or user (W&B's entity). None: WANDB_ENTITY, else the key's default."""
    group: Annotated[str | None, Flag("--wandb-group", value="NAME")] = None
    """Group of runs, such as the seeds of one experiment."""
    host: Annotated[str | None, Flag("--wandb-host", value="URL")] = None
    """Address of a self-hosted W&B server. None: WANDB_BASE_URL, else https://api.wandb.ai."""
    dir: Annotated[Path | None, Flag("--wandb-dir", value="DIR")] = None
    """Folder for W&B's files. None: the run folder."""

    @property
    def effective_mode(self) -> str:
        """The mode: the setting, else W&B's environment variable, else online."""
        return self.mode or os.environ.get("WANDB_MODE") or "online"

    @property
    def address(self) -> str:
        """Address of the server."""
        return self.host or os.environ.get("WANDB_BASE_URL") or CLOUD


class MlflowOptions(PluginOptions):
    """Server and experiment. User and password come from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    tracking_uri: str | None = None
    """Address of the tracking server, such as http://127.0.0.1:5000, or sqlite:///FILE. None: MLFLOW_TRACKING_URI."""
    experiment: str = "slime"
    """Experiment of the run; it is created if the server has none of this name."""

    @property
    def uri(self) -> str:
        """Address of the server; empty: none is set."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or ""


class PrometheusOptions(PluginOptions):
    """Address of the HTTP server for metrics."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port that Prometheus scrapes; 0: a free port, written to trackers/prometheus.yml of the run folder."""
    host: str = "127.0.0.1"
    """Address to listen at. Other machines can reach any address except 127.0.0.1; they need the key as well."""
