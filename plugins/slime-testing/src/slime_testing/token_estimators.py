"""The suite of advantage estimators of scope ``token``: from each rank's responses to one number per response token,
independent of how the samples are split over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st

from slime_core import AdvantageSettings, ResponseTokens, TokenAdvantages
from slime_testing.harness import Kind
from slime_testing.packed import Packing, require_column, require_equal, require_unchanged, rows
from slime_testing.suite import ComponentSuite, PropertyViolation, given, require

__all__ = ["TokenAdvantageEstimatorSuite"]

LIMIT_S = 60.0
"""Time limit of a rank's wait for the others in a reduction, in seconds."""

IN_STEP = "Every rank must call the same reductions in the same order, even if its shard is small."

SETTINGS = (
    AdvantageSettings(),
    AdvantageSettings(gamma=0.9, lambd=0.8),
    AdvantageSettings(kl_coef=0.1, gamma=0.95),
)
settings = st.sampled_from(SETTINGS)
OF_DIVERGENCE = {"log_probs", "ref_log_probs"}
TOKEN_COLUMNS = ("log_probs_U", "ref_log_probs_U", "rollout_log_probs_U", "values_U")


class TokenAdvantageEstimatorSuite(ComponentSuite):
    """For estimators that are added with ``scope="token"``.

    As in a run, columns that are not in ``reads`` are None, and so are the columns of ``kl`` if ``kl_coef`` is 0.
    """

    kind: ClassVar[Kind] = Kind.ADVANTAGE_ESTIMATOR

    def test_the_scope_is_token(self) -> None:
        scope = self.traits().scope
        require(scope == "token", f"its scope is {scope!r}; test it with AdvantageEstimatorSuite")

    @given(packing=rows(), settings=settings)
    def test_every_token_gets_one_finite_advantage(self, packing: Packing, settings: AdvantageSettings) -> None:
        batch = self._batch(packing, settings)
        output = self._estimated(batch)
        require_column("advantages_U", output.advantages_U, batch.mask_U)
        advantages_U = self._trained(batch)
        finite = bool(advantages_U.isfinite().all())
        require(finite, f"a trained token's advantage is NaN or infinite: {advantages_U.tolist()}")

    @given(packing=rows(), settings=settings)
    def test_metrics_are_one_number_a_token(self, packing: Packing, settings: AdvantageSettings) -> None:
        batch = self._batch(packing, settings)
        for name, values_U in self._estimated(batch).metrics_U.items():
            require_column(f"the metric {name!r}", values_U, batch.mask_U)

    @given(packing=rows(), settings=settings)
    def test_a_response_without_tokens_is_taken(self, packing: Packing, settings: AdvantageSettings) -> None:
        batch = self._batch(Packing((*packing.lengths, 0), packing.mask, packing.seed), settings)
        advantages_U = self._trained(batch)
        finite = bool(advantages_U.isfinite().all())
        require(finite, f"with a response of no tokens in the batch, an advantage is NaN: {advantages_U.tolist()}")

    @given(packing=rows(), settings=settings)
    def test_an_estimator_that_reads_values_gives_returns(self, packing: Packing, settings: AdvantageSettings) -> None:
        if "values" not in self.traits().reads:
            return
        batch = self._batch(packing, settings)
        returns_U = self._estimated(batch).returns_U
        require(returns_U is not None, "it reads values, so a critic is trained, and returns_U is None")
        require_column("returns_U", returns_U, batch.mask_U)
        finite = bool(returns_U is not None and returns_U.isfinite().all())
        require(finite, f"a return is NaN or infinite: {returns_U}")

    @given(packing=rows(), reward=st.sampled_from([0.0, 1.0, -3.0, 0.1]), alone=st.booleans())
    def test_constant_rewards_give_finite_advantages(self, packing: Packing, reward: float, alone: bool) -> None:
        batch = self._batch(packing, AdvantageSettings())
        batch = replace(batch, rewards_B=torch.full_like(batch.rewards_B, reward))
        if alone:  # one response of one token, and equal columns: every variance is 0
            batch = _constant(_chosen(batch, [0]), reward)
        advantages_U = self._trained(batch)
        require(
            bool(advantages_U.isfinite().all()),
            f"all rewards are {reward}, and an advantage is NaN or infinite: {advantages_U.tolist()}. A division by a "
            "standard deviation needs an epsilon.",
        )

    @given(packing=rows(), settings=settings)
    def test_the_batch_is_not_changed(self, packing: Packing, settings: AdvantageSettings) -> None:
        batch = self._batch(packing, settings)
        before = {name: column.clone() for name, column in _columns(batch).items()}
        self._estimated(batch)
        require_unchanged(before, _columns(batch))

    @given(packing=rows(), settings=settings, seed=st.integers(0, 99))
    def test_permuting_the_samples_permutes_the_advantages(
        self, packing: Packing, settings: AdvantageSettings, seed: int
    ) -> None:
        batch = self._batch(packing, settings)
        order = torch.randperm(len(batch.lengths_B), generator=torch.Generator().manual_seed(seed)).tolist()
        straight_U, shuffled_U = (self._trained(shard) for shard in (batch, _chosen(batch, order)))
        wanted_U = straight_U[_tokens(batch, order)]
        require_equal(shuffled_U, wanted_U, "the advantages depend on the order of the samples in the shard.")

    @given(packing=rows(), settings=settings, split=st.lists(st.integers(0, 1), min_size=4, max_size=4))
    def test_how_samples_are_split_over_ranks_changes_nothing(
        self, packing: Packing, settings: AdvantageSettings, split: list[int]
    ) -> None:
        batch = self._batch(packing, settings)
        if len(batch.lengths_B) < 2:
            return
        split = [0, 1, *split][: len(batch.lengths_B)]  # no rank is empty, because the core gives every rank a sample
        shares = [[sample for sample, rank in enumerate(split) if rank == number] for number in (0, 1)]
        shards = [_chosen(batch, share) for share in shares]
        together_U = self._trained(batch)
        for share, shard, output in zip(shares, shards, _on_ranks(self.make, shards), strict=True):
            require_equal(
                output.advantages_U.where(shard.mask_U != 0, 0.0),
                together_U[_tokens(batch, share)],
                "the advantages depend on how the samples are split over ranks: take means and variances over the "
                "batch through reduce.sum, sums and counts first, and divide then.",
            )

    @given(packing=rows(), settings=settings, longer=st.integers(1, 5))
    def test_padding_changes_nothing(self, packing: Packing, settings: AdvantageSettings, longer: int) -> None:
        padding = Packing((*packing.lengths, longer), (*packing.mask, *[0] * longer), packing.seed)
        more = Packing((*packing.lengths, longer + 3), (*packing.mask, *[0] * (longer + 3)), packing.seed + 1)
        batch = self._batch(padding, settings)
        other = self._overlaid(self._batch(more, settings), batch, len(packing.mask))
        found_U, wanted_U = (self._trained(padded)[: len(packing.mask)] for padded in (other, batch))
        require_equal(
            found_U,
            wanted_U,
            "the advantages depend on how long a response is that is not trained at all, or on what its tokens hold: "
            "count tokens with mask_U.",
        )

    def _estimated(self, batch: ResponseTokens) -> TokenAdvantages:
        """Estimate on one rank that has all samples."""
        output: TokenAdvantages = self.make().estimate(batch, _OneRank())
        kind = type(output).__name__
        require(isinstance(output, TokenAdvantages), f"estimate() returned {kind}; TokenAdvantages is wanted")
        return output

    def _trained(self, batch: ResponseTokens) -> torch.Tensor:
        """Return the advantages of trained tokens, 0 elsewhere, as the core uses them: [u]."""
        advantages_U = self._estimated(batch).advantages_U
        require_column("advantages_U", advantages_U, batch.mask_U)
        return advantages_U.where(batch.mask_U != 0, 0.0)

    def _batch(self, packing: Packing, settings: AdvantageSettings) -> ResponseTokens:
        reads = set(self.traits().reads)
        if "kl" not in reads:  # a run would refuse the coefficient
            settings = replace(settings, kl_coef=0.0)
        if settings.kl_coef:
            reads |= OF_DIVERGENCE
        lengths_B = torch.tensor(packing.lengths)
        values = {
            name: packing.uniform(number, low=-2.0, high=-0.1)
            for number, name in enumerate(TOKEN_COLUMNS)
            if name.removesuffix("_U") in reads
        }
        return ResponseTokens(
            lengths_B=lengths_B,
            samples_U=torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B),
            mask_U=packing.mask_T,
            rewards_B=torch.tensor([float(1 + (packing.seed * 7 + i * 5) % 4) / 2 for i in range(len(lengths_B))]),
            settings=settings,
            **values,
            **(_texts(packing) if "tokens" in reads else {}),
        )

    def _overlaid(self, batch: ResponseTokens, source: ResponseTokens, tokens: int) -> ResponseTokens:
        """Return ``batch`` with the rewards and the first ``tokens`` response tokens of ``source``."""
        mixed: dict[str, Any] = {"rewards_B": source.rewards_B}
        for name in TOKEN_COLUMNS:
            old, new = getattr(source, name), getattr(batch, name)
            mixed[name] = None if new is None else torch.cat([old[:tokens], new[tokens:]])
        if batch.tokens_T is not None and source.tokens_T is not None:
            ahead = len(source.tokens_T) - int(source.lengths_B[-1])
            mixed["tokens_T"] = torch.cat([source.tokens_T[:ahead], batch.tokens_T[ahead:]])
        return replace(batch, **mixed)


