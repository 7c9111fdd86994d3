"""What a run that is refused leaves behind: nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime_core.errors import ConfigError, PlacementError, UserError
from slime_core.track.record import FILES, FOLDERS, RunRecord

__all__ = ["no_trace_if_refused", "standing", "writing"]


def standing(folder: Path) -> Path:
    """The innermost folder on the way to ``folder``, itself included, that is there now."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """What the operating system says against the block's writing into ``folder`` comes out as a ConfigError."""
    try:
        yield folder
    except OSError as problem:
        raise ConfigError(
            f"output_dir: {folder} cannot be written: {problem}. Give a folder on a disk with room that this user may "
            "write, with --output-dir."
        ) from problem


@contextmanager
def no_trace_if_refused(record: RunRecord, stood: Path) -> Iterator[None]:
    """If the block finds that the run cannot be as asked, the run folder goes again, unless it holds results.

    A failure that is nobody's mistake keeps its folder, for the logs.

    Arguments:
        stood: what :func:`standing` said before the record was made.
    """
    try:
        yield
    except (UserError, PlacementError):
        if record.resumed_step is None and not _has_results(record):
            _remove(record.directory, stood)
        raise


def _has_results(record: RunRecord) -> bool:
    has_rows = record.metrics.exists() and record.metrics.stat().st_size > 0
    return has_rows or any(record.checkpoints.iterdir())


def _remove(directory: Path, stood: Path) -> None:
    for name in FOLDERS:
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in FILES:
        (directory / name).unlink(missing_ok=True)
    with suppress(OSError):  # somebody put something else there
        for folder in (directory, *directory.parents):
            if folder == stood:
                break
            folder.rmdir()
