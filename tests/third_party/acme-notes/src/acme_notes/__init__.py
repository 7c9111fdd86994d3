"""A tracker that writes metrics and samples into the run folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from slime_core import Component, RunView, SampleRecord, hookimpl


@hookimpl
def slime_register_trackers() -> Iterator[Component]:
    yield Component("notes", target=f"{__name__}:Notes", summary="notes.jsonl in the run folder")


class Notes:
    """One line for the start, for each step and for its samples, and for the end."""

    def __init__(self, options: None, run: RunView) -> None:
        del options
        self._folder: Path | None = run.folder

    def start(self, run: RunView) -> None:
        """The run starts or resumes."""
        self._write({"start": run.resumed_step})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step's loss."""
        self._write({"step": step, "loss": metrics.get("train/loss")})

    def samples(self, kind: Literal["train", "eval"], step: int, rows: Iterable[SampleRecord]) -> None:
        """The prompt, the response and the reward of each sample of a rollout."""
        if kind == "train":
            self._write({"step": step, "samples": [[row.prompt, row.response, row.reward] for row in rows]})

    def close(self, error: BaseException | None) -> None:
        """The run has ended."""
        self._write({"end": error is None})

    def _write(self, line: object) -> None:
        if self._folder is None:  # the component alone, as in a test
            return
        with (self._folder / "notes.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
