"""The warm-up that made the checkpoint in ``model/``, as data and numbers for any trainer of next-token models.

The warm-up teaches the format (digits, then ``<eos>``) and a bad habit: most targets drop every carry (``37+45`` is
answered ``72``), the others are right. So greedy decoding shows the habit and is right only without carries, while
sampling gives the right answer now and then.

Reinforcement learning finds that the rarer answers are rewarded and makes them the most likely ones. This sharpens an
ability that the warm-up left latent and the habit covered up; it does not discover addition from nothing.

To repeat it: create a model from :func:`model_files`, with weights initialised with ``WarmUp.seed``; for each batch of
:func:`warm_up_batches` do one step of AdamW on the mean cross-entropy over the target's characters and ``<eos>``,
prompt through the chat template; learning rate :meth:`WarmUp.learning_rate`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from examples import tiny_model
from examples.arithmetic.task import CONTEXT_LENGTH, VOCABULARY, Problem, split

__all__ = ["WarmUp", "model_files", "warm_up_batches"]

SHORT_DIGITS = ("1+1", "1+2", "2+1")
LONG_DIGITS = "2+2"


@dataclass(frozen=True, slots=True)
class WarmUp(tiny_model.WarmUp):
    """The numbers of the warm-up; a batch is sampled with replacement from the training split.

    Arguments:
        short_share: probability, 0 to 1, that a problem is sampled from those with a one-digit operand, ``1+1``,
            ``1+2`` and ``2+1`` digits equally often; they are a fifth of all sums, ``1+1`` a hundredth: too few to
            learn.
        habit_share: probability, 0 to 1, that a target drops its carries.
    """

    short_share: float = 0.3
    habit_share: float = 0.75


def warm_up_batches(warm_up: WarmUp | None = None) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield ``steps`` batches of (prompt, target) texts; the same ``warm_up`` always yields the same ones."""
    numbers = warm_up or WarmUp()
    rng = random.Random(numbers.seed)
    pools = _by_digits(split().train)
    for _ in range(numbers.steps):
        yield tuple(_pair(rng, pools=pools, numbers=numbers) for _ in range(numbers.batch_size))


def _pair(rng: random.Random, *, pools: dict[str, list[Problem]], numbers: WarmUp) -> tuple[str, str]:
    is_short = rng.random() < numbers.short_share
    problem = rng.choice(pools[rng.choice(SHORT_DIGITS) if is_short else LONG_DIGITS])
    has_habit = rng.random() < numbers.habit_share
    return problem.prompt, problem.answer_without_carries if has_habit else problem.answer


def _by_digits(problems: Iterable[Problem]) -> dict[str, list[Problem]]:
    pools: dict[str, list[Problem]] = {}
    for problem in problems:
        pools.setdefault(problem.digits, []).append(problem)
    return pools


def model_files() -> dict[str, str]:
    """Return name -> content of the checkpoint's configuration files: about 113,000 parameters."""
    return tiny_model.model_files(
        vocab_size=len(VOCABULARY), num_layers=3, context_length=CONTEXT_LENGTH, rope_theta=10000.0
    )
