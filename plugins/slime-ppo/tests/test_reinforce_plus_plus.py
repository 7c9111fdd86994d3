"""``reinforce_plus_plus`` against the formulas of REINFORCE++ (2501.03262)."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch

from slime_core import AdvantageSettings, ResponseTokens, RunView, TokenAdvantages
from slime_ppo.reinforce_plus_plus import ReinforcePlusPlus


class Alone:
    """One rank."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


class Ranks:
    """The reductions of several threads that stand for ranks."""

    def __init__(self, count: int) -> None:
        self._parts: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(count, timeout=120)

    def of(self, rank: int) -> Ranks.One:
        return Ranks.One(self, rank)

    class One:
        def __init__(self, ranks: Ranks, rank: int) -> None:
            self._ranks, self._rank = ranks, rank

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            self._ranks._parts[self._rank] = values
            self._ranks._barrier.wait()
            total = torch.stack([self._ranks._parts[rank] for rank in sorted(self._ranks._parts)]).sum(0)
            self._ranks._barrier.wait()
            return total


def tokens(rewards, responses, *, masks=None, kl=None, gamma=1.0, kl_coef=0.0) -> ResponseTokens:
    """Responses of these lengths; ``kl`` is the divergence at each token."""
    lengths_B = torch.tensor(responses, dtype=torch.int64)
    count = int(lengths_B.sum())
    reference_U = torch.linspace(-3, -1, count)
    columns = {} if kl is None else {"log_probs_U": reference_U + torch.tensor(kl), "ref_log_probs_U": reference_U}
    return ResponseTokens(
        lengths_B=lengths_B,
        samples_U=torch.arange(len(lengths_B)).repeat_interleave(lengths_B),
        mask_U=torch.ones(count) if masks is None else torch.tensor(masks, dtype=torch.float32),
        rewards_B=torch.tensor(rewards, dtype=torch.float32),
        settings=AdvantageSettings(gamma=gamma, kl_coef=kl_coef),
        **columns,
    )


def random_batch(seed: int, *, kl_coef: float = 0.1, gamma: float = 0.9, samples: int = 12) -> ResponseTokens:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 9, (samples,), generator=generator).tolist()
    masks = (torch.rand(sum(lengths), generator=generator) < 0.7).tolist()
    kl = torch.randn(sum(lengths), generator=generator).tolist()
    rewards = torch.randn(samples, generator=generator).tolist()
    return tokens(rewards, lengths, masks=masks, kl=kl, gamma=gamma, kl_coef=kl_coef)


def parts(batch: ResponseTokens, members: list[int]) -> ResponseTokens:
    """These samples, in this order."""
    starts = batch.lengths_B.cumsum(0) - batch.lengths_B
    take_U = torch.cat([torch.arange(int(starts[i]), int(starts[i] + batch.lengths_B[i])) for i in members])
    lengths_B = batch.lengths_B[members]
    return replace(
        batch,
        lengths_B=lengths_B,
        samples_U=torch.arange(len(members)).repeat_interleave(lengths_B),
        mask_U=batch.mask_U[take_U],
        rewards_B=batch.rewards_B[members],
        log_probs_U=batch.log_probs_U[take_U],
        ref_log_probs_U=batch.ref_log_probs_U[take_U],
    )


def estimate(batch: ResponseTokens, reduce=None) -> TokenAdvantages:
    return ReinforcePlusPlus(None, RunView()).estimate(batch, reduce or Alone())


def split(values_U: torch.Tensor, batch: ResponseTokens) -> list[torch.Tensor]:
    return list(values_U.split(batch.lengths_B.tolist()))


def test_returns_by_hand():
    # A_t = r - beta * sum of KL from t on, with beta 0.1; the second response: gamma 1, one token.
    found = estimate(tokens([1.0, -1.0], [3, 1], kl=[1.0, 2.0, -1.0, 4.0], kl_coef=0.1))
    assert found.metrics_U["returns"].tolist() == pytest.approx([1 - 0.2, 1 - 0.1, 1 + 0.1, -1 - 0.4])
    assert found.metrics_U["kl"].tolist() == pytest.approx([1, 2, -1, 4])


