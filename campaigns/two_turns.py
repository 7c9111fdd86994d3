"""A plugin with a generate function of two turns, each of which tells the engine whose it is."""

from __future__ import annotations

from slime_core import Registration, Sample, hookimpl
from slime_core.generation import GenerateContext, SamplingParams

TURNS = 2


@hookimpl
def slime_register(add: Registration) -> None:
    add.generate_function("turns", answer_twice)


async def answer_twice(context: GenerateContext, sample: Sample, sampling: SamplingParams) -> Sample:
    """Answer the prompt twice; the second turn repeats the prompt, which is not trained there."""
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
