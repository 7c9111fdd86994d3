from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from slime_core import CorrectionTerms, RunView
from slime_offpolicy.options import OffPolicyOptions
from slime_offpolicy.sequences import MaskedImportanceSampling, OffPolicySequenceMasking, Veto
from slime_testing.packed import SequenceSums


def mis(**options) -> MaskedImportanceSampling:
    return MaskedImportanceSampling(OffPolicyOptions(**options), RunView())


def veto(threshold: float = 1e-4) -> Veto:
    return Veto(OffPolicyOptions(veto_threshold=threshold), RunView())


def opsm(delta: float = 0.1) -> OffPolicySequenceMasking:
    return OffPolicySequenceMasking(OffPolicyOptions(opsm_delta=delta), RunView())


ALL = [
    mis(mis_level="sequence", mis_mode="mask"),
    mis(mis_level="geometric", mis_mode="clip"),
    mis(mis_level="token", mis_mode="clip"),
    veto(0.6),
    opsm(0.1),
]


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
def test_every_level_and_mode_by_hand(level, mode, expected):
    found = mis(mis_level=level, mis_mode=mode, mis_clip=1.6, mis_clip_low=0.6)(terms(*RESPONSES))
    assert found.weights_T.tolist() == pytest.approx(expected)
    assert found.mask_T.tolist() == [1] * 5
    raw = {"token": [1.5, 2, 0.5, 1, 0.5], "sequence": [3] * 2 + [0.25] * 3, "geometric": [GEOMETRIC[0]] * 2}[level]
    assert found.metrics_T["mis"].tolist()[: len(raw)] == pytest.approx(raw)
    clipped = [float(abs(a - b) > 1e-6) for a, b in zip(found.metrics_T["mis"].tolist(), expected, strict=True)]
    assert found.metrics_T["mis_clipfrac"].tolist() == clipped


def test_only_trained_tokens_form_the_ratio_of_a_response():
    batch = terms((1.5, 100.0, 1.2), mask=[1.0, 0.0, 1.0])
    product, mean = (mis(mis_level=level, mis_clip=10.0)(batch) for level in ("sequence", "geometric"))
    assert product.weights_T.tolist() == pytest.approx([1.8] * 3)
    assert mean.weights_T.tolist() == pytest.approx([1.8**0.5] * 3)


def test_a_product_beyond_float_stays_finite():
    found = mis(mis_level="sequence", mis_clip=3.0)(terms((math.exp(15.0),) * 8))
    assert found.weights_T.tolist() == [3.0] * 8
    assert found.metrics_T["mis"].tolist() == pytest.approx([math.exp(20.0)] * 8)


@pytest.mark.parametrize("mode", ["clip", "mask"])
def test_bounds_in_the_wrong_order_are_refused(mode):
    with pytest.raises(ValueError, match=r"mis_clip_low is 3\.0 and mis_clip is 2\.0; accepted: 0 <= mis_clip_low <="):
        mis(mis_clip_low=3.0, mis_mode=mode)
    assert mis(mis_clip_low=3.0, mis_mode="truncate")(terms((8.0,))).weights_T.tolist() == [2.0]


# --- Veto -------------------------------------------------------------------------------------------------------------


def test_one_impossible_token_masks_its_whole_response():
    found = veto(0.01)(terms((1.0, 1.0), (1.0, 0.009, 1.0), (0.011, 1.0)))
    assert found.mask_T.tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert found.weights_T.tolist() == [1] * 7
    assert found.metrics_T["veto_fraction"].tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert found.metrics_T["veto_tokens"].tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_a_masked_token_vetoes_nothing_and_stays_masked():
    found = veto()(terms((1.0, 1e-6), (1.0, 1.0), mask=[1.0, 0.0, 1.0, 0.0]))
    assert found.mask_T.tolist() == [1, 0, 1, 0]


def test_a_threshold_has_to_be_above_zero():
    with pytest.raises(ValidationError, match="greater than 0"):
        veto(0)


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


def test_a_response_of_negative_advantage_that_was_left_too_far_counts_zero():
    # Means 0.2, 0.2, 0.05 and -0.3; DeepSeek-V3.2 (2512.02556), section 3.1.
    batch = moved([0.1, 0.3, 0.1, 0.3, 0.1, 0.0, -0.3], [-1.0, -1, 1, 1, -1, -1, -1], [2, 2, 2, 1])
    found = opsm()(batch)
    assert found.weights_T.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert found.mask_T.tolist() == [1] * 7
    assert found.metrics_T["opsm_clipfrac"].tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert found.metrics_T["opsm_kl"].tolist() == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.05, 0.05, -0.3], abs=1e-6)


def test_where_advantages_differ_within_a_response_only_negative_tokens_count_zero():
    found = opsm()(moved([0.2, 0.2], [-1.0, 1.0], [2]))
    assert found.weights_T.tolist() == [0, 1]


def test_masked_tokens_take_no_part_in_the_mean():
    found = opsm(0.15)(moved([0.2, 9.0, 0.0], [-1.0, -1, -1], [3], mask=[1.0, 0.0, 1.0]))
    assert found.weights_T.tolist() == [1, 1, 1]
    assert found.metrics_T["opsm_kl"].tolist() == pytest.approx([0.1] * 3)


