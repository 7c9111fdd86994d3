"""Writes the folder of a checkpoint atomically, finds checkpoints, and decides when a run saves and which it keeps. The
loop, the learner's handle and the command line call it.

    checkpoints/step-000040/
        state.json     the step, the data cursor, the plugins and their states; written last
        torch_dist/    model, optimizer and schedule, in any parallel layout
        critic/        the same for the critic, if there is one
        roles/         frozen models that changed since the start: reference/, as torch_dist/ without an optimizer
        hf/            the weights as a Hugging Face folder (unless --save-hf is off)
        temporary      an empty file, only in a checkpoint that the next checkpoint replaces

A checkpoint is written under a name that starts with a dot and renamed when it is complete, so a folder with a
checkpoint's name is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime_core.config.schema import RunConfig
from slime_core.errors import CheckpointError, ConfigError
from slime_core.track.record import checkpoint_of, numbered, write_atomically
from slime_core.untrusted import read_object

MOST_STATE = 2**30
"""Largest ``state.json`` in bytes; it can hold finished and aborted groups with their tokens."""

NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run after some steps.

    Arguments:
        step: rollouts trained so far; also the version of the weights.
        cursor: the data source's state after the *trained* rollouts, without those that were sampled ahead.
        plugins: the manifest of the plugins that ran, as JSON-ready values.
        plugin_states: place (``driver``, ``sampler``, ``rank``) -> plugin name -> what its ``slime_checkpoint_state``
            returned there.
        row: the metrics of the last step as far as they were known when it was saved.
    """

    step: int = 0
    cursor: dict[str, Any] = field(default_factory=dict)
    plugins: dict[str, Any] = field(default_factory=dict)
    plugin_states: dict[str, Any] = field(default_factory=dict)
    row: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: RunState

    @property
    def hf(self) -> Path:
        """The Hugging Face part; may be missing."""
        return self.path / "hf"

    @property
    def home(self) -> Path | None:
        """The folder of the run that wrote it; None if it is not in a run folder."""
        checkpoints = Path(os.path.abspath(self.path)).parent
        is_run = checkpoints.name == "checkpoints" and (checkpoints.parent / "config.toml").is_file()
        return checkpoints.parent if is_run else None


def drafted(folder: Path, step: int) -> AbstractContextManager[Path]:
    """Context for completing the draft of the checkpoint ``folder/step-NNNNNN``; see :func:`replacing`."""
    next_step = "Free space or choose another --output-dir, then resume with --load."
    return replacing(checkpoint_of(folder, step), next_step=next_step, begun=True)


def draft_of(folder: Path, step: int) -> Path:
    """Return the folder that becomes the checkpoint ``folder/step-NNNNNN`` when it is complete."""
    return _draft_of(checkpoint_of(folder, step))


def remove_drafts(folder: Path) -> None:
    """Remove incomplete checkpoints. No process may be writing one."""
    for draft in folder.glob(".step-*.draft"):
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context for writing ``path``: turns write errors into a CheckpointError that names it.

    On a full disk torch's file writer raises a RuntimeError, with the OSError as its context.
    """
    try:
        yield
    except (OSError, RuntimeError) as problem:
        cause: BaseException = problem
        while not isinstance(cause, OSError) and cause.__context__ is not None:
            cause = cause.__context__
        free = shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free
        why = getattr(cause, "strerror", None) or str(cause).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be written: {why} ({free // 2**20} MiB are free there)") from problem


@contextmanager
def replacing(final: Path, *, next_step: str, begun: bool = False) -> Iterator[Path]:
    """Yield a draft folder to write into; when the block ends, sync its files to disk and rename it to ``final``.

    The draft is removed if the block fails. An older ``final`` is removed only after the new one has replaced it.

    Arguments:
        next_step: advice in the message of the error.
        begun: whether the draft may hold files already, which stay.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    draft = _draft_of(final)
    try:
        if not begun:
            shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True, exist_ok=begun)
        yield draft
        for path in (*draft.rglob("*"), draft):
            _sync(path)
        _replace(draft, final)
    except OSError as problem:
        raise CheckpointError(f"checkpoint {final} cannot be written: {problem}. {next_step}") from problem
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_state(draft: Path, state: RunState) -> None:
    """Write ``state`` into a draft, and sync it to disk."""
    write_atomically(draft / "state.json", json.dumps(asdict(state), indent=2) + "\n")


def set_aside(folder: Path, *, after: int) -> list[Path]:
    """Rename the checkpoints of later steps than ``after``, so that nothing finds them; return their new paths.

    A run that resumed at ``after`` has abandoned them: the newest checkpoint must belong to the resumed run.
    """
    later = [path for step, path in sorted(by_step(folder).items()) if step > after]
    abandoned = []
    for path in later:
        names = numbered(path.with_name(f".abandoned-{path.name}"))
        abandoned.append(path.rename(next(name for name in names if not name.exists())))
    return abandoned


def newest(folder: Path) -> Checkpoint | None:
    """Return the checkpoint of the highest step in ``folder``, if there is one."""
    paths = by_step(folder)
    return _read(paths[max(paths)]) if paths else None


