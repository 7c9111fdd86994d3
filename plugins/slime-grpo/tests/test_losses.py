"""gspo and cispo: by hand, against their definitions, and where the input is bad."""

from __future__ import annotations

import math

import pytest
import torch

from slime_core import LossSettings, LossTerms, RunView
from slime_grpo.losses import ClippedImportance, SequenceClipped
from slime_grpo.options import GrpoOptions

LOG_2 = math.log(2.0)


class Segments:
    """Which of ``count`` responses each token belongs to."""

    def __init__(self, samples_T: list[int]) -> None:
        self.samples_T = torch.tensor(samples_T)
        self.count = max(samples_T) + 1

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.count, dtype=values_T.dtype).index_add(0, self.samples_T, values_T)

    def spread(self, values_b: torch.Tensor) -> torch.Tensor:
        return values_b[self.samples_T]


GSPO, CISPO = SequenceClipped(GrpoOptions(), RunView()), ClippedImportance(GrpoOptions(), RunView())


def terms(log_probs, old, advantages, mask, samples=None, **settings) -> LossTerms:
    columns = [torch.tensor(column, dtype=torch.float64) for column in (log_probs, old, advantages, mask)]
    columns[0].requires_grad_()
    segments = None if samples is None else Segments(samples)
    return LossTerms(*columns, settings=LossSettings(**settings), segments=segments)


def gradient(given: LossTerms, loss_T: torch.Tensor) -> list[float]:
    return torch.autograd.grad(loss_T.sum(), given.log_probs_T)[0].tolist()


def test_gspo_by_hand():
    # Response 0: log-ratios ln 2 and 0, ratio sqrt 2. Response 1: log-ratio -ln 2, ratio 1/2, clipped at 0.6.
    given = terms([LOG_2, 0.0, -LOG_2], [0, 0, 0], [1, 1, -1], [1, 1, 1], [0, 0, 1], eps_clip=0.4, eps_clip_high=0.5)
    found = GSPO(given)
    assert found.loss_T.tolist() == pytest.approx([-math.sqrt(2), -math.sqrt(2), 0.6])
    assert found.metrics_T["ratio"].tolist() == pytest.approx([math.sqrt(2), math.sqrt(2), 0.5])
    assert found.metrics_T["clip_fraction"].tolist() == [0, 0, 1]
    # Each of the two tokens moves by the ratio of both. The clipped response does not move.
    assert gradient(given, found.loss_T) == pytest.approx([-math.sqrt(2), -math.sqrt(2), 0.0])


def test_gspo_of_advantages_that_differ_moves_each_token_by_its_own():
    # The response's ratio is sqrt 2. Below 0 nothing holds it; the third token, at 0, does not move, and the fourth is
    # in a response of ratio 2, clipped at 1.5 for its positive advantage only.
    columns = [LOG_2, 0.0, LOG_2 / 2, LOG_2, LOG_2], [0] * 5, [3, -1, 0, 1, -1], [1] * 5
    given = terms(*columns, [0, 0, 0, 1, 1], eps_clip=0.4, eps_clip_high=0.5)
    found = GSPO(given)
    root = math.sqrt(2)
    assert found.loss_T.tolist() == pytest.approx([-3 * root, root, 0.0, -1.5, 2.0])
    assert gradient(given, found.loss_T) == pytest.approx([-3 * root, root, 0.0, 0.0, 2.0])