def _texts(packing: Packing) -> dict[str, torch.Tensor]:
    """Return token ids of prompts, of one to three tokens each, and of responses."""
    lengths_B = torch.tensor([1 + place % 3 + length for place, length in enumerate(packing.lengths)])
    generator = torch.Generator().manual_seed(packing.seed)
    tokens_T = torch.randint(5, 90, (int(lengths_B.sum()),), generator=generator)
    return {"tokens_T": tokens_T, "total_lengths_B": lengths_B}


def _columns(batch: ResponseTokens) -> dict[str, torch.Tensor]:
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "settings"}
    return {name: column for name, column in columns.items() if column is not None}


def _tokens(batch: ResponseTokens, samples: Sequence[int]) -> torch.Tensor:
    """Return the positions of the response tokens of these samples, in that order."""
    places = [torch.nonzero(batch.samples_U == sample)[:, 0] for sample in samples]
    return torch.cat(places)


def _chosen(batch: ResponseTokens, samples: list[int]) -> ResponseTokens:
    """Return a shard of these samples, in that order."""
    tokens_U, lengths_B = _tokens(batch, samples), batch.lengths_B[samples]
    before = _columns(batch)
    columns: dict[str, Any] = {
        name: column[tokens_U] if name.endswith("_U") else column[samples]
        for name, column in before.items()
        if name != "tokens_T"
    }
    if "tokens_T" in before:
        texts = before["tokens_T"].split(before["total_lengths_B"].tolist())
        columns["tokens_T"] = torch.cat([texts[sample] for sample in samples])
    columns["samples_U"] = torch.repeat_interleave(torch.arange(len(samples)), lengths_B)
    return replace(batch, **columns)


