"""The id that a tracking service gave a run, so that a resumed run goes on there; and missing client libraries."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path

__all__ = ["TrackedRun", "not_installed"]


class TrackedRun:
    """The run's id at one service, in the file ``trackers/SERVICE.json`` of the run folder.

    Arguments:
        folder: of the run; None: nothing is kept.
        service: name of the file.
    """

    def __init__(self, folder: Path | None, service: str) -> None:
        self._path = None if folder is None else folder / "trackers" / f"{service}.json"

    def read(self) -> str | None:
        """The id; None: the run is new to the service.

        Raises:
            ValueError: the file holds no id.
        """
        if self._path is None or not self._path.exists():
            return None
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))["run_id"]
        except (ValueError, LookupError, TypeError) as problem:
            raise ValueError(f"{self._path} does not hold a run_id; delete it to start a new run there") from problem
        return str(found)

    def write(self, run_id: str) -> None:
        """Keep ``run_id``; the file is replaced as a whole."""
        if self._path is None:
            return
        self._path.parent.mkdir(exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"run_id": run_id}) + "\n", encoding="utf-8")
        os.replace(unfinished, self._path)


def not_installed(plugin: str, library: str) -> str | None:
    """A message if the client library of ``plugin`` is missing; None: it is installed."""
    # Its metadata, because W&B's own folder ./wandb can be imported as a package without any file.
    try:
        metadata.version(library)
    except metadata.PackageNotFoundError:
        return (
            f"--plugin {plugin} needs the package {library}, which is not installed. Install it: pip install {library}"
        )
    return None
