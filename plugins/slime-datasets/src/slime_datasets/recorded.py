"""The generate function ``from_buffer``: trains recorded trajectories of the data source unchanged."""

from __future__ import annotations

from typing import Any

from slime_core.errors import DataError
from slime_core.generation import GenerateContext, SamplingParams, generate_group
from slime_core.types import PromptGroup, Sample, Status
from slime_datasets.trajectories import GIVEN

__all__ = ["from_buffer"]


async def from_buffer(context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
    """Trains recorded trajectories unchanged; generates one response for every other prompt.

    Groups with recorded responses keep their log-probabilities and rewards; other groups are generated as
    ``single_turn`` does. Return the same samples, finished.

    Raises:
        DataError: a trajectory has a token that is not in the model's vocabulary.
    """
    if not all(_is_given(sample) for sample in samples):
        return await generate_group(context, samples, sampling)
    for sample in samples:
        _take(sample, context.encoder.vocab_size)
    return samples


def _is_given(sample: Sample) -> bool:
    return GIVEN in (sample.train_metadata or {})


def _take(sample: Sample, vocab_size: int) -> None:
    train_metadata: dict[str, Any] = dict(sample.train_metadata or {})
    largest = max(sample.tokens)
    if largest >= vocab_size:
        raise DataError(
            f"a trajectory of the buffer, sample {sample.index}: token {largest}, and the model's vocabulary has 0 to "
            f"{vocab_size - 1}; it is of another tokenizer"
        )
    status, sample.reward = train_metadata.pop(GIVEN)
    sample.status = Status(status)
    sample.train_metadata = train_metadata or None
