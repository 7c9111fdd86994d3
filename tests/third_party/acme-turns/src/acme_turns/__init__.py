"""A generate function of two turns: after a first answer, a text asks for another one."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core import Component, GenerateTraits, RunView, hookimpl
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.types import Sample


@hookimpl
def slime_register_generate_functions() -> Iterator[Component]:
    yield Component(
        "second_try",
        target=f"{__name__}:SecondTry",
        traits=GenerateTraits(scope="sample"),
        summary="Two turns, and between them a text that is not trained",
    )


class SecondTry:
    """Asks twice."""

    def __init__(self, options: None, run: RunView) -> None:
        del options, run

    async def __call__(self, context: GenerateContext, sample: Sample, sampling: SamplingParams) -> Sample:
        """The sample with both turns, as far as the response has room."""
        trajectory = context.start(sample)
        while trajectory.num_turns < 2 and not trajectory.is_full:
            if trajectory.num_turns:
                trajectory.append_text("+")
            if not trajectory.is_full:
                await trajectory.generate(sampling)
        return trajectory.finish()
