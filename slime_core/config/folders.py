"""Whether a folder can be written, asked before anything is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["unwritable"]


def unwritable(folder: Path, what: str) -> Iterator[str]:
    """Why ``folder``, named by setting ``what``, cannot be made or written into; nothing where it can."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    flag = "--" + what.replace("_", "-")
    if not nearest.is_dir():
        yield f"{what}: {nearest} is a file, so {folder} cannot be a folder; choose another with {flag}"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{what}: {nearest} is not writable, so {folder} cannot be written; choose another with {flag}"