def test_advantages_are_the_whitened_returns_by_hand():
    # returns 3, 3, 0: mean 2, variance 2
    found = estimate(tokens([3.0, 0.0], [2, 1]))
    root = math.sqrt(2)
    assert found.advantages_U.tolist() == pytest.approx([1 / root, 1 / root, -2 / root])
    assert found.advantages_U.dtype == torch.float32
    assert "kl" not in found.metrics_U


def test_a_later_reward_is_discounted_a_token():
    found = estimate(tokens([1.0], [3], kl=[0.0, 0.0, 1.0], gamma=0.5, kl_coef=0.2))
    assert found.metrics_U["returns"].tolist() == pytest.approx([0.8 / 4, 0.8 / 2, 0.8])


def test_masked_tokens_are_no_steps():
    # The trained tokens are 0 and 2: the reward stands at 2, and one discount lies between them.
    batch = tokens([1.0], [4], masks=[1, 0, 1, 0], kl=[0.5, 99.0, 0.25, 99.0], gamma=0.5, kl_coef=1.0)
    found = estimate(batch)
    assert found.metrics_U["returns"].tolist() == pytest.approx([-0.5 + 0.5 * 0.75, 0, 0.75, 0])
    assert found.advantages_U[[1, 3]].tolist() == [0, 0]


def test_masked_tokens_may_hold_anything():
    batch = tokens([1.0, 0.0], [3, 2], masks=[1, 0, 1, 1, 1], kl=[0.5, math.nan, 0.25, 1.0, 2.0], kl_coef=1.0)
    assert bool(estimate(batch).advantages_U.isfinite().all())


def test_a_response_without_a_trained_token_takes_no_part():
    # slime asserts that there is none; removed samples are such responses.
    whole = estimate(tokens([3.0, 100.0, 0.0, 7.0], [2, 2, 1, 0], masks=[1, 1, 0, 0, 1]))
    alone = estimate(tokens([3.0, 0.0], [2, 1]))
    assert whole.advantages_U[[0, 1, 4]].tolist() == alone.advantages_U.tolist()


def test_a_batch_without_trained_tokens_or_without_differences_is_all_zero():
    assert estimate(tokens([3.0, 1.0], [1, 1], masks=[0, 0])).advantages_U.tolist() == [0, 0]
    assert estimate(tokens([0.5, 0.5], [2, 3])).advantages_U.tolist() == [0] * 5
    assert estimate(tokens([], [])).advantages_U.shape == (0,)


def test_trained_tokens_have_mean_zero_and_variance_one():
    batch = random_batch(0, samples=64)
    found = estimate(batch).advantages_U[batch.mask_U != 0].double()
    assert found.mean().item() == pytest.approx(0, abs=1e-6)
    assert found.var(unbiased=False).item() == pytest.approx(1, abs=1e-5)


def test_permuted_samples_give_permuted_advantages():
    batch = random_batch(1)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    moved = parts(batch, order)
    whole, found = split(estimate(batch).advantages_U, batch), split(estimate(moved).advantages_U, moved)
    for place, sample in enumerate(order):
        torch.testing.assert_close(found[place], whole[sample], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("members", [[0, 1, 2, 3, 4, 5], [0, 3, 6, 9, 10, 11], [11]])
def test_a_batch_split_over_two_ranks_gives_the_advantages_of_one(members):
    batch = random_batch(2)
    shares = [members, [i for i in range(12) if i not in members]]
    ranks, found = Ranks(2), {}

    def work(rank: int) -> None:
        found[rank] = estimate(parts(batch, shares[rank]), ranks.of(rank)).advantages_U

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = split(estimate(batch).advantages_U, batch)
    for rank, share in enumerate(shares):
        expected = torch.cat([whole[i] for i in share])
        torch.testing.assert_close(found[rank], expected, rtol=1e-6, atol=1e-6)


def test_the_batch_is_left_as_it_is():
    batch = random_batch(3)
    before = [column.clone() for column in (batch.mask_U, batch.rewards_B, batch.log_probs_U, batch.ref_log_probs_U)]
    estimate(batch)
    after = [batch.mask_U, batch.rewards_B, batch.log_probs_U, batch.ref_log_probs_U]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_penalty_without_log_probs_is_refused():
    with pytest.raises(ValueError, match="log_probs_U and ref_log_probs_U"):
        estimate(tokens([1.0], [2], kl_coef=0.1))