def test_gspo_of_equal_advantages_has_the_gradient_of_the_ratio_of_whole_responses():
    from slime_core.ops.losses import clipped_surrogate

    generator = torch.Generator().manual_seed(0)
    now, old = (torch.randn(2, 12, generator=generator, dtype=torch.float64) * 0.1).tolist()
    samples, mask = [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3], [1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    advantages = [[1.5, -2.0, 0.7, -0.3][sample] for sample in samples]
    given = terms(now, old, advantages, mask, samples, eps_clip=0.02, eps_clip_high=0.03)
    found = GSPO(given)
    whole = terms(now, old, advantages, mask, samples, eps_clip=0.02, eps_clip_high=0.03)
    trained_T = whole.mask_T
    tokens_b = whole.segments.sums(trained_T)
    log_ratio_b = whole.segments.sums((whole.log_probs_T - whole.old_log_probs_T) * trained_T) / tokens_b
    loss_T = clipped_surrogate(
        whole.segments.spread(log_ratio_b), advantages_T=whole.advantages_T, eps_clip=0.02, eps_clip_high=0.03
    ).loss_T
    assert found.loss_T.tolist() == pytest.approx((loss_T * trained_T).tolist())
    gradient_T = gradient(given, found.loss_T)
    assert gradient_T == pytest.approx(gradient(whole, loss_T * trained_T))
    assert 2 < gradient_T.count(0.0) < 12  # two tokens are masked; some responses are clipped, some not


def test_gspo_averages_over_trained_tokens_only():
    given = terms([LOG_2, 55.0, LOG_2], [0, 0, 0], [1, 1, 1], [1, 0, 1], [0, 0, 0], eps_clip_high=9.0)
    found = GSPO(given)
    assert found.loss_T.tolist() == pytest.approx([-2.0, 0.0, -2.0])
    assert gradient(given, found.loss_T)[1] == 0.0


def test_gspo_equals_the_clipped_surrogate_where_every_response_is_one_token():
    from slime_core.builtin.losses import Clipped

    columns = ([-0.3, -1.0, -2.0], [-0.5, -1.0, -1.2], [1.0, -2.0, 0.5], [1, 1, 1])
    assert torch.equal(GSPO(terms(*columns, [0, 1, 2])).loss_T, Clipped(None, RunView())(terms(*columns)).loss_T)


@pytest.mark.parametrize("loss", [GSPO, CISPO])
def test_the_order_of_tokens_changes_nothing(loss):
    columns = [[-0.3, -1.0, -2.0, -0.1], [-0.5, -1.1, -1.2, -0.4], [1.0, -2.0, 1.0, -2.0], [1, 1, 1, 1], [0, 1, 0, 1]]
    order = [3, 0, 2, 1]
    moved = [[column[place] for place in order] for column in columns]
    assert loss(terms(*moved)).loss_T.tolist() == pytest.approx(loss(terms(*columns)).loss_T[order].tolist(), abs=1e-12)


def test_cispo_by_hand():
    # Ratios 2, 1 and 1/2, held to [0.8, 1.3]; a clipped weight still has a gradient, weight x -advantage.
    given = terms([-1.0, -2.0, -3.0], [-1 - LOG_2, -2, -3 + LOG_2], [1, 2, -1], [1, 1, 1], eps_clip_high=0.3)
    found = CISPO(given)
    assert found.loss_T.tolist() == pytest.approx([1.3 * 1.0, 1.0 * 2 * 2, -0.8 * 3])
    assert gradient(given, found.loss_T) == pytest.approx([-1.3, -2.0, 0.8])
    assert found.metrics_T["clip_fraction"].tolist() == [1, 0, 1]
    assert found.metrics_T["ratio"].tolist() == pytest.approx([2.0, 1.0, 0.5])


def test_cispo_with_equal_policies_is_the_plain_policy_gradient():
    given = terms([-1.0, -2.0], [-1.0, -2.0], [3.0, -1.0], [1, 1])
    assert gradient(given, CISPO(given).loss_T) == [-3.0, 1.0]


@pytest.mark.parametrize("loss", [GSPO, CISPO])
def test_a_masked_token_gives_exactly_zero_and_no_gradient_even_where_it_is_infinite(loss):
    given = terms([-1.0, -math.inf, 300.0], [-1.0, 0.0, 0.0], [1.0, 1.0, math.nan], [1, 0, 0], [0, 0, 1])
    found = loss(given)
    assert found.loss_T[1:].tolist() == [0.0, 0.0]
    assert gradient(given, found.loss_T) == [-1.0, 0.0, 0.0]
    assert not any(column_T.requires_grad for column_T in found.metrics_T.values())
    assert all(column_T.isfinite().all() for column_T in found.metrics_T.values())


@pytest.mark.parametrize("loss", [GSPO, CISPO])
def test_a_clip_range_that_cannot_be_is_refused(loss):
    with pytest.raises(ValueError, match=r"eps_clip is 1\.5"):
        loss(terms([0.0], [0.0], [1.0], [1], [0], eps_clip=1.5))


@pytest.mark.parametrize("loss", [GSPO, CISPO])
def test_a_ratio_that_would_overflow_leaves_loss_gradient_and_metrics_finite(loss):
    given = terms([-0.1, -1.0], [-95.0, -1.0], [0.0, 1.0], [1, 1], [0, 1])
    found = loss(given)
    assert found.loss_T.tolist() == [0.0, -1.0 if isinstance(loss, SequenceClipped) else 1.0]
    assert gradient(given, found.loss_T) == [0.0, -1.0]
    assert found.metrics_T["ratio"].tolist() == pytest.approx([math.exp(20.0), 1.0])


def test_gspo_without_responses_is_refused():
    with pytest.raises(ValueError, match="gspo"):
        GSPO(terms([0.0], [0.0], [1.0], [1]))
