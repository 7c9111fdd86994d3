"""A plugin with a generate function of two turns, each of which tells the engine whose it is."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core import Component, GenerateTraits, RunView, hookimpl
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.types import Sample

TURNS = 2


class Turns:
    """Answers the prompt twice: the second turn repeats the prompt."""

    def __init__(self, options: None, run: RunView) -> None:
        del options

    async def __call__(self, context: GenerateContext, sample: Sample, sampling: SamplingParams) -> Sample:
        """The finished sample; the repeated prompt between its turns is not trained."""
        prompt_ids = context.encoder.encode(sample.prompt)
        sample.tokens, session = prompt_ids, f"{context.rollout}-{sample.index}"
        for turn in range(TURNS):
            if turn:
                sample.append_response_tokens(tokens=prompt_ids, trainable=False, text=" ")
            (answer,) = await context.client.generate(
                list(sample.tokens), sampling=sampling, session=session, extra={"rid": f"turn-{session}-{turn}"}
            )
            sampled = list(answer.token_ids)
            sample.append_response_tokens(
                tokens=sampled,
                log_probs=list(answer.log_probs),
                meta_info={
                    "weight_versions": [{"version": answer.weight_versions[0]}],
                    "finish_reason": answer.finish_reason,
                },
                text=context.encoder.decode(sampled),
            )
        return sample


@hookimpl
def slime_register_generate_functions() -> Iterator[Component]:
    yield Component("turns", target=f"{__name__}:Turns", traits=GenerateTraits(scope="sample"))
