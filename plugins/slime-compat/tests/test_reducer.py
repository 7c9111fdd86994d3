"""``custom_pg_loss_reducer_function_path``, through the objective that trains."""

from __future__ import annotations

import pytest
import torch

from slime_compat.reducer import CustomReducer
from slime_core import RunView
from slime_core.builtin.losses import Clipped
from slime_core.config.learning import AlgorithmConfig
from slime_core.errors import PluginError
from slime_core.learner.micro_batches import idle_micro_batch
from slime_core.learner.objective import Objective
from slime_core.plugins.contracts import LossParts
from tests.function_paths import options_for
from tests.micro_batches import micro

PATH = "custom_pg_loss_reducer_function_path"

STANDARD = """
def mean_of_samples(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduce(x):
        parts = zip(x.split(response_lengths), loss_masks, strict=True)
        if calculate_per_token_loss:
            return sum((part * mask).sum() for part, mask in parts)
        return sum((part * mask).sum() / max(mask.sum(), 1) for part, mask in parts)
    return reduce
"""
CONSTANT = """
def constant(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    assert (total_lengths, response_lengths) == ([3, 2], [2, 1])
    def reduce(x):
        return sum((part * mask).sum() for part, mask in zip(x.split(response_lengths), loss_masks)) / 8
    return reduce
"""


def gradient(reduce, batch, **algorithm):
    objective = Objective(Clipped(None, RunView()), AlgorithmConfig(**algorithm), parts=LossParts(reduce=reduce))
    log_probs_U = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss, sums = objective(log_probs_U, log_probs_U * 0.3, batch)
    (found,) = torch.autograd.grad(loss, log_probs_U)
    return found.tolist(), {name: value.item() for name, value in sums.sums.items()}


@pytest.mark.parametrize("masked", [False, True])
def test_the_mean_of_samples_trains_what_the_core_trains(tmp_path, masked):
    columns = {"mask_U": [1.0, 0.0, 1.0], "weights_U": [0.5, 0.0, 0.5]} if masked else {}
    reduce = CustomReducer(options_for(tmp_path, STANDARD, **{PATH: "mean_of_samples"}))
    settings = {"entropy_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2}
    batch = micro(ref_log_probs_U=[-1.5, -2.0, -2.5], **columns)
    found, expected = gradient(reduce, batch, **settings), gradient(None, batch, **settings)
    assert found[0] == pytest.approx(expected[0])
    assert found[1] == pytest.approx(expected[1])


def test_a_constant_divisor_by_hand(tmp_path):
    # Dr. GRPO (2503.20783): the sum over tokens by a constant, then the mean over two samples; -advantage a token.
    reduce = CustomReducer(options_for(tmp_path, CONSTANT, **{PATH: "constant"}))
    found, sums = gradient(reduce, micro())
    assert found == pytest.approx([-2 / 8 / 2, -2 / 8 / 2, 1 / 8 / 2])
    assert sums["pg_loss"] == sums["loss"] == pytest.approx((-2 - 2 + 1) / 8 / 2)


def test_an_idle_micro_batch_trains_nothing_and_does_not_reach_the_function(tmp_path):
    code = "def mean(total, response, masks, _):\n    return lambda x: x.sum() / sum(mask.sum() for mask in masks)\n"
    reduce = CustomReducer(options_for(tmp_path, code, **{PATH: "mean"}))
    found, sums = gradient(reduce, idle_micro_batch(micro()))
    assert found == [0.0, 0.0, 0.0]
    assert (sums["loss"], sums["pg_loss"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(*_):\n    return 1.0\n", "it returned a float"),
        ("def f(*_):\n    return lambda x: x\n", r"loss is shape \(3,\)"),
        ("def f(*_):\n    return lambda x: x.sum().detach()\n", "the loss is shape"),
    ],
)
def test_a_wrong_return_value_of_a_reducer_is_refused(tmp_path, code, message):
    reduce = CustomReducer(options_for(tmp_path, code, **{PATH: "f"}))
    with pytest.raises(PluginError, match=message):
        gradient(reduce, micro())
