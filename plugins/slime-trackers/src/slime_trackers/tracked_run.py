"""The id of a run at a tracking service, so that a resumed run continues there; and checks for client libraries."""

from __future__ import annotations

import json
import os
from pathlib import Path

__all__ = ["TrackedRun", "not_installed"]


class TrackedRun:
    """The id of the run at one service, in the file ``trackers/SERVICE.json`` of the run folder.

    Arguments:
        folder: folder of the run; None if no id is stored.
        service: name of the file.
    """

    def __init__(self, folder: Path | None, service: str) -> None:
        self._path = None if folder is None else folder / "trackers" / f"{service}.json"

    def read(self) -> str | None:
        """Return the id; None if the run is new to the service.

        Raises:
            ValueError: the file has no id.
        """
        if self._path is None or not self._path.exists():
            return None
        try:
            run_id = json.loads(self._path.read_text(encoding="utf-8"))["run_id"]
        except (ValueError, LookupError, TypeError) as problem:
            raise ValueError(f"{self._path} does not hold a run_id; delete it to start a new run there") from problem
        return str(run_id)

    def write(self, run_id: str) -> None:
        """Store ``run_id``; the file is replaced atomically."""
        if self._path is None:
            return
        self._path.parent.mkdir(exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"run_id": run_id}) + "\n", encoding="utf-8")
        os.replace(unfinished, self._path)


def not_installed(plugin: str, library: str) -> str | None:
    """Return a message if the client library of ``plugin`` is missing; None if it is there."""
    from importlib import metadata

    # Reads metadata instead of importing: a folder ./wandb of W&B can be imported as a namespace package.
    try:
        metadata.version(library)
    except metadata.PackageNotFoundError:
        return f"plugin {plugin} needs the package {library}, which is not installed. Install it: pip install {library}"
    return None
