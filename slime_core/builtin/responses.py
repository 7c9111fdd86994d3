"""The generate functions of the core: one response to each sample, and the label as the response."""

from __future__ import annotations

from slime_core import RunView
from slime_core.errors import DataError
from slime_core.generation import GenerateContext, SamplingParams, generate_group
from slime_core.types import PromptGroup, Sample, Status

__all__ = [
    "FromLabel",
    "SingleTurn",
]


class SingleTurn:
    """Sends one request for each prompt group: all its samples continue the same prompt ids. An aborted response
    resumes with its own request, from its tokens.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """Return the same samples, finished; raises as :func:`~slime_core.generation.generate_group` does."""
        return await generate_group(context, samples, sampling)


class FromLabel:
    """Answers every sample with its label and the end-of-sequence token; no engine is used.

    Evaluations use the engines, as ``single_turn`` does. In training no engine computes log-probabilities, so they are
    0; runs that use them are refused, because the trait ``samples_from_engine`` is False.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """Return the same samples, finished; labels above ``max_new_tokens`` are cut and marked as truncated.

        Raises:
            DataError: a sample has no label.
        """
        if context.evaluation:
            return await generate_group(context, samples, sampling)
        return [await self._answer(context, sample, sampling.max_new_tokens) for sample in samples]

    async def _answer(self, context: GenerateContext, sample: Sample, longest: int) -> Sample:
        if sample.label is None:
            raise DataError(
                f"generate function 'from_label': sample {sample.index} of group {sample.group_index} has no label to "
                "answer with.\nName the label's field with --label-key."
            )
        ids = context.encoder.encode_response(sample.label)
        trajectory = context.start(sample)
        await trajectory.read_inputs()
        trajectory.append_ids(ids[:longest], [1] * len(ids[:longest]))
        trajectory.finish()
        sample.status = Status.TRUNCATED if len(ids) > longest else Status.COMPLETED
        return sample
