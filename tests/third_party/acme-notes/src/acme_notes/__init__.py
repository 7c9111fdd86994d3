"""A tracker that writes metrics and prompts into the run folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from slime_core import Component, RunView, hookimpl


@hookimpl
def slime_register_trackers() -> Iterator[Component]:
    yield Component("notes", target=f"{__name__}:Notes", summary="notes.jsonl in the run folder")


class Notes:
    """One line for the start, for each step with the prompts of its samples, and for the end."""

    def __init__(self, options: None, run: RunView) -> None:
        del options
        self._folder: Path | None = run.folder

    def start(self, run: RunView) -> None:
        """The run begins, or resumes."""
        self._write({"start": run.resumed_step})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step's loss, and the prompts of the samples that the run has written down."""
        self._write({"step": step, "loss": metrics.get("train/loss"), "prompts": self._prompts(step)})

    def close(self, error: BaseException | None) -> None:
        """The run has ended."""
        self._write({"end": error is None})

    def _prompts(self, step: int) -> list[object]:
        if self._folder is None:
            return []
        file = self._folder / "samples" / f"train-{step:06d}.jsonl"
        return [json.loads(line)["prompt"] for line in file.read_text().splitlines()] if file.exists() else []

    def _write(self, line: object) -> None:
        if self._folder is None:  # the component alone, as in a test
            return
        with (self._folder / "notes.jsonl").open("a") as file:
            print(json.dumps(line), file=file)
