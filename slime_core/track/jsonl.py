"""One JSON object a line, on disk when the call returns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from slime_core.errors import CheckpointError

__all__ = ["JsonLines", "read_rows"]


class JsonLines:
    """Appends ``{"step": 3, "train/loss": 0.5, ...}`` lines to ``path``; a reader sees whole lines only."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line and flush it."""
        self._file.write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; no line may follow."""
        self._file.close()


def read_rows(path: Path) -> list[dict[str, float]]:
    """All rows of ``path`` in order, without a last line that a killed process left incomplete.

    Raises:
        CheckpointError: another line is not a JSON object with a step.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return [_row(path, number, line) for number, line in enumerate(whole, start=1)]


def _row(path: Path, number: int, line: str) -> dict[str, float]:
    try:
        row: dict[str, float] = json.loads(line)
        row["step"] = int(row["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}:{number} is not a metrics row ({error!r}). Every line is one JSON object with a step; "
            "remove the line, or resume into a new directory."
        ) from error
    return row
