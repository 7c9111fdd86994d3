"""A generate function of two turns, with a text between them that asks for another answer."""

from __future__ import annotations

from slime_core import Registration, hookimpl
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.types import Sample


@hookimpl
def slime_register(add: Registration) -> None:
    add.generate_function("second_try", second_try)


async def second_try(context: GenerateContext, sample: Sample, sampling: SamplingParams) -> Sample:
    """Generate two turns, and add a text between them that is not trained, as far as the response has room."""
    trajectory = context.start(sample)
    while trajectory.num_turns < 2 and not trajectory.is_full:
        if trajectory.num_turns:
            trajectory.append_text("+")
        if not trajectory.is_full:
            await trajectory.generate(sampling)
    return trajectory.finish()
