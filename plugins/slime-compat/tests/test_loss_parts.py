"""The functions of the loss: ``custom_loss_function_path``, ``custom_tis_function_path`` and
``custom_pg_loss_reducer_function_path``, the last two through the objective that trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_compat.correction import CustomCorrection
from slime_compat.loss import CustomLoss
from slime_compat.paths import PathOptions
from slime_compat.reducer import CustomReducer
from slime_core.builtin.losses import Clipped
from slime_core.config.learning import AlgorithmConfig
from slime_core.errors import PluginError
from slime_core.learner.micro_batches import PackedMicroBatch, idle_micro_batch
from slime_core.learner.objective import Objective
from slime_core.provisional import LossParts
from tests.function_paths import options_for
from tests.micro_batches import micro

Trained = tuple[float, list[float], dict[str, float]]


def train(parts: LossParts, batch: PackedMicroBatch, **settings: Any) -> Trained:
    """Return the loss, its gradient by log-probability, and the metrics."""
    objective = Objective(Clipped(), AlgorithmConfig(**settings), parts=parts)
    log_probs_U = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss, sums = objective(log_probs_U, log_probs_U * 0.3, batch)
    (gradient,) = torch.autograd.grad(loss, log_probs_U)
    return loss.item(), gradient.tolist(), {name: value.item() for name, value in sums.sums.items()}


# --- Corrections ------------------------------------------------------------------------------------------------------

IMPORTANCE = """
import torch

def f(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **_):
    assert args.eps_clip == 0.2
    assert (total_lengths, response_lengths) == ([3, 2], [2, 1])
    weight = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp().clamp(max=2.0)
    return pg_loss * weight, loss_masks, {"tis": weight}
"""


RETURNS = "import torch\ndef f(*, pg_loss, loss_masks, **_): return {}"


def correct(folder: Path, code: str, batch: PackedMicroBatch) -> Trained:
    part = CustomCorrection(options_for(folder, code, custom_tis_function_path="f"))
    return train(LossParts(correct=part), batch)


def test_a_correction_weighs_the_loss_of_each_token(tmp_path: Path) -> None:
    # Ratios of trainer to engine: 1.5, 4 held to 2, and 0.5; losses -2, -2, 1 with weights 1/4, 1/4, 1/2.
    engine = [-1.0 - math.log(1.5), -2.0 - math.log(4.0), -3.0 - math.log(0.5)]
    loss, gradient, sums = correct(tmp_path, IMPORTANCE, micro(rollout_log_probs_U=engine))
    assert loss == pytest.approx(0.25 * -2 * 1.5 + 0.25 * -2 * 2 + 0.5 * 1 * 0.5)
    assert gradient == pytest.approx([-0.5 * 1.5, -0.5 * 2, 0.5 * 0.5])
    assert sums["tis"] == pytest.approx(0.25 * 1.5 + 0.25 * 2 + 0.5 * 0.5)
    assert sums["pg_loss"] == pytest.approx(loss)


def test_a_correction_need_not_multiply(tmp_path: Path) -> None:
    loss, gradient, _ = correct(tmp_path, RETURNS.format("(pg_loss ** 2, loss_masks, {})"), micro())
    assert loss == pytest.approx(0.25 * 4 + 0.25 * 4 + 0.5 * 1)
    assert gradient == pytest.approx([0.25 * 8, 0.25 * 8, 0.5 * 2])  # 2 x loss x -advantage


def test_tokens_that_a_correction_masks_train_nothing_and_divisors_stay(tmp_path: Path) -> None:
    code = "(pg_loss, [torch.zeros_like(loss_masks[0]), loss_masks[1]], {'rejected': [1 - m for m in loss_masks]})"
    loss, gradient, sums = correct(tmp_path, RETURNS.format(code), micro())
    assert (loss, gradient, sums["weight"]) == (pytest.approx(0.5), pytest.approx([0.0, 0.0, 0.5]), 1.0)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("pg_loss", "tensor"),
        ("(pg_loss, loss_masks)", "tensor"),
        ("(pg_loss[:2], loss_masks, {})", r"\(2,\)"),
        ("(pg_loss, loss_masks[:1], {})", r"\(2,\), \(1,\)\."),
        ("(pg_loss, [m + 1 for m in loss_masks], {})", "0 and 1"),
        ("(pg_loss, [m * 0 + 1 for m in loss_masks], {})", "loss masks train"),
        ("(pg_loss, loss_masks, {'tis': 1.0})", "metric 'tis'"),
        ("(pg_loss.detach(), loss_masks, {})", "gradient"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_wrong_return_value_of_a_correction_is_refused(tmp_path: Path, returned: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        correct(tmp_path, RETURNS.format(returned), micro(mask_U=[1.0, 0.0, 1.0]))


# --- Reducers ---------------------------------------------------------------------------------------------------------

STANDARD = """
def f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduce(x):
        parts = zip(x.split(response_lengths), loss_masks, strict=True)
        if calculate_per_token_loss:
            return sum((part * mask).sum() for part, mask in parts)
        return sum((part * mask).sum() / max(mask.sum(), 1) for part, mask in parts)
    return reduce
