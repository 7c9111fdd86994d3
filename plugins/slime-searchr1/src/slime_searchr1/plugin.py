"""The hooks of plugin ``searchr1``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core import Component, RewardTraits, hookimpl

__all__: list[str] = []


@hookimpl
def slime_register_reward_models() -> Iterator[Component]:
    yield Component(
        "search_r1",
        target="slime_searchr1.reward:AnswerMatch",
        traits=RewardTraits(scope="sample"),
        summary="1 where the last <answer> equals a label after normalisation, else 0 (Search-R1, 2503.09516)",
    )
