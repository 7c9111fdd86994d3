"""``mis``, ``veto`` and ``opsm``: by hand, over ranks, and what their weights are for."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from slime_core import CorrectionOutput, CorrectionTerms
from slime_offpolicy.options import OffPolicyOptions
from slime_offpolicy.sequences import mis, opsm, veto
from slime_testing.packed import SequenceSums

Correct = Callable[[CorrectionTerms], CorrectionOutput]


def make(correction, **options) -> Correct:
    return partial(correction, options=OffPolicyOptions(**options))


OF_RESPONSES = [
    make(mis, mis_level="sequence", mis_mode="mask"),
    make(mis, mis_level="geometric", mis_mode="clip"),
    make(veto, veto_threshold=0.6),
    make(opsm, opsm_delta=0.1),
]
ALL = [*OF_RESPONSES, make(mis, mis_level="token", mis_mode="clip")]


def terms(*responses, mask=None) -> CorrectionTerms:
    """Responses of tokens with these ratios of trainer to engine."""
    ratios = [ratio for response in responses for ratio in response]
    engine_T = torch.linspace(-3, -1, len(ratios))
    return CorrectionTerms(
        log_probs_T=engine_T + torch.tensor(ratios).log(),
        rollout_log_probs_T=engine_T,
        mask_T=torch.ones(len(ratios)) if mask is None else torch.tensor(mask),
        segments=SequenceSums(len(response) for response in responses),
    )


# --- Masked importance sampling ---------------------------------------------------------------------------------------

# Products 3 and 0.25; geometric means 3 ** (1 / 2) and 0.25 ** (1 / 3).
RESPONSES = ((1.5, 2.0), (0.5, 1.0, 0.5))
GEOMETRIC = (3**0.5, 0.25 ** (1 / 3))


@pytest.mark.parametrize(
    ("level", "mode", "expected"),
    [
        ("token", "truncate", [1.5, 1.6, 0.5, 1, 0.5]),
        ("token", "clip", [1.5, 1.6, 0.6, 1, 0.6]),
        ("token", "mask", [1.5, 0, 0, 1, 0]),
        ("sequence", "truncate", [1.6] * 2 + [0.25] * 3),
        ("sequence", "clip", [1.6] * 2 + [0.6] * 3),
        ("sequence", "mask", [0] * 5),
        ("geometric", "truncate", [1.6] * 2 + [GEOMETRIC[1]] * 3),
        ("geometric", "clip", [1.6] * 2 + [GEOMETRIC[1]] * 3),
        ("geometric", "mask", [0] * 2 + [GEOMETRIC[1]] * 3),
    ],
)
def test_every_level_and_mode_by_hand(level, mode, expected) -> None:
    output = make(mis, mis_level=level, mis_mode=mode, mis_clip=1.6, mis_clip_low=0.6)(terms(*RESPONSES))
    assert output.weights_T.tolist() == pytest.approx(expected)
    assert output.mask_T.tolist() == [1] * 5
    raw = {"token": [1.5, 2, 0.5, 1, 0.5], "sequence": [3] * 2 + [0.25] * 3, "geometric": [GEOMETRIC[0]] * 2}[level]
    assert output.metrics_T["mis"].tolist()[: len(raw)] == pytest.approx(raw)
    clipped = [float(abs(a - b) > 1e-6) for a, b in zip(output.metrics_T["mis"].tolist(), expected, strict=True)]
    assert output.metrics_T["mis_clipfrac"].tolist() == clipped


def test_only_trained_tokens_form_the_ratio_of_a_response() -> None:
    batch = terms((1.5, 100.0, 1.2), mask=[1.0, 0.0, 1.0])
    product, mean = (make(mis, mis_level=level, mis_clip=10.0)(batch) for level in ("sequence", "geometric"))
    assert product.weights_T.tolist() == pytest.approx([1.8] * 3)
    assert mean.weights_T.tolist() == pytest.approx([1.8**0.5] * 3)


def test_a_product_beyond_float_stays_finite() -> None:
    output = make(mis, mis_level="sequence", mis_clip=3.0)(terms((math.exp(15.0),) * 8))
    assert output.weights_T.tolist() == [3.0] * 8
    assert output.metrics_T["mis"].tolist() == pytest.approx([math.exp(20.0)] * 8)


# --- Veto -------------------------------------------------------------------------------------------------------------


def test_one_impossible_token_masks_its_response() -> None:
    output = make(veto, veto_threshold=0.01)(terms((1.0, 1.0), (1.0, 0.009, 1.0), (0.011, 1.0)))
    assert output.mask_T.tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert output.weights_T.tolist() == [1] * 7
    assert output.metrics_T["veto_fraction"].tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert output.metrics_T["veto_tokens"].tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_a_masked_token_vetoes_nothing_and_stays_masked() -> None:
    output = make(veto)(terms((1.0, 1e-6), (1.0, 1.0), mask=[1.0, 0.0, 1.0, 0.0]))
    assert output.mask_T.tolist() == [1, 0, 1, 0]


# --- Off-policy sequence masking --------------------------------------------------------------------------------------


def moved(old_minus_current, advantages, lengths, *, mask=None) -> CorrectionTerms:
    old_T = torch.linspace(-3, -1, len(advantages))
    return CorrectionTerms(
        log_probs_T=old_T,
        rollout_log_probs_T=old_T - 5.0,  # not read
        mask_T=torch.ones(len(advantages)) if mask is None else torch.tensor(mask),
        segments=SequenceSums(lengths),
        current_log_probs_T=old_T - torch.tensor(old_minus_current),
        advantages_T=torch.tensor(advantages),
    )


@pytest.mark.parametrize(
    ("old_minus_current", "advantages", "lengths", "weights", "means"),
    [
        # DeepSeek-V3.2 (2512.02556), section 3.1, with delta 0.1.
        (
            [0.1, 0.3, 0.1, 0.3, 0.1, 0.0, -0.3],
            [-1.0, -1, 1, 1, -1, -1, -1],
            [2, 2, 2, 1],
            [0, 0, 1, 1, 1, 1, 1],
            [0.2, 0.2, 0.2, 0.2, 0.05, 0.05, -0.3],
        ),
        ([0.2, 0.2], [-1.0, 1.0], [2], [0, 1], [0.2, 0.2]),  # only tokens of negative advantage
    ],
)
def test_a_response_of_negative_advantage_that_was_left_too_far_weighs_zero(
    old_minus_current, advantages, lengths, weights, means
) -> None:
    output = make(opsm, opsm_delta=0.1)(moved(old_minus_current, advantages, lengths))
    assert output.weights_T.tolist() == weights
    assert output.mask_T.tolist() == [1] * len(weights)
    assert output.metrics_T["opsm_clipfrac"].tolist() == [1 - weight for weight in weights]
    assert output.metrics_T["opsm_kl"].tolist() == pytest.approx(means, abs=1e-6)


def test_masked_tokens_take_no_part_in_the_mean() -> None:
    output = make(opsm, opsm_delta=0.15)(moved([0.2, 9.0, 0.0], [-1.0, -1, -1], [3], mask=[1.0, 0.0, 1.0]))
    assert output.weights_T.tolist() == [1, 1, 1]
    assert output.metrics_T["opsm_kl"].tolist() == pytest.approx([0.1] * 3)


def test_a_missing_or_short_column_is_refused() -> None:
    with pytest.raises(ValueError, match="current_log_probs_T and advantages_T"):
        make(opsm)(terms((1.0,)))
    with pytest.raises(ValueError, match=r"\(1,\) and \(2,\)"):
        make(opsm)(replace(moved([0.2], [-1.0], [1]), advantages_T=torch.zeros(2)))
    for correction in OF_RESPONSES:
        with pytest.raises(ValueError, match="segments is None"):
            correction(replace(anything(), segments=None))


# --- What holds for all of them ---------------------------------------------------------------------------------------


def anything() -> CorrectionTerms:
    """Three responses of 4, 2 and 6 tokens, some of them masked."""
    generator = torch.Generator().manual_seed(5)
    columns = torch.rand(4, 12, generator=generator)
    engine_T = columns[0] - 3
    return CorrectionTerms(
        log_probs_T=engine_T + columns[1] - 0.6,
        rollout_log_probs_T=engine_T,
        mask_T=torch.tensor([1.0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1]),
        segments=SequenceSums((4, 2, 6)),
        current_log_probs_T=engine_T + columns[2] - 0.6,
        advantages_T=columns[3] - 0.9,
    )


READ = ("log_probs_T", "rollout_log_probs_T", "mask_T", "current_log_probs_T", "advantages_T")


def taken(batch: CorrectionTerms, index: torch.Tensor, segments) -> CorrectionTerms:
    return replace(batch, segments=segments, **{name: getattr(batch, name)[index] for name in READ})


@pytest.mark.parametrize("correction", ALL)
def test_the_order_of_responses_and_of_their_tokens_does_not_count(correction: Correct) -> None:
    batch = anything()
    output = correction(batch)
    order = torch.tensor([11, 10, 9, 8, 7, 6, 1, 0, 3, 2, 5, 4])
    permuted = correction(taken(batch, order, SequenceSums((6, 4, 2))))
    assert permuted.weights_T.tolist() == pytest.approx(output.weights_T[order].tolist())
    assert torch.equal(permuted.mask_T, output.mask_T[order])


class SharedSums:
    """Sums over responses whose tokens two threads hold, as context-parallel ranks do."""

    def __init__(self, samples_T: torch.Tensor, barrier: threading.Barrier, summands: dict[object, Any]) -> None:
        self.samples_T, self.barrier, self.summands, self.calls = samples_T, barrier, summands, 0

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.summands[self] = values_T.new_zeros(3).index_add(0, self.samples_T, values_T)
        self.barrier.wait()
        total = torch.stack([*self.summands.values()]).sum(0)
        self.barrier.wait()
        return total

    def spread(self, values_b: torch.Tensor) -> torch.Tensor:
        return values_b.index_select(0, self.samples_T)


@pytest.mark.parametrize("cut", [[0, 3, 4, 6, 7, 11], []], ids=["interleaved", "one rank holds nothing"])
@pytest.mark.parametrize("correction", ALL)
def test_ranks_that_share_responses_find_what_one_rank_finds(correction: Correct, cut: list[int]) -> None:
    batch, samples_T = anything(), torch.tensor([0] * 4 + [1] * 2 + [2] * 6)
    barrier, summands = threading.Barrier(2, timeout=120), {}
    together = correction(batch)
    indices = [torch.tensor(cut, dtype=torch.int64), torch.tensor([i for i in range(12) if i not in cut])]
    sums = [SharedSums(samples_T[index], barrier, summands) for index in indices]
    with ThreadPoolExecutor(2) as threads:
        shards = [taken(batch, index, shared) for index, shared in zip(indices, sums, strict=True)]
        outputs = list(threads.map(correction, shards))
    assert sums[0].calls == sums[1].calls
    for output, index in zip(outputs, indices, strict=True):
        assert output.weights_T.tolist() == pytest.approx(together.weights_T[index].tolist())
        assert torch.equal(output.mask_T, together.mask_T[index])


# --- What the weights are for: every response of two tokens, so that means over the engine's responses are exact ------


def policy_gradient(**options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean gradient of the weighed loss over the engine's samples, and the gradient of the mean reward."""
    generator = torch.Generator().manual_seed(3)
    first_V, second_VV = torch.randn(3, generator=generator), torch.randn(3, 3, generator=generator)
    logits = torch.cat([first_V[None], second_VV]).double().requires_grad_()
    engine = (logits.detach() + 0.7 * torch.randn(4, 3, generator=generator).double()).log_softmax(1)
    rewards_B = torch.rand(3, 3, generator=generator).double().flatten()

    def of_responses(rows: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the two tokens of each of the nine responses, [9, 2]."""
        return torch.stack([rows[0].repeat_interleave(3), rows[1:].flatten()], dim=1)

    log_probs, engine_log_probs = of_responses(logits.log_softmax(1)), of_responses(engine)
    batch = CorrectionTerms(
        log_probs_T=log_probs.detach().float().flatten(),
        rollout_log_probs_T=engine_log_probs.float().flatten(),
        mask_T=torch.ones(18),
        segments=SequenceSums([2] * 9),
    )
    weights_T = make(mis, **options)(batch).weights_T
    weighed = (weights_T.view(9, 2) * log_probs).sum(1) * rewards_B * engine_log_probs.sum(1).exp()
    (gradient,) = torch.autograd.grad(weighed.sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((log_probs.sum(1).exp() * rewards_B).sum(), logits)
    return gradient, expected


def test_weights_of_responses_make_the_engines_responses_count_as_the_trainers() -> None:
    gradient, expected = policy_gradient(mis_level="sequence", mis_clip=1e6)
    assert gradient.flatten().tolist() == pytest.approx(expected.flatten().tolist(), abs=1e-6)


def test_weights_of_tokens_come_nearer_and_stay_biased() -> None:
    plain, expected = policy_gradient(mis_level="token", mis_mode="clip", mis_clip=1.0, mis_clip_low=1.0)
    tokens, _ = policy_gradient(mis_level="token", mis_clip=1e6)
    assert 0.01 < (tokens - expected).norm() < 0.8 * (plain - expected).norm()
