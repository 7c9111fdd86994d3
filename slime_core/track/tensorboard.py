"""TensorBoard events in the run folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """Writes every metric as a scalar of the same name into a new event file of ``directory``, with TensorBoard's
    classes and without torch.

    Arguments:
        resumed_step: hides the events of earlier files from this step on. None for a new run.
    """

    def __init__(self, directory: Path, *, resumed_step: int | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # here: takes 0.2 s to import
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(directory))
        self._hidden_from = resumed_step

    def start(self, run: object) -> None:
        """The constructor has opened the event file."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event and flush it: a step takes long enough for its row to be worth seeing."""
        if self._hidden_from is not None:  # with the first row: a resume that is refused hides nothing
            started = self._events.SessionLog(status=self._events.SessionLog.START)
            event = self._events.Event(wall_time=time.time(), step=self._hidden_from, session_log=started)
            self._writer.add_event(event)
            self._hidden_from = None
        summary = self._summaries.Summary
        values = [summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary(value=values)))
        self._writer.flush()

    def close(self, error: BaseException | None = None) -> None:
        """Close the file; no event may follow."""
        del error
        self._writer.close()
