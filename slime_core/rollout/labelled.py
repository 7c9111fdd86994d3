"""The generate function ``from_label``: the response is the prompt's label, for supervised fine-tuning."""

from __future__ import annotations

from slime_core.errors import DataError
from slime_core.plugins.contracts import RunView
from slime_core.prompts.rows import tools_of
from slime_core.rollout.engines.generation import SamplingParams
from slime_core.rollout.generate import GenerateContext, SingleTurn, fill_given, processed
from slime_core.types import PromptGroup, Sample, Status

__all__ = ["FromLabel"]


class FromLabel:
    """Every sample of a group answers with its label and the token that ends a response; no engine is asked.

    An evaluation asks the engines, as ``single_turn`` does. No engine says how likely the tokens are, so their
    log-probabilities are 0; its trait ``draws`` has runs refused that read them.
    """

    def __init__(self, options: object, run: RunView) -> None:
        self._asking = SingleTurn(options, run)

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """The same samples, finished; longer labels than ``sampling`` allows are cut and count as truncated.

        Raises:
            DataError: a sample has no label.
        """
        if context.evaluation:
            return await self._asking(context, samples, sampling)
        prompt_ids = context.encoder.encode(samples[0].prompt, tools=tools_of(samples[0].metadata))
        seen = await processed(context, samples[0])
        prompt_ids = prompt_ids if seen is None else seen.ids
        for sample in samples:
            sample.multimodal_train_inputs = sample.multimodal_train_inputs if seen is None else dict(seen.inputs)
            _answer(sample, prompt_ids, context, sampling.max_new_tokens)
        return samples


def _answer(sample: Sample, prompt_ids: list[int], context: GenerateContext, longest: int) -> None:
    if sample.label is None:
        raise DataError(
            f"generate function 'from_label': sample {sample.index} of group {sample.group_index} has no label to "
            "answer with.\nName the label's field with --label-key."
        )
    ids = context.encoder.encode_response(sample.label)
    sample.status = Status.TRUNCATED if len(ids) > longest else Status.COMPLETED
    fill_given(sample, prompt_ids, ids[:longest], context.encoder)
