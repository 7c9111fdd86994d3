"""``custom_loss_function_path``: what the function is handed, and what becomes of what it returns."""

from __future__ import annotations

import pytest
import torch

from slime_compat.loss import CustomLoss
from slime_core.errors import PluginError
from slime_core.learner.micro_batches import MicroBatch, idle_micro_batch
from tests.function_paths import options_for
from tests.micro_batches import micro

PATH = "custom_loss_function_path"

PICKED = """
def picked(args, batch, logits, sum_of_sample_mean):
    rows = [0, 1, 3]
    values = logits[0, rows, 0]
    return sum_of_sample_mean(values), {"picked": sum_of_sample_mean(values.detach()), "count": len(rows)}
"""


@pytest.fixture(autouse=True)
def without_megatron(monkeypatch):
    """Its record of a packed row; tests/engines hands the real one over."""
    monkeypatch.setattr(MicroBatch, "packed_sequence", property(lambda micro: micro.cu_seqlens))


def gradient(options, batch):
    logits = torch.arange(10.0).reshape(1, 5, 2).requires_grad_()
    value, metrics = CustomLoss(options)(logits, batch)
    (found,) = torch.autograd.grad(value, logits)
    return value.item(), found[0, :, 0].tolist(), {name: value.item() for name, value in metrics.items()}


def test_the_sum_of_sample_means_is_scaled_to_the_cores_weights(tmp_path):
    # Rows 0, 1 and 3 hold 0, 2 and 6: means 1 and 6 over two samples, of which the step trains two.
    value, found, metrics = gradient(options_for(tmp_path, PICKED, **{PATH: "picked"}), micro())
    assert value == pytest.approx((1 + 6) / 2)
    assert found == pytest.approx([0.25, 0.25, 0, 0.5, 0])  # the weights of the three tokens
    assert metrics == {"picked": pytest.approx(3.5), "count": pytest.approx(1.5)}


def test_masked_tokens_are_left_out(tmp_path):
    batch = micro(mask_U=[1.0, 0.0, 1.0], weights_U=[0.5, 0.0, 0.5])
    assert gradient(options_for(tmp_path, PICKED, **{PATH: "picked"}), batch)[1] == pytest.approx([0.5, 0, 0, 0.5, 0])


def test_an_idle_micro_batch_trains_nothing_and_does_not_reach_the_function(tmp_path):
    code = """
def f(args, batch, logits, sum_of_sample_mean):
    return logits.sum() / sum(mask.sum() for mask in batch["loss_masks"]), {}
"""
    value, found, metrics = gradient(options_for(tmp_path, code, **{PATH: "f"}), idle_micro_batch(micro()))
    assert (value, found, metrics) == (0.0, [0.0] * 5, {})


def test_the_batch_has_slimes_names(tmp_path):
    code = """
def f(args, batch, logits, sum_of_sample_mean):
    args.seen = batch
    return logits.sum(), {}
"""
    options = options_for(tmp_path, code, **{PATH: "f"})
    batch = micro(old_log_probs_U=[-1.5, -2.5, -3.5])
    batch.extra = {"source": ["a", "b"]}
    gradient(options, batch)
    seen = options.arguments.seen
    assert [tokens.tolist() for tokens in seen["unconcat_tokens"]] == [[10, 11, 12], [20, 21]]
    assert (seen["total_lengths"], seen["response_lengths"]) == ([3, 2], [2, 1])
    assert [values.tolist() for values in seen["log_probs"]] == [[-1.5, -2.5], [-3.5]]
    assert [values.tolist() for values in seen["advantages"]] == [[2.0, 2.0], [-1.0]]
    assert seen["source"] == ["a", "b"]
    assert "ref_log_probs" not in seen


def test_returns_are_those_of_the_critic_where_there_is_one(tmp_path):
    code = """
def f(args, batch, logits, sum_of_sample_mean):
    args.seen = batch["returns"]
    return logits.sum(), {}
"""
    for columns, expected in (({}, [[2.0, 2.0], [-1.0]]), ({"returns_U": [5.0, 6.0, 7.0]}, [[5.0, 6.0], [7.0]])):
        options = options_for(tmp_path, code, **{PATH: "f"})
        gradient(options, micro(**columns))
        assert [values.tolist() for values in options.arguments.seen] == expected


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("logits.sum()", "it returned a Tensor"),
        ("(1.0, {})", "the loss is float"),
        ("(logits.sum().detach(), {})", "the loss is shape"),
        ("(logits.sum(), {'m': logits})", "reading metric 'm'"),
        ("None.x", "AttributeError"),
    ],
)
def test_a_wrong_return_value_of_a_loss_is_refused(tmp_path, returned, message):
    code = f"def f(args, batch, logits, sum_of_sample_mean):\n    return {returned}\n"
    with pytest.raises(PluginError, match=message):
        gradient(options_for(tmp_path, code, **{PATH: "f"}), micro())
