"""The forward and backward pass around a loss of a plugin."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

import torch

from slime_core.builtin.losses import Clipped
from slime_core.config.learning import AlgorithmConfig
from slime_core.contracts import LossParts
from slime_core.errors import RunError
from slime_core.learner import trained_model
from slime_core.learner.objective import MetricSums, Objective, reduce_metrics
from tests.micro_batches import micro


def test_a_loss_that_changes_the_logits_in_place_does_not_change_what_is_measured(monkeypatch):
    def first_of_each_row(logits, micro, **_):
        return logits[0, micro.rows_U, 0], logits[0, micro.rows_U, 0]

    def halved(logits, batch):
        return logits.mul_(0.5).sum(), {}

    logits = torch.full((1, 5, 2), 4.0, requires_grad=True) * 1
    parts = []
    monkeypatch.setattr(trained_model, "response_log_probs", first_of_each_row)
    monkeypatch.setattr(
        trained_model, "_schedule", lambda model, micros, loss, **_: parts.append(loss(micros[0], logits))
    )
    monkeypatch.setattr(trained_model, "_reduce", lambda *_, **__: {trained_model.GRADIENT: 1.0})
    objective = Objective(Clipped(), AlgorithmConfig(), parts=LossParts(of_logits=halved))
    trained_model.forward_backward_policy([torch.nn.Linear(1, 1)], [micro()], objective)
    loss, _, found = parts[0]
    assert loss.item() == 20.0
    assert found.sums["entropy_loss"].item() == 4.0


def test_a_loss_factor_multiplies_what_is_minimised_and_no_average(monkeypatch):
    batch = micro(old_log_probs_U=[-1.0, -1.0, -1.0])
    batch.loss_factor = 0.25
    log_probs_U = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    monkeypatch.setattr(trained_model, "response_log_probs", lambda *_, **__: (log_probs_U, torch.ones(3)))
    parts = []
    monkeypatch.setattr(
        trained_model, "_schedule", lambda model, micros, loss, **_: parts.append(loss(micros[0], None))
    )
    monkeypatch.setattr(trained_model, "_reduce", lambda *_, **__: {trained_model.GRADIENT: 1.0})
    trained_model.forward_backward_policy([torch.nn.Linear(1, 1)], [batch], Objective(Clipped(), AlgorithmConfig()))
    value, _, found = parts[0]
    value.backward()
    # -A w for each token: 2 x 0.25 twice, and -1 x 0.5.
    assert value.item() == pytest.approx(0.25 * -0.5)
    assert log_probs_U.grad.tolist() == pytest.approx([0.25 * -0.5, 0.25 * -0.5, 0.25 * 0.5])
    assert (found.sums["loss"].item(), found.sums["pg_loss"].item()) == pytest.approx((-0.125, -0.125))
    assert (found.sums["entropy_loss"].item(), found.sums["weight"].item()) == (1.0, 1.0)


@pytest.mark.parametrize(("constant", "refused"), [((True, True), True), ((True, False), False)])
def test_a_step_is_refused_where_no_micro_batch_has_a_loss_with_a_gradient(monkeypatch, constant, refused):
    """Megatron would leave its backward pass out without a word, and the optimizer would step along nothing."""

    def schedule(model, micros, loss, **_):
        return [loss(one, None)[2] for one in micros]

    def measure(batch, _):
        loss = torch.zeros((), requires_grad=not is_constant.pop(0))
        return loss, MetricSums({"weight": torch.ones(())})

    is_constant = list(constant)
    monkeypatch.setattr(trained_model, "_schedule", schedule)
    monkeypatch.setattr(
        trained_model, "_reduce", lambda parts, **_: reduce_metrics(parts, SimpleNamespace(size=lambda: 1))
    )
    model = [torch.nn.Linear(1, 1)]
    if not refused:
        assert trained_model.forward_backward(model, [micro(), micro()], measure) == {"weight": 2.0}
        return
    with pytest.raises(RunError, match=r"--custom-loss-function-path .*-train-params-name-list .*--freeze-params-"):
        trained_model.forward_backward(model, [micro(), micro()], measure)


@pytest.mark.parametrize(
    ("rows", "shares_tokens", "computed"), [([3, 1, 3], False, 2), ([3, 1, 3], True, 6), ([], False, 6)]
)
def test_the_output_layer_computes_each_row_that_predicts_once(rows, shares_tokens, computed):
    layer, hidden = torch.nn.Linear(4, 8), torch.randn(6, 1, 4)
    module = SimpleNamespace(output_layer=layer, config=SimpleNamespace(sequence_parallel=shares_tokens))
    batch = replace(
        micro(), tokens_1T=torch.zeros(1, 6, dtype=torch.int64), rows_U=torch.tensor(rows, dtype=torch.int64)
    )
    with trained_model._predicting_rows(module, batch) as seen:
        found = layer(hidden)
    assert len(found) == computed
    assert torch.allclose(found[seen.rows_U], layer(hidden)[batch.rows_U])
    assert len(layer(hidden)) == 6
