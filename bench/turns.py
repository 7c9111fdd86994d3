"""A plugin with a generate function of two turns, each of which tells the engine whose it is."""

from __future__ import annotations

from slime_core import Component, GenerateTraits, hookimpl

TURNS = 2


class Turns:
    """Answers the prompt, is asked the same again, and answers again."""

    def __init__(self, options, run):
        del options

    async def __call__(self, context, sample, sampling):
        """The sample, with what was asked between its turns untrained."""
        asked = context.encoder.encode(sample.prompt)
        sample.tokens, session = asked, f"{context.rollout}-{sample.index}"
        for turn in range(TURNS):
            if turn:
                sample.append_response_tokens(tokens=asked, trainable=False, text=" ")
            (answer,) = await context.client.generate(
                list(sample.tokens), sampling=sampling, session=session, extra={"rid": f"turn-{session}-{turn}"}
            )
            drawn, meta = list(answer.token_ids), {"weight_versions": [{"version": answer.weight_versions[0]}]}
            meta["finish_reason"] = answer.finish_reason
            sample.append_response_tokens(
                tokens=drawn, log_probs=list(answer.log_probs), meta_info=meta, text=context.encoder.decode(drawn)
            )
        return sample


@hookimpl
def slime_register_generate_functions():
    yield Component("turns", target=f"{__name__}:Turns", traits=GenerateTraits(scope="sample"))
