"""Plugin ``wandb``: logs the metrics of a run to Weights & Biases, or to a folder that ``wandb sync`` uploads later.

Each row of metrics contains a ``step``, which all charts use as their axis. W&B's own step cannot be used: W&B
drops rows that are not of its latest step, and a concurrent evaluation logs an earlier step.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slime_core import Registration, hookimpl
from slime_trackers.tracked_run import TrackedRun, not_installed

if TYPE_CHECKING:
    from slime_core import RunView
    from slime_trackers.options import WandbOptions

__all__ = ["WeightsAndBiases"]


@hookimpl
def slime_register(add: Registration) -> None:
    add.options("slime_trackers.options:WandbOptions")
    add.tracker("wandb", WeightsAndBiases)


@hookimpl
def slime_check(options: WandbOptions) -> Iterator[str]:
    if not options.use_wandb:
        return
    if missing := not_installed("wandb", "wandb"):
        yield missing
    # Without a key, W&B would ask on the terminal for one when the run starts.
    if options.effective_mode == "online" and not _has_key(options.address):
        yield (
            f"plugin wandb uploads to {options.address}, but there is no API key: set WANDB_API_KEY, or log in with "
            f"wandb login --host {options.address}. Without a network, give --wandb-mode offline."
        )


def _has_key(address: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(address).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


class WeightsAndBiases:
    """Metrics to Weights & Biases; a resumed run continues its run there."""

    def __init__(self, options: WandbOptions) -> None:
        self._options = options
        self._run: Any = None

    def start(self, run: RunView) -> None:
        if not self._options.use_wandb:
            return
        import wandb

        options, stored = self._options, TrackedRun(run.folder, "wandb")
        self._run = wandb.init(
            project=options.project or os.environ.get("WANDB_PROJECT") or "slime",
            entity=options.team,
            group=options.group,
            name=None if run.folder is None else run.folder.name,
            id=stored.read(),
            resume="allow",
            mode=options.effective_mode,
            dir=options.dir or run.folder,
            config=dict(run.settings),
            # Without this, W&B would replace stdout and stderr of the driver; the run writes log files.
            settings=wandb.Settings(base_url=options.address, console="off"),
        )
        self._run.define_metric("*", step_metric="step")
        stored.write(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._run is not None:
            self._run.log({**metrics, "step": step})

    def close(self, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)
