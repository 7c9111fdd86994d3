"""gspo and cispo: by hand, against their definitions, and with bad input."""

from __future__ import annotations

import math

import pytest
import torch

from slime_core import LossSettings, LossTerms
from slime_core.builtin.losses import Clipped
from slime_core.ops.losses import clipped_surrogate
from slime_grpo.losses import cispo, gspo
from slime_testing.packed import SequenceSums

LOG_2, ROOT_2 = math.log(2.0), math.sqrt(2.0)
each = pytest.mark.parametrize("loss", [gspo, cispo])


def terms(log_probs, old, advantages, mask, lengths=None, **settings) -> LossTerms:
    """``lengths``: the number of tokens of each response."""
    columns = [torch.tensor(column, dtype=torch.float64) for column in (log_probs, old, advantages, mask)]
    columns[0].requires_grad_()
    segments = None if lengths is None else SequenceSums(lengths)
    return LossTerms(*columns, settings=LossSettings(**settings), segments=segments)


def gradient(batch: LossTerms, loss_T: torch.Tensor) -> list[float]:
    return torch.autograd.grad(loss_T.sum(), batch.log_probs_T)[0].tolist()


def test_gspo_by_hand() -> None:
    # Response 0: log-ratios ln 2 and 0, ratio sqrt 2. Response 1: log-ratio -ln 2, ratio 1/2, clipped at 0.6.
    batch = terms([LOG_2, 0.0, -LOG_2], [0, 0, 0], [1, 1, -1], [1, 1, 1], [2, 1], eps_clip=0.4, eps_clip_high=0.5)
    output = gspo(batch)
    assert output.loss_T.tolist() == pytest.approx([-ROOT_2, -ROOT_2, 0.6])
    assert output.metrics_T["ratio"].tolist() == pytest.approx([ROOT_2, ROOT_2, 0.5])
    assert output.metrics_T["clip_fraction"].tolist() == [0, 0, 1]
    # Each of the two tokens moves by the ratio of both. The clipped response does not move.
    assert gradient(batch, output.loss_T) == pytest.approx([-ROOT_2, -ROOT_2, 0.0])


def test_gspo_of_advantages_that_differ_moves_each_token_by_its_own() -> None:
    # The response's ratio is sqrt 2. No bound holds below 0; the third token, at 0, does not move, and the fourth is
    # in a response of ratio 2, clipped at 1.5 for its positive advantage only.
    columns = [LOG_2, 0.0, LOG_2 / 2, LOG_2, LOG_2], [0] * 5, [3, -1, 0, 1, -1], [1] * 5
    batch = terms(*columns, [3, 2], eps_clip=0.4, eps_clip_high=0.5)
    output = gspo(batch)
    assert output.loss_T.tolist() == pytest.approx([-3 * ROOT_2, ROOT_2, 0.0, -1.5, 2.0])
    assert gradient(batch, output.loss_T) == pytest.approx([-3 * ROOT_2, ROOT_2, 0.0, 0.0, 2.0])


def test_gspo_of_equal_advantages_has_the_gradient_of_the_ratio_of_whole_responses() -> None:
    generator = torch.Generator().manual_seed(0)
    now, old = (torch.randn(2, 12, generator=generator, dtype=torch.float64) * 0.1).tolist()
    lengths, mask = [3, 5, 2, 2], [1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    advantages = [1.5] * 3 + [-2.0] * 5 + [0.7] * 2 + [-0.3] * 2
    ours, plain = (terms(now, old, advantages, mask, lengths, eps_clip=0.02, eps_clip_high=0.03) for _ in range(2))
    tokens_b = plain.segments.sums(plain.mask_T)
    log_ratio_b = plain.segments.sums((plain.log_probs_T - plain.old_log_probs_T) * plain.mask_T) / tokens_b
    log_ratio_T = plain.segments.spread(log_ratio_b)
    surrogate = clipped_surrogate(log_ratio_T, advantages_T=plain.advantages_T, eps_clip=0.02, eps_clip_high=0.03)
    expected_T, loss_T = surrogate.loss_T * plain.mask_T, gspo(ours).loss_T
    assert loss_T.tolist() == pytest.approx(expected_T.tolist())
    gradient_T = gradient(ours, loss_T)
    assert gradient_T == pytest.approx(gradient(plain, expected_T))
    assert 2 < gradient_T.count(0.0) < 12  # two tokens are masked; some responses are clipped, some not


def test_gspo_averages_over_trained_tokens_only() -> None:
    batch = terms([LOG_2, 55.0, LOG_2], [0, 0, 0], [1, 1, 1], [1, 0, 1], [3], eps_clip_high=9.0)
    loss_T = gspo(batch).loss_T
    assert loss_T.tolist() == pytest.approx([-2.0, 0.0, -2.0])
    assert gradient(batch, loss_T)[1] == 0.0


def test_gspo_equals_the_clipped_surrogate_if_every_response_is_one_token() -> None:
    columns = ([-0.3, -1.0, -2.0], [-0.5, -1.0, -1.2], [1.0, -2.0, 0.5], [1, 1, 1])
    assert torch.equal(gspo(terms(*columns, [1, 1, 1])).loss_T, Clipped()(terms(*columns)).loss_T)


def test_cispo_by_hand() -> None:
    # Ratios 2, 1 and 1/2, held to [0.8, 1.3]; a clipped weight still has a gradient, weight x -advantage.
    batch = terms([-1.0, -2.0, -3.0], [-1 - LOG_2, -2, -3 + LOG_2], [1, 2, -1], [1, 1, 1], eps_clip_high=0.3)
    output = cispo(batch)
    assert output.loss_T.tolist() == pytest.approx([1.3 * 1.0, 1.0 * 2 * 2, -0.8 * 3])
    assert gradient(batch, output.loss_T) == pytest.approx([-1.3, -2.0, 0.8])
    assert output.metrics_T["clip_fraction"].tolist() == [1, 0, 1]
    assert output.metrics_T["ratio"].tolist() == pytest.approx([2.0, 1.0, 0.5])


@each
def test_a_masked_token_gives_exactly_zero_and_no_gradient_even_if_it_is_infinite(loss) -> None:
    batch = terms([-1.0, -math.inf, 300.0], [-1.0, 0.0, 0.0], [1.0, 1.0, math.nan], [1, 0, 0], [2, 1])
    output = loss(batch)
    assert output.loss_T[1:].tolist() == [0.0, 0.0]
    assert gradient(batch, output.loss_T) == [-1.0, 0.0, 0.0]
    assert not any(column_T.requires_grad for column_T in output.metrics_T.values())
    assert all(column_T.isfinite().all() for column_T in output.metrics_T.values())


@each
def test_a_ratio_that_would_overflow_leaves_loss_gradient_and_metrics_finite(loss) -> None:
    batch = terms([-0.1, -1.0], [-95.0, -1.0], [0.0, 1.0], [1, 1], [1, 1])
    output = loss(batch)
    assert output.loss_T.tolist() == [0.0, -1.0 if loss is gspo else 1.0]
    assert gradient(batch, output.loss_T) == [0.0, -1.0]
    assert output.metrics_T["ratio"].tolist() == pytest.approx([math.exp(20.0), 1.0])


@each
def test_a_clip_range_that_cannot_be_is_refused(loss) -> None:
    with pytest.raises(ValueError, match=r"1\.5"):
        loss(terms([0.0], [0.0], [1.0], [1], [1], eps_clip=1.5))


def test_gspo_without_responses_is_refused() -> None:
    with pytest.raises(ValueError, match="segments"):
        gspo(terms([0.0], [0.0], [1.0], [1]))