"""
CONSTANT = """
def f(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    assert (total_lengths, response_lengths) == ([3, 2], [2, 1])
    return lambda x: sum((part * mask).sum() for part, mask in zip(x.split(response_lengths), loss_masks)) / 8
"""


def reduce(folder: Path, code: str, batch: PackedMicroBatch, **settings: Any) -> Trained:
    part = CustomReducer(options_for(folder, code, custom_pg_loss_reducer_function_path="f"))
    return train(LossParts(reduce=part), batch, **settings)


@pytest.mark.parametrize("masked", [False, True])
def test_the_mean_of_samples_trains_what_the_core_trains(tmp_path: Path, masked: bool) -> None:
    columns = {"mask_U": [1.0, 0.0, 1.0], "weights_U": [0.5, 0.0, 0.5]} if masked else {}
    settings = {"entropy_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2}
    batch = micro(ref_log_probs_U=[-1.5, -2.0, -2.5], **columns)
    _, gradient, sums = reduce(tmp_path, STANDARD, batch, **settings)
    _, expected, of_core = train(LossParts(), batch, **settings)
    assert (gradient, sums) == (pytest.approx(expected), pytest.approx(of_core))


def test_a_constant_divisor_by_hand(tmp_path: Path) -> None:
    # Dr. GRPO (2503.20783): the sum over tokens by a constant, then the mean over two samples; -advantage a token.
    _, gradient, sums = reduce(tmp_path, CONSTANT, micro())
    assert gradient == pytest.approx([-2 / 8 / 2, -2 / 8 / 2, 1 / 8 / 2])
    assert sums["pg_loss"] == sums["loss"] == pytest.approx((-2 - 2 + 1) / 8 / 2)


@pytest.mark.parametrize(
    ("returned", "message"),
    [("1.0", "1.0"), ("lambda x: x", r"\(3,\)"), ("lambda x: x.sum().detach()", "without a gradient")],
)
def test_a_wrong_return_value_of_a_reducer_is_refused(tmp_path: Path, returned: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        reduce(tmp_path, f"def f(*_): return {returned}", micro())


# --- Losses -----------------------------------------------------------------------------------------------------------

PICKED = """
def f(args, batch, logits, sum_of_sample_mean):
    args.seen = batch
    rows = [0, 1, 3]
    values = logits[0, rows, 0]
    return sum_of_sample_mean(values), {"picked": sum_of_sample_mean(values.detach()), "count": len(rows)}
"""


@pytest.fixture
def without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its record of a packed row; tests/engines passes the real one."""
    monkeypatch.setattr(PackedMicroBatch, "packed_sequence", property(lambda micro: micro.cu_seqlens))


def options_of(folder: Path, code: str) -> PathOptions:
    return options_for(folder, code, custom_loss_function_path="f")


def lose(options: PathOptions, batch: PackedMicroBatch) -> Trained:
    """Return the loss, its gradient by the first logit of each row, and the metrics."""
    logits = torch.arange(10.0).reshape(1, 5, 2).requires_grad_()
    value, metrics = CustomLoss(options)(logits, batch)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.item(), gradient[0, :, 0].tolist(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.usefixtures("without_megatron")
def test_the_sum_of_sample_means_is_scaled_to_the_cores_weights(tmp_path: Path) -> None:
    # Rows 0, 1 and 3 hold 0, 2 and 6: means 1 and 6 over two samples, of which the step trains two.
    options = options_of(tmp_path, PICKED)
    value, gradient, metrics = lose(options, micro())
    assert value == pytest.approx((1 + 6) / 2)
    assert gradient == pytest.approx([0.25, 0.25, 0, 0.5, 0])  # the weights of the three tokens
    assert metrics == {"picked": pytest.approx(3.5), "count": pytest.approx(1.5)}
    masked = micro(mask_U=[1.0, 0.0, 1.0], weights_U=[0.5, 0.0, 0.5])
    assert lose(options, masked)[1] == pytest.approx([0.5, 0, 0, 0.5, 0])


@pytest.mark.usefixtures("without_megatron")
@pytest.mark.parametrize(
    ("columns", "returns"),
    [({}, [[2.0, 2.0], [-1.0]]), ({"returns_U": [5.0, 6.0, 7.0]}, [[5.0, 6.0], [7.0]])],
    ids=["without a critic", "with a critic"],
)
def test_the_batch_has_slimes_names(tmp_path: Path, columns: dict[str, Any], returns: list[list[float]]) -> None:
    options = options_of(tmp_path, PICKED)
    batch = micro(old_log_probs_U=[-1.5, -2.5, -3.5], **columns)
    batch.extra = {"source": ["a", "b"]}
    lose(options, batch)
    seen = options.arguments.seen
    assert [tokens.tolist() for tokens in seen["unconcat_tokens"]] == [[10, 11, 12], [20, 21]]
    assert (seen["total_lengths"], seen["response_lengths"], seen["source"]) == ([3, 2], [2, 1], ["a", "b"])
    assert [values.tolist() for values in seen["log_probs"]] == [[-1.5, -2.5], [-3.5]]
    assert [values.tolist() for values in seen["advantages"]] == [[2.0, 2.0], [-1.0]]
    assert [values.tolist() for values in seen["returns"]] == returns
    assert "ref_log_probs" not in seen


@pytest.mark.usefixtures("without_megatron")
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("logits.sum()", "tensor"),
        ("(1.0, {})", "float"),
        ("(logits.sum().detach(), {})", "without a gradient"),
        ("(logits.sum(), {'m': logits})", "metric 'm'"),
        ("None.x", "AttributeError"),
    ],
)
def test_a_wrong_return_value_of_a_loss_is_refused(tmp_path: Path, returned: str, message: str) -> None:
    code = f"def f(args, batch, logits, sum_of_sample_mean): return {returned}"
    with pytest.raises(PluginError, match=message):
        lose(options_of(tmp_path, code), micro())


# --- All --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_megatron")
def test_an_idle_micro_batch_trains_nothing_and_does_not_reach_the_functions(tmp_path: Path) -> None:
    idle, fails = idle_micro_batch(micro()), "raise AssertionError"
    assert correct(tmp_path, f"def f(*, pg_loss, **_): {fails}", idle)[:2] == (0.0, [0.0, 0.0, 0.0])
    assert reduce(tmp_path, f"def f(total, response, masks, _): {fails}", idle)[:2] == (0.0, [0.0, 0.0, 0.0])
    code = f"def f(args, batch, logits, sum_of_sample_mean): {fails}"
    assert lose(options_of(tmp_path, code), idle) == (0.0, [0.0] * 5, {})
