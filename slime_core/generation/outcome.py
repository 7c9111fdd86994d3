"""How a response ended, as the status of its sample."""

from __future__ import annotations

from slime_core.errors import EngineError, RequestFailed
from slime_core.types import Sample, Status

__all__ = ["FINISHED", "UNANSWERED", "fail", "is_finished"]

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Finish reason of the engine -> status of the sample."""

UNANSWERED = "engine"
"""Cause of a failure: no engine has answered."""


def is_finished(sample: Sample) -> bool:
    """Whether its response is whole."""
    return sample.status in (Status.COMPLETED, Status.TRUNCATED)


def fail(sample: Sample, failure: EngineError) -> None:
    """``sample`` has no response, because of ``failure``; it is not trained on."""
    sample.status, sample.error = Status.FAILED, str(failure)
    sample.failure_cause = failure.cause if isinstance(failure, RequestFailed) else UNANSWERED
