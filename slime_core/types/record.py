"""One row of the files below a run's ``samples/``, as trackers read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_core.types.json import JsonValue
from slime_core.types.reward import Reward

__all__ = ["SampleRecord"]


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """What a run wrote down of one sample: texts, reward and fate; tokens and log-probabilities are not in it.

    Example: ``SampleRecord(group=3, index=0, prompt="1+1=", response="2", label="2", reward=1.0, status="completed",
    response_length=2, weight_versions=("4",))``.

    Arguments:
        group, index: as :class:`~slime_core.types.Sample` has them.
        status: ``completed``, ``truncated``, ``aborted`` or ``failed``.
        response_length: tokens.
        weight_versions: which weights produced it, in order.
        eval_set: name of the evaluation set; None: the sample was generated for training.
        dropped: why a sample transform left it out of training; None: it was not left out.
        cause: why it failed; None: it did not.
        error: the message of that failure.
        masked: whether its tokens are kept out of the loss.
    """

    group: int | None
    index: int | None
    prompt: str | list[dict[str, JsonValue]]
    response: str
    label: JsonValue
    reward: Reward | None
    status: str
    response_length: int
    weight_versions: tuple[str, ...] = ()
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    eval_set: str | None = None
    dropped: str | None = None
    cause: str | None = None
    error: str | None = None
    masked: bool = False
