"""How the checkpoint in ``model/`` came to be: the warm-up, as data and numbers, for any trainer of next-token models.

What the warm-up teaches: the format (digits, then ``<eos>``) and a bad habit. In most targets every carry is dropped
(``37+45`` is answered ``72``), in the others the answer is right. Greedy decoding therefore gives the habit, right
only where nothing is carried, while sampling gives the right answer now and then.

What reinforcement learning adds: it finds that the rarer answers are the rewarded ones and makes them the usual ones.
This sharpens an ability that the warm-up left latent and the habit covered up; it does not discover addition from
nothing.

A trainer repeats it so: a new model of :func:`model_files`, weights initialised with ``WarmUp.seed``; each batch of
:func:`warm_up_batches` one step of AdamW on the mean cross-entropy over the target's characters and ``<eos>``, prompt
through the chat template; learning rate :meth:`WarmUp.learning_rate`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from examples.arithmetic.task import EOS_ID, PAD_ID, VOCABULARY, Problem, split

__all__ = ["WarmUp", "model_files", "warm_up_batches"]

SHORT_DIGITS = ("1+1", "1+2", "2+1")
LONG_DIGITS = "2+2"


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The numbers of the warm-up.

    Arguments:
        steps: optimizer steps, at least 1.
        batch_size: problems a step, sampled with replacement from the training split.
        short_share: probability, 0 to 1, that a problem is sampled from those with a one-digit operand, ``1+1``,
            ``1+2`` and ``2+1`` digits equally often; they are a fifth of all sums, ``1+1`` a hundredth: too few to
            learn.
        habit_share: probability, 0 to 1, that a target drops its carries.
        lr: peak learning rate.
        lr_warmup_steps: steps of linear rise; a cosine over all ``steps`` multiplies it and ends at zero.
        weight_decay, adam_beta1, adam_beta2: of AdamW.
        seed: of the problems, of the habit and of the initial weights.
    """

    steps: int = 1500
    batch_size: int = 256
    short_share: float = 0.3
    habit_share: float = 0.75
    lr: float = 3e-3
    lr_warmup_steps: int = 50
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    seed: int = 0

    def learning_rate(self, step: int) -> float:
        """The learning rate of step ``step``, counted from 0."""
        rise = min(1.0, (step + 1) / self.lr_warmup_steps)
        return self.lr * rise * (1 + math.cos(math.pi * step / self.steps)) / 2


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


MODEL_CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "max_window_layers": 3,
    "use_sliding_window": False,
    "sliding_window": None,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
}


def model_files() -> dict[str, str]:
    """The checkpoint's configuration files by name: a Qwen3 of about 113,000 parameters, untied, in float32."""
    generation = {"do_sample": True, "temperature": 1.0, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    return {
        "config.json": json.dumps(MODEL_CONFIG, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
