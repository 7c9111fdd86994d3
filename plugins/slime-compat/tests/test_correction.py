"""``custom_tis_function_path``, through the objective that trains."""

from __future__ import annotations

import math

import pytest
import torch

from slime_compat.correction import CustomCorrection
from slime_core import RunView
from slime_core.builtin.losses import Clipped
from slime_core.config.learning import AlgorithmConfig
from slime_core.errors import PluginError
from slime_core.learner.micro_batches import idle_micro_batch
from slime_core.learner.objective import Objective
from slime_core.plugins.contracts import LossParts
from tests.function_paths import options_for
from tests.micro_batches import micro

PATH = "custom_tis_function_path"

IMPORTANCE = """
import torch

def weigh(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **_):
    assert args.eps_clip == 0.2
    assert (total_lengths, response_lengths) == ([3, 2], [2, 1])
    weight = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp().clamp(max=2.0)
    return pg_loss * weight, loss_masks, {"tis": weight}
"""


def train(correct, batch, log_probs=(-1.0, -2.0, -3.0)):
    objective = Objective(Clipped(None, RunView()), AlgorithmConfig(), parts=LossParts(correct=correct))
    log_probs_U = torch.tensor(log_probs, requires_grad=True)
    loss, sums = objective(log_probs_U, torch.zeros(3), batch)
    (gradient,) = torch.autograd.grad(loss, log_probs_U)
    return loss.item(), gradient.tolist(), {name: value.item() for name, value in sums.sums.items()}


def test_a_function_weighs_the_loss_of_each_token(tmp_path):
    # Ratios of trainer to engine: 1.5, 4 held to 2, and 0.5; losses -2, -2, 1 with weights 1/4, 1/4, 1/2.
    engine = [-1.0 - math.log(1.5), -2.0 - math.log(4.0), -3.0 - math.log(0.5)]
    correct = CustomCorrection(options_for(tmp_path, IMPORTANCE, **{PATH: "weigh"}))
    loss, gradient, sums = train(correct, micro(rollout_log_probs_U=engine))
    assert loss == pytest.approx(0.25 * -2 * 1.5 + 0.25 * -2 * 2 + 0.5 * 1 * 0.5)
    assert gradient == pytest.approx([-0.5 * 1.5, -0.5 * 2, 0.5 * 0.5])
    assert sums["tis"] == pytest.approx(0.25 * 1.5 + 0.25 * 2 + 0.5 * 0.5)
    assert sums["pg_loss"] == pytest.approx(loss)


def test_a_function_need_not_multiply(tmp_path):
    code = """
def square(*, pg_loss, loss_masks, **_):
    return pg_loss ** 2, loss_masks, {}
"""
    correct = CustomCorrection(options_for(tmp_path, code, **{PATH: "square"}))
    loss, gradient, _ = train(correct, micro())
    assert loss == pytest.approx(0.25 * 4 + 0.25 * 4 + 0.5 * 1)
    assert gradient == pytest.approx([0.25 * 8, 0.25 * 8, 0.5 * 2])  # 2 x loss x -advantage


def test_tokens_that_a_correction_masks_train_nothing_and_divisors_stay(tmp_path):
    code = """
import torch

def reject(*, pg_loss, loss_masks, **_):
    return pg_loss, [torch.zeros_like(loss_masks[0]), loss_masks[1]], {"rejected": [1 - m for m in loss_masks]}
"""
    correct = CustomCorrection(options_for(tmp_path, code, **{PATH: "reject"}))
    loss, gradient, sums = train(correct, micro())
    assert (loss, gradient) == (pytest.approx(0.5), pytest.approx([0.0, 0.0, 0.5]))
    assert sums["weight"] == 1.0


RETURNS = "def back(*, pg_loss, loss_masks, **_):\n    return {}\n"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("pg_loss", "it returned Tensor"),
        ("(pg_loss, loss_masks)", "it returned a tuple"),
        ("(pg_loss[:2], loss_masks, {})", r"has the shapes \(2,\)"),
        ("(pg_loss, loss_masks[:1], {})", r"\(2,\), \(1,\)\."),
        ("(pg_loss, [m + 1 for m in loss_masks], {})", "than 0 and 1"),
        ("(pg_loss, [m * 0 + 1 for m in loss_masks], {})", "its loss masks train"),
        ("(pg_loss, loss_masks, {'tis': 1.0})", "metric 'tis' is a"),
        ("(pg_loss.detach(), loss_masks, {})", "the policy loss came"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_wrong_return_value_of_a_correction_is_refused(tmp_path, returned, message):
    correct = CustomCorrection(options_for(tmp_path, RETURNS.format(returned), **{PATH: "back"}))
    with pytest.raises(PluginError, match=message):
        train(correct, micro(mask_U=[1.0, 0.0, 1.0]))


def test_an_idle_micro_batch_trains_nothing_and_does_not_reach_the_function(tmp_path):
    code = """
def share(*, pg_loss, loss_masks, **_):
    return pg_loss / sum(mask.sum() for mask in loss_masks), loss_masks, {"share": pg_loss}
"""
    correct = CustomCorrection(options_for(tmp_path, code, **{PATH: "share"}))
    loss, gradient, sums = train(correct, idle_micro_batch(micro()))
    assert (loss, gradient) == (0.0, [0.0, 0.0, 0.0])
    assert "share" not in sums
