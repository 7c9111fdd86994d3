"""A tracker that writes metrics and samples into the run folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from slime_core import Registration, RunView, SampleRecord, hookimpl


@hookimpl
def slime_register(add: Registration) -> None:
    add.tracker("notes", Notes)


class Notes:
    """Writes ``notes.jsonl``: a line for the start, for each step and for its samples, and for the end."""

    def __init__(self, run: RunView) -> None:
        self._folder: Path | None = run.folder

    def start(self, run: RunView) -> None:
        """Write the step at which the run starts or resumes."""
        self._write({"start": run.resumed_step})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the loss of the step."""
        self._write({"step": step, "loss": metrics.get("train/loss")})

    def samples(self, kind: Literal["train", "eval"], step: int, rows: Iterable[SampleRecord]) -> None:
        """Write prompt, response and reward of each sample of a rollout."""
        if kind == "train":
            self._write({"step": step, "samples": [[row.prompt, row.response, row.reward] for row in rows]})

    def close(self, error: BaseException | None) -> None:
        """Write whether the run succeeded."""
        self._write({"end": error is None})

    def _write(self, line: object) -> None:
        if self._folder is None:  # in a test without a run
            return
        with (self._folder / "notes.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
