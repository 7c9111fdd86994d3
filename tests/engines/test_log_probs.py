"""Log-probabilities and entropies through Megatron's operations, against plain torch on the whole vocabulary."""

from __future__ import annotations

import pytest
import torch

from slime_core.learner.batches import MicroBatch

ROWS = [0, 1, 3]


@pytest.fixture
def logits_1TV() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 5 * torch.randn(1, 5, 11, generator=generator)


def micro(temperature: float = 1.0) -> MicroBatch:
    """Three response tokens, predicted by rows 0, 1 and 3 of 5."""
    unused = torch.zeros(3)
    return MicroBatch(
        tokens_1T=torch.zeros(1, 5, dtype=torch.int64),
        position_ids_1T=torch.zeros(1, 5, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        max_seqlen=3,
        num_samples=2,
        rows_U=torch.tensor(ROWS),
        targets_U=torch.tensor([4, 10, 0]),
        samples_U=torch.tensor([0, 0, 1]),
        places_U=torch.arange(3),
        mask_U=unused,
        weights_U=unused,
        advantages_U=unused,
        rollout_log_probs_U=unused,
        temperature=temperature,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_log_probs_and_their_gradient_are_those_of_log_softmax(megatron, logits_1TV, temperature):
    from slime_core.learner.log_probs import response_log_probs, response_logits

    batch, slope_U = micro(temperature), torch.tensor([1.0, -2.0, 0.5])
    ours = logits_1TV.clone().requires_grad_()
    found_U = response_log_probs(response_logits(ours, batch), batch)
    (found_U * slope_U).sum().backward()
    theirs = logits_1TV.clone().requires_grad_()
    expected_U = (theirs[0, ROWS] / temperature).log_softmax(-1).gather(1, batch.targets_U[:, None])[:, 0]
    (expected_U * slope_U).sum().backward()
    torch.testing.assert_close(found_U, expected_U, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropy_and_its_gradient_are_those_of_softmax(megatron, logits_1TV, temperature):
    from slime_core.learner.log_probs import response_entropy, response_logits

    batch, slope_U = micro(temperature), torch.tensor([1.0, -2.0, 0.5])
    ours = logits_1TV.clone().requires_grad_()
    found_U = response_entropy(response_logits(ours, batch))
    (found_U * slope_U).sum().backward()
    theirs = logits_1TV.clone().requires_grad_()
    log_p_UV = (theirs[0, ROWS] / temperature).log_softmax(-1)
    expected_U = -(log_p_UV.exp() * log_p_UV).sum(-1)
    (expected_U * slope_U).sum().backward()
    torch.testing.assert_close(found_U, expected_U, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_entropy_and_log_probs_may_share_their_logits(megatron, logits_1TV):
    from slime_core.learner.log_probs import response_entropy, response_log_probs, response_logits

    batch = micro()
    ours = logits_1TV.clone().requires_grad_()
    logits_UV = response_logits(ours, batch)
    (response_entropy(logits_UV) + response_log_probs(logits_UV, batch)).sum().backward()
    theirs = logits_1TV.clone().requires_grad_()
    log_p_UV = theirs[0, ROWS].log_softmax(-1)
    (log_p_UV.gather(1, batch.targets_U[:, None])[:, 0] - (log_p_UV.exp() * log_p_UV).sum(-1)).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow(megatron):
    from slime_core.learner.log_probs import response_entropy, response_log_probs, response_logits

    batch = micro()
    logits_UV = response_logits(torch.full((1, 5, 11), 1e4), batch)
    assert response_entropy(logits_UV).tolist() == pytest.approx([2.3978953] * 3)  # log 11
    assert response_log_probs(logits_UV, batch).tolist() == pytest.approx([-2.3978953] * 3)


def test_bfloat16_logits_are_computed_in_float32(megatron, logits_1TV):
    from slime_core.learner.log_probs import response_log_probs, response_logits

    batch = micro()
    rounded = logits_1TV.bfloat16()
    found_U = response_log_probs(response_logits(rounded, batch), batch)
    expected_U = rounded.float()[0, ROWS].log_softmax(-1).gather(1, batch.targets_U[:, None])[:, 0]
    assert found_U.dtype == torch.float32
    torch.testing.assert_close(found_U, expected_U, rtol=1e-6, atol=1e-6)
