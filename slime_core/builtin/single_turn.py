"""The default generate function: one response to each sample."""

from __future__ import annotations

from slime_core import RunView
from slime_core.generation import GenerateContext, SamplingParams, generate_group
from slime_core.types import PromptGroup, Sample

__all__ = ["SingleTurn"]


class SingleTurn:
    """One request a prompt group: all its samples continue the same prompt ids. An aborted response resumes with a
    request of its own, from its tokens.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """The same samples, finished; raises as :func:`~slime_core.generation.generate_group` does."""
        return await generate_group(context, samples, sampling)
