"""Writes the metrics of a run as TensorBoard events, with TensorBoard's own classes and without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes every metric as a scalar under its own name into a new event file of ``directory``.

    Arguments:
        resumed_step: hides the events of earlier files in the directory from this step on; None: a new run.
    """

    def __init__(self, directory: Path, *, resumed_step: int | None = None) -> None:
        self._writer = EventFileWriter(str(directory))
        if resumed_step is not None:
            started = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resumed_step, session_log=started))

    def start(self) -> None:
        """The constructor has opened the event file."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event and flush it: a step takes long enough for its row to be worth seeing."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, error: BaseException | None = None) -> None:
        """Close the file; no event may follow."""
        del error
        self._writer.close()
