"""The learning rate of every step, as Megatron's schedule computes it, against tables made by hand; and an Adam that
forgets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_core.config.learning import OptimizerConfig


@pytest.fixture(autouse=True)
def patched() -> None:
    """Megatron can be imported without a GPU."""
    from slime_core.cpu.megatron import install

    install()


def rates(*, num_steps: int, **settings: Any) -> list[float]:
    """At which the optimizer steps 1, 2, ... run."""
    from slime_core.learner.optimizer import build_schedule

    optimizer: Any = SimpleNamespace(param_groups=[{}])
    schedule = build_schedule(optimizer, OptimizerConfig(lr=1.0, **settings), num_steps=num_steps)
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step(increment=1)
    return found


WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 0.2 + 0.8 k / 4, then 1.
        ({"lr_warmup_init": 0.2, "lr_warmup_iters": 4}, [0.4, 0.6, 0.8, 1, 1, 1]),
        # 0.1 + 0.9 (1 - k / 4); min_lr after the decay.
        ({"lr_decay_style": "linear", "lr_decay_iters": 4, "min_lr": 0.1}, [0.775, 0.55, 0.325, 0.1, 0.1]),
        # (1 + cos(pi k / 4)) / 2.
        ({"lr_decay_style": "cosine", "lr_decay_iters": 4}, [0.853553, 0.5, 0.146447, 0, 0]),
        # sqrt(4 / k) after a warm-up of 4 steps.
        (
            {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 4, "lr_decay_iters": 100},
            [0.25, 0.5, 0.75, 1, 0.894427, 0.816497, 0.755929, 0.707107],
        ),
        ({"lr_decay_style": "inverse-square-root", "min_lr": 0.55}, [1, 0.707107, 0.577350, 0.55, 0.55]),
        # 1 until four steps before the end.
        (WSD | {"lr_wsd_decay_style": "linear"}, [1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        (WSD | {"lr_wsd_decay_style": "cosine"}, [1, 1, 1, 1, 0.853553, 0.5, 0.146447, 0]),
        # 2 x 0.5 ^ (k / 4) - 1.
        (WSD, [1, 1, 1, 1, 0.681793, 0.414214, 0.189207, 0]),
        # 1 - sqrt(k / 4), from 1 to 0.2.
        (
            WSD | {"lr_wsd_decay_style": "minus_sqrt", "min_lr": 0.2, "lr_warmup_iters": 2},
            [0.5, 1, 1, 1, 0.6, 0.434315, 0.307180, 0.2],
        ),
    ],
)
def test_every_step_runs_at_the_rate_of_the_table(settings, expected):
    assert rates(num_steps=len(expected), **settings) == pytest.approx(expected, abs=1e-6)


def test_a_reset_adam_steps_as_a_new_one() -> None:
    from slime_core.learner.optimizer import reset_optimizer_states

    def step(adam: torch.optim.Optimizer, weight: torch.Tensor, gradient: float) -> float:
        weight.grad = torch.full_like(weight, gradient)
        before = weight.item()
        adam.step()
        return weight.item() - before

    weight = torch.nn.Parameter(torch.ones(()))
    adam = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0)
    chained: Any = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=adam)],
    )
    reset_optimizer_states(chained)  # nothing to forget yet
    assert step(adam, weight, 3.0) == pytest.approx(-0.5)  # Adam's first step: lr times the sign of the gradient
    assert step(adam, weight, -1.0) != pytest.approx(0.5, abs=0.1)
    reset_optimizer_states(chained)
    assert step(adam, weight, -1.0) == pytest.approx(0.5)
