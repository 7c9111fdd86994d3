"""What a sampler calls: the generate functions ``single_turn`` and ``from_label``, and the
reward models ``exact_match``, ``random`` and ``zero``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from slime_core import RunView
from slime_core.errors import DataError
from slime_core.generation import GenerateContext, SamplingParams, generate_group
from slime_core.types import PromptGroup, Sample, Status, label_text, needs_label, needs_text_label

__all__ = ["ExactMatch", "FromLabel", "NoReward", "Random", "SingleTurn"]


class SingleTurn:
    """One response to each prompt.

    Sends one request for each prompt group: all its samples continue the same prompt ids. An aborted response resumes
    with a separate request, from its tokens.
    """

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """Return the same samples, finished; raises as :func:`~slime_core.generation.generate_group` does."""
        return await generate_group(context, samples, sampling)


class FromLabel:
    """The label of each prompt as its response, for supervised fine-tuning; engines answer evaluations.

    A response is the label and the end-of-sequence token. No engine computes its log-probabilities, so they
    are 0; runs that use them are refused, because the trait ``samples_from_engine`` is False.
    """

    check_row = staticmethod(needs_label)

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


class ExactMatch:
    """1.0 if the response equals the label, both without surrounding white space; else 0.0."""

    check_row = staticmethod(needs_text_label)

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward a sample, in order.

        Raises:
            DataError: a sample has no label.
        """
        return [float(sample.response.strip() == label_text(sample, "exact_match")) for sample in samples]


class Random:
    """A fair coin, 0.0 or 1.0, that is the same for the same seed, group and index.

    Another seed of the run gives other coins.
    """

    def __init__(self, run: RunView) -> None:
        self._seed = run.seed

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward a sample, in order; ignores the response."""
        return [float(self._coin(sample)) for sample in samples]

    def _coin(self, sample: Sample) -> int:
        # A hash, not a generator: the coin must not depend on the scoring process or on the order.
        key = f"{self._seed}/{sample.group_index}/{sample.index}"
        return hashlib.sha256(key.encode()).digest()[0] & 1


class NoReward:
    """0.0 for every sample: for runs that learn from a teacher or from labels alone."""

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward a sample; ignores the response."""
        return [0.0] * len(samples)
