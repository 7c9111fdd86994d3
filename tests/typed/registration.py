"""What mypy accepts and refuses of a plugin's registration. Nothing here runs: each line that is ignored has to be a
mistake, because mypy, in strict mode, reports an ignored line that is none."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core import Registration, Sample


class Reward:
    async def score(self, samples: Sequence[Sample]) -> list[float]:
        return [0.0 for _ in samples]


async def reward(samples: Sequence[Sample]) -> list[float]:
    return [0.0 for _ in samples]


def targets_are_classes_functions_and_paths(add: Registration) -> None:
    add.reward_model("a", Reward, scope="group", isolated=False)
    add.reward_model("b", reward)
    add.reward_model("c", "package.module:Reward", numbers={"score"})
    add.reward_model("d", 3)  # type: ignore[arg-type]


def keywords_are_those_of_the_kind(add: Registration) -> None:
    add.reward_model("a", Reward, scope="token")  # type: ignore[arg-type]
    add.reward_model("a", Reward, reads={"rewards"})  # type: ignore[call-arg]
    add.advantage_estimator("a", "package.module:Estimator", reads=["rewards"])  # type: ignore[arg-type]
    add.command("a", reward)  # type: ignore[arg-type]