def _constant(batch: ResponseTokens, value: float) -> ResponseTokens:
    """Return one trained token whose columns all have the value ``value``."""
    row = {name: torch.full((1,), value) for name, column in _columns(batch).items() if column.is_floating_point()}
    columns: dict[str, Any] = {**row, "mask_U": torch.ones(1), "lengths_B": torch.ones(1, dtype=torch.int64)}
    if batch.tokens_T is not None and batch.total_lengths_B is not None:
        columns["total_lengths_B"] = batch.total_lengths_B - batch.lengths_B + 1
        columns["tokens_T"] = batch.tokens_T[: int(columns["total_lengths_B"])]
    return replace(batch, **columns, samples_U=torch.zeros(1, dtype=torch.int64))


class _OneRank:
    """The reductions of a single rank."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach().clone()


class _Rendezvous:
    """Reductions over several ranks (threads) of one call.

    Each rank contributes its summand and waits for the others; a rank that has left contributes no more.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._changed = threading.Condition()
        self._summands: dict[int, dict[int, torch.Tensor]] = {}
        self._gone: set[int] = set()

    def sum_of(self, rank: int, number: int, values: torch.Tensor) -> torch.Tensor:
        """Contribute to reduction ``number`` and return its sum over all ranks."""
        with self._changed:
            summands = self._summands.setdefault(number, {})
            summands[rank] = values.detach().clone()
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(summands) == self._ranks or self._gone - summands.keys(), LIMIT_S)
            complete = len(summands) == self._ranks
        require(complete, f"a rank waits in its reduction {number + 1}, which another rank never calls. {IN_STEP}")
        shapes = {tuple(rank.shape) for rank in summands.values()}
        require(len(shapes) == 1, f"the ranks reduce tensors of the shapes {sorted(shapes)} together. {IN_STEP}")
        return torch.stack([summands[rank] for rank in sorted(summands)]).sum(0)

    def leave(self, rank: int) -> None:
        """Mark the rank as finished."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


class _Rank:
    """The reductions of one of several ranks."""

    def __init__(self, rendezvous: _Rendezvous, rank: int) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._number = -1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self._number += 1
        return self._rendezvous.sum_of(self._rank, self._number, values)


def _on_ranks(make: Callable[[], Any], shards: Sequence[ResponseTokens]) -> list[TokenAdvantages]:
    """Estimate on every rank with its shard, concurrently."""
    rendezvous = _Rendezvous(len(shards))
    with ThreadPoolExecutor(len(shards)) as ranks:
        futures = [ranks.submit(_estimate_on, make, shard, rendezvous, rank) for rank, shard in enumerate(shards)]
    failures = [failure for future in futures if (failure := future.exception()) is not None]
    # A rank that fails leaves the others waiting, so the first failure is raised first.
    for failure in sorted(failures, key=lambda raised: isinstance(raised, PropertyViolation)):
        raise failure
    return [future.result() for future in futures]


def _estimate_on(make: Callable[[], Any], shard: ResponseTokens, rendezvous: _Rendezvous, rank: int) -> TokenAdvantages:
    try:
        output: TokenAdvantages = make().estimate(shard, _Rank(rendezvous, rank))
        return output
    finally:
        rendezvous.leave(rank)