def test_a_correction_without_its_columns_is_an_error():
    with pytest.raises(ValueError, match="current_log_probs_T and advantages_T"):
        opsm()(terms((1.0,)))
    short = replace(moved([0.2], [-1.0], [1]), advantages_T=torch.zeros(2))
    with pytest.raises(ValueError, match=r"found \(1,\) and \(1,\)"):
        opsm()(short)


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
def test_the_order_of_responses_and_of_their_tokens_does_not_count(correction):
    batch = anything()
    whole = correction(batch)
    order = torch.tensor([11, 10, 9, 8, 7, 6, 1, 0, 3, 2, 5, 4])
    other = correction(taken(batch, order, SequenceSums((6, 4, 2))))
    assert other.weights_T.tolist() == pytest.approx(whole.weights_T[order].tolist())
    assert torch.equal(other.mask_T, whole.mask_T[order])


class Shared:
    """Sums over responses whose tokens two threads hold, as context-parallel ranks do; counts the calls of each."""

    def __init__(self) -> None:
        self.barrier, self.held, self.calls = threading.Barrier(2, timeout=120), {}, [0, 0]

    def rank(self, number: int, samples_T: torch.Tensor, count: int):
        outer = self

        class Segments:
            def sums(self, values_T):
                outer.calls[number] += 1
                outer.held[number] = values_T.new_zeros(count).index_add(0, samples_T, values_T)
                outer.barrier.wait()
                total = outer.held[0] + outer.held[1]
                outer.barrier.wait()
                return total

            def spread(self, values_b):
                return values_b.index_select(0, samples_T)

        return Segments()


@pytest.mark.parametrize("cut", [[0, 3, 4, 6, 7, 11], []], ids=["interleaved", "one rank holds nothing"])
@pytest.mark.parametrize("correction", ALL)
def test_ranks_that_share_responses_find_what_one_rank_finds(correction, cut):
    batch, samples_T = anything(), torch.tensor([0] * 4 + [1] * 2 + [2] * 6)
    whole, shared = correction(batch), Shared()
    parts = [torch.tensor(cut, dtype=torch.int64), torch.tensor([i for i in range(12) if i not in cut])]
    found: dict[int, object] = {}

    def run(number: int) -> None:
        index = parts[number]
        found[number] = correction(taken(batch, index, shared.rank(number, samples_T[index], 3)))

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.calls[0] == shared.calls[1]
    for number, index in enumerate(parts):
        assert found[number].weights_T.tolist() == pytest.approx(whole.weights_T[index].tolist())
        assert torch.equal(found[number].mask_T, whole.mask_T[index])


@pytest.mark.parametrize("correction", [ALL[0], ALL[1], ALL[3], ALL[4]])
def test_a_response_cannot_be_judged_without_segments(correction):
    with pytest.raises(ValueError, match="segments is None"):
        correction(replace(anything(), segments=None))


# --- What the weights are for: every response of two tokens, so that means over the engine's responses are exact ------


def policy_gradient(**options) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean gradient of the weighed loss over the engine's samples, and the true gradient of the mean reward."""
    generator = torch.Generator().manual_seed(3)
    first_V, second_VV = torch.randn(3, generator=generator), torch.randn(3, 3, generator=generator)
    logits = torch.cat([first_V[None], second_VV]).double().requires_grad_()
    engine = (logits.detach() + 0.7 * torch.randn(4, 3, generator=generator).double()).log_softmax(1)
    rewards_VV = torch.rand(3, 3, generator=generator).double()
    trainer = logits.log_softmax(1)

    def of_responses(rows: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the two tokens of each of the nine responses, [9, 2]."""
        return torch.stack([rows[0].repeat_interleave(3), rows[1:].flatten()], dim=1)

    log_probs, engine_log_probs = of_responses(trainer), of_responses(engine)
    weights_T = mis(**options)(
        CorrectionTerms(
            log_probs_T=log_probs.detach().float().flatten(),
            rollout_log_probs_T=engine_log_probs.float().flatten(),
            mask_T=torch.ones(18),
            segments=SequenceSums([2] * 9),
        )
    ).weights_T
    weighed = (weights_T.view(9, 2) * log_probs).sum(1) * rewards_VV.flatten() * engine_log_probs.sum(1).exp()
    (found,) = torch.autograd.grad(weighed.sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad((log_probs.sum(1).exp() * rewards_VV.flatten()).sum(), logits)
    return found, wanted


def test_weights_of_whole_responses_make_the_engines_responses_count_as_the_trainers():
    found, wanted = policy_gradient(mis_level="sequence", mis_clip=1e6)
    assert found.flatten().tolist() == pytest.approx(wanted.flatten().tolist(), abs=1e-6)


def test_weights_of_tokens_come_nearer_and_stay_biased():
    one = {"mis_level": "token", "mis_mode": "clip", "mis_clip": 1.0, "mis_clip_low": 1.0}
    plain, wanted = policy_gradient(**one)
    tokens, _ = policy_gradient(mis_level="token", mis_clip=1e6)
    assert 0.01 < (tokens - wanted).norm() < 0.8 * (plain - wanted).norm()
