"""The folder of a run.

config.toml     the settings as they were resolved; config-step-000040.toml: those before a resume from step 40
plugins.json    which plugins ran, with versions and digests
kernels.json    which implementations the learner's ranks used, such as that of attention
metrics.jsonl   one row a step
tensorboard/    the same for TensorBoard
samples/        what was generated and how it was rewarded: one JSON object a line, one file a rollout or evaluation set
logs/           one file a process
timeline/       what each process did when: one file a process
checkpoints/    what a resume starts from
run.lock        locked by the process that writes here, and names it
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from itertools import count
from pathlib import Path

from slime_core.errors import CheckpointError, ConfigError, RunError

PRIVATE = 0o700
"""Mode of a new run folder."""

FOLDERS = ("tensorboard", "samples", "logs", "timeline", "checkpoints")
LOCK = "run.lock"
LOCK_BYTES = 4096
KERNELS = "kernels.json"
FILES = ("config.toml", "plugins.json", KERNELS, "metrics.jsonl", LOCK)


class RunRecord:
    """The folder of one run, made on construction; a fresh run never writes into another one's, and no two processes
    write into one: the folder is locked from construction to the end of this object or of the process.

    Arguments:
        directory: made if it is missing; must be empty unless the run is resumed, or hold no more than a start that
            failed leaves: neither rows nor checkpoints.
        resumed_step: the step that a resumed run does next: at :meth:`begin` the rows of earlier steps are kept, later
            ones dropped, and the settings so far get a name of their own. None: fresh.
        row: metrics of the step before it, in the checkpoint: they take the place of a row that is missing because the
            process was killed before it wrote it.

    Attributes:
        config, metrics, tensorboard, samples, logs, checkpoints: see the module's docstring.
        lock_warning: why the folder could not be locked, or empty.

    Raises:
        ConfigError: the directory holds something and the run is not resumed, or it is a file, or another process has
            locked it.
    """

    def __init__(
        self, directory: Path | str, *, resumed_step: int | None = None, row: Mapping[str, float] | None = None
    ) -> None:
        self.directory = Path(directory).absolute()
        self.config = self.directory / "config.toml"
        self.metrics = self.directory / "metrics.jsonl"
        self.tensorboard = self.directory / "tensorboard"
        self.samples = self.directory / "samples"
        self.logs = self.directory / "logs"
        self.checkpoints = self.directory / "checkpoints"
        self.resumed_step = resumed_step
        self.pending_evaluation: dict[str, float] = {}
        if resumed_step is None and not (self.directory / LOCK).exists():
            self._refuse_used()  # before a file is made in a folder that is no run's
        # Prompts and responses are private: only the owner can read a new folder. An existing one stays unchanged.
        self.directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        self.lock_warning = self._lock()
        if resumed_step is None:
            self._refuse_used()
        for folder in FOLDERS:
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        self._when_begun: list[Callable[[], object]] | None = None
        if resumed_step is not None:
            self._when_begun = []
            self.when_begun(partial(self._keep_config, resumed_step))
            self._rewind(resumed_step, row)

    def when_begun(self, change: Callable[[], object]) -> None:
        """Make ``change`` to the folder: now in a new run, at :meth:`begin` in a run that resumes here, because a
        resume that is refused must not change the folder."""
        if self._when_begun is None:
            change()
        else:
            self._when_begun.append(change)

    @property
    def has_begun(self) -> bool:
        """Return whether this run may write into the folder. A run that resumes here must first :meth:`begin`."""
        return self._when_begun is None

    def begin(self) -> None:
        """Make the changes that waited for the checkpoint to be restored. Nothing can refuse the resume any more."""
        waiting, self._when_begun = self._when_begun or [], None
        for change in waiting:
            change()

    def release(self) -> None:
        """Unlock the folder before the end of this object: closing its file later would also release a lock that
        another object of this process has taken meanwhile."""
        self._release()

    def write_text(self, name: str, text: str) -> Path:
        """``directory/name`` holds ``text``, or what it held before, never a part."""
        return write_atomically(self.directory / name, text)

    def add_row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append ``{"step": 3, "train/loss": 0.5, ...}`` to the metrics; a reader sees whole lines only.

        Raises:
            RunError: the disk is full.
        """
        self.begin()
        with room_for(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")

    def add_to_row(self, step: int, metrics: Mapping[str, float]) -> None:
        """The row of ``step``, which is written, holds ``metrics`` too; the file is replaced as a whole."""
        rows = read_rows(self.metrics)
        assert any(row["step"] == step for row in rows), f"{self.metrics} has no row {step} yet"
        held = ({**row, **metrics} if row["step"] == step else row for row in rows)
        write_atomically(self.metrics, "".join(json.dumps(row, allow_nan=False) + "\n" for row in held))

    def _lock(self) -> str:
        # A record lock (fcntl(2)) belongs to the process: the kernel releases it when the process ends in any way.
        file = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        self._release = weakref.finalize(self, os.close, file)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                # Empty: the other process has locked the file and not written yet.
                holder = os.read(file, LOCK_BYTES).decode(errors="replace").strip() or "Another process writes into it"
                raise ConfigError(
                    f"The run folder {self.directory} is in use. {holder}. Wait until it has ended, stop it, or give "
                    "another folder with --output-dir."
                ) from None
            return (
                f"{self.directory} could not be locked ({error.strerror}), so nothing stops a second run that is "
                "resumed in this folder while this one runs."
            )
        pid, host, started = os.getpid(), socket.gethostname(), datetime.now().isoformat(" ", "seconds")
        os.ftruncate(file, 0)
        os.pwrite(file, f"Process {pid} on {host}, started {started}, writes into it (kill {pid})\n".encode(), 0)
        return ""

    def _refuse_used(self) -> None:
        if self.directory.is_file():
            raise ConfigError(f"The run folder {self.directory} is a file. Give an empty or a new folder.")
        if self.directory.is_dir() and not self._is_unused():
            raise ConfigError(
                f"The run folder {self.directory} holds another run's files. Give an empty or a new folder, "
                "or resume that run with --load."
            )

    def _is_unused(self) -> bool:
        """Return whether the folder has nothing but the files of a start that failed."""
        foreign = {path.name for path in self.directory.iterdir()} - {*FOLDERS, *FILES}
        has_rows = self.metrics.exists() and self.metrics.stat().st_size > 0
        has_checkpoints = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return not (foreign or has_rows or has_checkpoints)

    def _keep_config(self, step: int) -> None:
        if self.config.exists():
            names = numbered(self.directory / f"config-step-{step:06d}.toml")
            write_atomically(next(path for path in names if not path.exists()), self.config.read_text(encoding="utf-8"))

    def _rewind(self, step: int, row: Mapping[str, float] | None) -> None:
        if not self.metrics.exists():
            return
        rows = read_rows(self.metrics)
        earlier = [entry for entry in rows if entry["step"] < step]
        if row:
            # An interrupt may have left no row of the step that the checkpoint holds, or one of its evaluation alone.
            last = dict(row)
            for entry in earlier:
                last |= entry if entry["step"] == step - 1 else {}
            earlier = [entry for entry in earlier if entry["step"] < step - 1] + [{"step": step - 1, **last}]
        text = "".join(json.dumps(entry) + "\n" for entry in earlier)
        self.when_begun(partial(write_atomically, self.metrics, text))
        # The evaluation after the last step is in a separate row. It measured the start weights of the resumed run.
        for entry in rows:
            if entry["step"] == step:
                self.pending_evaluation |= {name: value for name, value in entry.items() if name.startswith("eval/")}


def checkpoint_of(folder: Path, step: int) -> Path:
    """The folder of the checkpoint after ``step`` steps in ``folder``, the run's folder of checkpoints."""
    return folder / f"step-{step:06d}"


def numbered(path: Path) -> Iterator[Path]:
    """``path``, then ``path`` with -2, -3 ... before its suffix, without end: for names that must not be taken."""
    yield path
    yield from (path.with_stem(f"{path.stem}-{number}") for number in count(2))


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a disk, or of a user's share of it, that has no room."""


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Context in which the caller writes ``path``; a full disk becomes an error with a next step.

    Raises:
        RunError: its disk is full; names the file.
    """
    try:
        yield
    except OSError as problem:
        if problem.errno not in FULL:
            raise
        raise RunError(
            f"{path} cannot be written: its disk is full ({problem.strerror}). Free space there, then resume with "
            "--load RUN_FOLDER; or name a folder on another disk with --output-dir."
        ) from problem


def write_atomically(path: Path, content: str | bytes) -> Path:
    """``path`` holds ``content``, text as UTF-8, or what it held before, never a part, even after a power cut.

    Raises:
        RunError: the disk is full.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with room_for(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    return path


def read_rows(path: Path) -> list[dict[str, float]]:
    """All rows of ``path`` in order, without a last line that a killed process left incomplete.

    Raises:
        CheckpointError: another line is not a JSON object with a step.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    return [_row(path, number, line) for number, line in enumerate(complete, start=1)]


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