def find(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path``, or the newest one if ``path`` is a run folder or a folder of checkpoints.

    Raises:
        ConfigError: there is no checkpoint.
    """
    if (path / "state.json").is_file():
        return _read(path)
    for folder in (path / "checkpoints", path):
        checkpoint = newest(folder) if folder.is_dir() else None
        if checkpoint is not None:
            return checkpoint
    raise ConfigError(
        f"{path} holds no checkpoint: neither state.json nor a folder step-NNNNNN. Give a run folder, its checkpoints "
        "folder, or one checkpoint."
    )


def critic_part(checkpoint: Path) -> Path:
    """Return the folder of the critic in a checkpoint.

    Raises:
        CheckpointError: the run that wrote it had no critic.
    """
    if not (checkpoint / "critic").is_dir():
        raise CheckpointError(
            f"{checkpoint} holds no critic, and the advantage estimator of this run needs one: the run that wrote it "
            "had none. Resume with its estimator, or start again from its weights with --hf-checkpoint "
            f"{checkpoint / 'hf'}; a critic that is trained first (--num-critic-only-steps) then leaves them alone."
        )
    return checkpoint / "critic"


def by_step(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in ``folder`` by their steps."""
    return {int(match[1]): path for path in folder.glob("step-*") if (match := NAME.fullmatch(path.name))}


def _draft_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.draft")


def _replace(draft: Path, final: Path) -> None:
    """Rename ``draft`` to ``final``; an older ``final`` is removed only after that."""
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        draft.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> Checkpoint:
    try:
        state = RunState(**read_object(path / "state.json", limit=MOST_STATE))
        for name, kind in {"step": int, "cursor": dict, "plugins": dict, "plugin_states": dict, "row": dict}.items():
            if not isinstance(getattr(state, name), kind):
                raise ValueError(f"{name} is no {'whole number' if kind is int else 'object'}")
        return Checkpoint(path, state)
    except (OSError, ValueError, TypeError) as problem:
        raise CheckpointError(
            f"{path / 'state.json'} cannot be read: {problem}. Name another checkpoint of the run."
        ) from problem


# --- Due checkpoints, and their removal -------------------------------------------------------------------------------


TEMPORARY = "temporary"
"""Name of the empty file in a checkpoint that the next checkpoint replaces."""


def is_due(interval: int | None, count: int) -> bool:
    """Return whether an event of every ``interval`` steps is due after ``count`` steps; None and 0: never."""
    return bool(interval) and count % int(interval or 1) == 0


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for the checkpoints that stay on disk.

    Regular checkpoints are those of ``interval`` and the last one of the run; ``last`` and ``every`` select those that
    stay. Other checkpoints, saved for a time limit or SIGTERM, stay until the next checkpoint is complete.

    Arguments:
        interval: rollouts between regular checkpoints; if None, only the last one is regular.
        total: rollouts of the run.
        last: number of the newest regular checkpoints that stay; None for all.
        every: checkpoints after a multiple of this number of rollouts always stay; None for no such rule.
    """

    interval: int | None = None
    total: int = 0
    last: int | None = None
    every: int | None = None

    def mark(self, draft: Path, step: int) -> None:
        """Mark the checkpoint of ``step`` as temporary if the next checkpoint replaces it."""
        if not is_due(self.interval, step) and step != self.total:
            (draft / TEMPORARY).touch()

    def tidy(self, folder: Path, *, newest: int) -> None:
        """Remove the checkpoints that do not stay, once the checkpoint of step ``newest`` is complete.

        A checkpoint is renamed before it is removed, so a partly removed one is not taken for a checkpoint. One that
        cannot be removed stays.
        """
        older = {step: path for step, path in by_step(folder).items() if step < newest}
        temporary = [path for path in older.values() if (path / TEMPORARY).exists()]
        regular = sorted(step for step, path in older.items() if path not in temporary)
        if not (folder / f"step-{newest:06d}" / TEMPORARY).exists():
            regular.append(newest)
        surplus = [] if self.last is None else regular[: -self.last]
        for path in [*temporary, *(older[step] for step in surplus if not is_due(self.every, step))]:
            removed = path.with_name(f".removed-{path.name}")
            try:
                path.rename(removed)
            except OSError:
                continue
            shutil.rmtree(removed, ignore_errors=True)


class SaveClock:
    """Decides when to save: after intervals of steps and of minutes, and after the last step; and when to wait for it.

    Attributes:
        total: number of steps of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self.total = config.rollout.num_rollout
        self._interval = config.checkpoint.save_interval
        self._minutes = config.checkpoint.save_interval_minutes
        self._is_async = config.checkpoint.async_save
        self._last_s = time.monotonic()

    def waits_after(self, step: int) -> bool:
        """Return whether training waits until the checkpoint after ``step`` steps is on disk."""
        return not self._is_async or step == self.total

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step`` steps; if so, restart the minutes to the next one."""
        is_late = self._minutes is not None and time.monotonic() - self._last_s >= 60 * self._minutes
        saves = is_due(self._interval, step) or step == self.total or is_late
        self._last_s = time.monotonic() if saves else self._last_s
        return saves
