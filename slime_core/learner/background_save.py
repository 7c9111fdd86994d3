"""Checkpoints that the ranks write while they train.

    SaveSettings      the folder of the checkpoints, and their contents
    BackgroundSave    the driver's wait for the checkpoint that is being written
    complete          turns the files of all ranks into a checkpoint

The ranks copy their state together, then each writes its copy in a background thread, so training waits only for the
copy. When the files of all ranks are on disk, the draft folder is renamed to the checkpoint, and the checkpoints that
it replaces are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.checkpoint.folder import Retention, RunState, by_step, drafted, write_state, writing
from slime_core.config.model_config import CARRIED
from slime_core.contracts.learning import WriteTensors
from slime_core.errors import CheckpointError, SlimeError
from slime_core.runtime.actors import Call
from slime_core.runtime.waiting import Wait, has_ended, wait

if TYPE_CHECKING:
    from slime_core.checkpoint.sharded import WrittenPart


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """The folder of checkpoints and their contents.

    Arguments:
        folder: of all checkpoints of the run.
        hf_template: Hugging Face folder whose config and tokenizer a Hugging Face export is completed with.
        save_hf: also export the weights as a Hugging Face folder.
        retention: which checkpoints stay.
    """

    folder: Path
    hf_template: Path
    save_hf: bool = True
    retention: Retention = field(default_factory=Retention)


class BackgroundSave:
    """Waits for the checkpoint that ranks are writing; at most one is being written.

    Arguments:
        folder: of all checkpoints of the run.
        wait: waits for calls under the run's limits.
        warn: receives the failure of a save that does not end the run.
    """

    def __init__(self, folder: Path, *, wait: Wait, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._wait = wait
        self._warn = warn
        self._call: Call[None] | None = None
        self._step = 0

    def begin(self, call: Call[None], step: int) -> None:
        """Record ``call``, which completes the checkpoint of ``step``. No other checkpoint may be in progress."""
        assert self._call is None
        self._call, self._step = call, step

    def look(self) -> None:
        """Report a save that has failed; do not wait for one that is running."""
        if self._call is not None and has_ended(self._call):
            self.join()

    def join(self, *, required: bool = False) -> None:
        """Wait for the checkpoint that is being written.

        Arguments:
            required: the run ends with this checkpoint, so a failure to write it is an error, not a warning.

        Raises:
            CheckpointError: a required checkpoint could not be written.
        """
        call, self._call = self._call, None
        if call is None:
            return
        try:
            self._wait([call], what=f"the checkpoint of step {self._step}")
        except CheckpointError as error:
            paths = by_step(self._folder)
            newest = f"{paths[max(paths)]} is the newest checkpoint" if paths else "there is no checkpoint"
            if required:
                raise CheckpointError(
                    f"step {self._step}, the last of this run, is not saved: {error}; {newest}. Free space on that "
                    "disk, then resume with --load."
                ) from error
            self._warn(
                f"step {self._step} is not saved: {error}. The run continues and tries again at the next save; until "
                f"then {newest}. Free space on that disk."
            )

    def join_after_failure(self) -> None:
        """Wait for the checkpoint although the run fails, at most as long as the run's limits allow; ignore errors."""
        call, self._call = self._call, None
        if call is not None:
            with suppress(SlimeError):
                wait([call], what=f"the checkpoint of step {self._step}", on_warn=self._warn)


def complete(write: Callable[[], Sequence[WrittenPart]], state: RunState, saving: SaveSettings) -> None:
    """Make a checkpoint of the draft of ``state``, and remove the checkpoints that it replaces.

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


def export_weights(
    draft: Path, weights: list[tuple[str, Any]], template: Path, write: WriteTensors | None = None
) -> None:
    """Copy the model's config and tokenizer into ``draft``, and write ``weights``, if any, into the folder ``hf``.

    Arguments:
        write: writes the folder; by default a Hugging Face folder.
    """
    from slime_core.weights import hugging_face as hf

    with writing(carried := draft / "torch_dist" / CARRIED):
        carried.mkdir()
        hf.copy_small_files(template, carried)
    if weights:
        with writing(draft / "hf"):
            (write or partial(hf.write, template=template))(draft / "hf", weights)
