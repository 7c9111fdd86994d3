"""The reward models for instructions: whether the response follows the instructions in its row's metadata.

``{"prompt": "Say hello without commas.", "metadata": {"instruction_id_list": ["punctuation:no_comma"], "kwargs":
[{}]}}``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from slime_core.errors import DataError
from slime_core.types import JsonValue, Sample
from slime_rewards.instructions.following import instructions_of, read_instructions, variants

__all__ = ["IfBench", "IfEval", "Instructions", "measured"]


def measured(sample: Sample) -> dict[str, float]:
    """Measure how far the response follows its instructions.

    Returns:
        ``strict``: 1.0 if it follows every instruction, else 0.0; ``loose``: the same, but each instruction may be
        followed by any variant of the response (see :func:`~slime_rewards.instructions.following.variants`);
        ``strict_share`` and ``loose_share``: the fraction of instructions that it follows, 0 to 1.

    Raises:
        DataError: see :func:`~slime_rewards.instructions.following.instructions_of`.
    """
    instructions, texts = instructions_of(sample), variants(sample.response)
    strict = [instruction.holds(texts[0]) for instruction in instructions]
    loose = [
        is_held or any(map(instruction.holds, texts[1:]))
        for instruction, is_held in zip(instructions, strict, strict=True)
    ]
    return {
        "strict": float(all(strict)),
        "loose": float(all(loose)),
        "strict_share": fmean(strict),
        "loose_share": fmean(loose),
    }


def wrong_instructions(label: JsonValue, metadata: Mapping[str, JsonValue]) -> str | None:
    """Return the mistake in the instructions of a row; None if there is none."""
    del label
    try:
        read_instructions(metadata, "the row")
    except DataError as mistake:
        return str(mistake)
    return None


class Instructions:
    """``strict`` and ``loose`` as ifeval and ifbench, ``strict_share`` and ``loose_share``; needs ``--reward-key``.

    See :func:`measured`.
    """

    check_row = staticmethod(wrong_instructions)

    async def score(self, samples: Sequence[Sample]) -> list[dict[str, float]]:
        """Return four named numbers per sample, in order."""
        return [measured(sample) for sample in samples]


class IfEval:
    """1.0 if the response follows every instruction of its row as written, else 0.0 (IFEval, 2311.07911)."""

    check_row = staticmethod(wrong_instructions)

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order."""
        return [measured(sample)["strict"] for sample in samples]


class IfBench:
    """As ``ifeval``, ignoring asterisks and outer lines (IFBench, 2507.02833).

    Both reward models accept the instructions of both benchmarks.
    """

    check_row = staticmethod(wrong_instructions)

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order."""
        return [measured(sample)["loose"] for sample in samples]
