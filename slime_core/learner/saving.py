"""Checkpoints that are written while training goes on.

    CopyingActor     base of the ranks: they copy their state together, and write the copy in a thread of their own
    complete         the draft that all ranks have written becomes a checkpoint
    BackgroundSave   the driver's part: one checkpoint at a time is being written

The rule between them: training waits for the copy alone. The checkpoint has its name, and those that it replaces go,
when the files of all ranks are on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayError

from slime_core.checkpoint.folder import Retention, RunState, by_step, drafted, write_state, writing
from slime_core.errors import CheckpointError, SlimeError
from slime_core.runtime.actors import Call, Ref, Watched, background, local_error
from slime_core.runtime.waiting import Wait, has_ended, wait

if TYPE_CHECKING:
    from slime_core.checkpoint.sharded import StateCopy, WrittenPart


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """The folder of checkpoints and their contents.

    Arguments:
        folder: of all checkpoints of the run.
        hf_template: Hugging Face folder whose config and tokenizer a Hugging Face export is completed with.
        save_hf: also export the weights as a Hugging Face folder.
        retention: which of them stay.
    """

    folder: Path
    hf_template: Path
    save_hf: bool = True
    retention: Retention = field(default_factory=Retention)


class CopyingActor(Watched):
    """A rank whose state checkpoints hold. Its constructor and its methods leave copies in ``_copies``."""

    _copies: Sequence[StateCopy] = ()

    @background
    def write(self) -> list[WrittenPart]:
        """Write the copies of this rank, and release them; other methods run meanwhile."""
        copies, self._copies = self._copies, ()
        return [one.write() for one in copies]


def complete(write: Callable[[], Sequence[WrittenPart]], state: RunState, saving: SaveSettings) -> None:
    """The draft of ``state`` is a checkpoint when this returns, and those that it replaces are gone.

    Arguments:
        write: returns the parts of all ranks, once they are on disk.

    Raises:
        CheckpointError: a part could not be written; the draft is removed.
    """
    from slime_core.checkpoint import sharded

    with drafted(saving.folder, state.step) as draft:
        sharded.finish(write())
        saving.retention.mark(draft, state.step)
        with writing(draft / "state.json"):
            write_state(draft, state)
    saving.retention.tidy(saving.folder, newest=state.step)


def written_by(ranks: Sequence[Ref[list[WrittenPart]]]) -> list[WrittenPart]:
    """The parts of all ranks, when they have all ended.

    Arguments:
        ranks: references to what each has written, or is writing.

    Raises:
        SlimeError: the failure of a rank.
    """
    ray.wait(list(ranks), num_returns=len(ranks))  # also where one fails: the others write into the draft
    try:
        return [part for rank in ray.get(list(ranks)) for part in rank]
    except RayError as error:
        raise local_error(error, who="a rank that wrote its part of a checkpoint") from error


NOT_SAVED = (
    "step {step} is not saved: {error}. The run goes on and tries again at the next save; until then {kept}. Free "
    "space on that disk."
)


class BackgroundSave:
    """The checkpoint that is being written, if one is.

    Arguments:
        folder: of all checkpoints of the run.
        wait: waits for calls under the run's limits.
        warn: receives the failure of a save after which the run goes on.
    """

    def __init__(self, folder: Path, *, wait: Wait, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._wait = wait
        self._warn = warn
        self._call: Call[None] | None = None
        self._step = 0

    def begin(self, call: Call[None], step: int) -> None:
        """``call`` completes the checkpoint of ``step``; there is no other one."""
        assert self._call is None
        self._call, self._step = call, step

    def look(self) -> None:
        """Report a save that has failed; wait for nothing."""
        if self._call is not None and has_ended(self._call):
            self.join()

    def join(self, *, required: bool = False) -> None:
        """No checkpoint is being written when this returns.

        Arguments:
            required: the run ends with this checkpoint, so that its failure is an error and no warning.

        Raises:
            CheckpointError: it could not be written, and is required.
        """
        call, self._call = self._call, None
        if call is None:
            return
        try:
            self._wait([call], what=f"the checkpoint of step {self._step}")
        except CheckpointError as error:
            kept = f"{max(by_step(self._folder).values())} is kept" if by_step(self._folder) else "there is none"
            if required:
                raise CheckpointError(
                    f"step {self._step}, the last of this run, is not saved: {error}; {kept}. Free space on that disk, "
                    "then resume with --load."
                ) from error
            self._warn(NOT_SAVED.format(step=self._step, error=error, kept=kept))

    def join_after_failure(self) -> None:
        """Let the ranks complete what they write, although the run fails: with what is left of it, and no longer than
        a wait may take."""
        call, self._call = self._call, None
        if call is not None:
            with suppress(SlimeError):
                wait([call], what=f"the checkpoint of step {self._step}", on_warn=self._warn)
