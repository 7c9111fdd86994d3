"""The suite of off-policy corrections: from two log-probabilities of each token to weights and a narrower mask."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from hypothesis import strategies as st

from slime_core import CorrectionOutput, CorrectionTerms
from slime_testing.harness import Kind
from slime_testing.packed import (
    EMPTY,
    Packing,
    require_column,
    require_equal,
    require_unchanged,
    rows,
)
from slime_testing.suite import ComponentSuite, given, require

__all__ = ["CorrectionSuite"]

STEP = 0.01
"""Difference of log-probabilities of trainer and engine, in nats, that no correction should cut."""

_READ = ("log_probs_T", "rollout_log_probs_T", "current_log_probs_T", "advantages_T")
_COLUMNS = (*_READ, "mask_T")


class CorrectionSuite(ComponentSuite):
    """For off-policy corrections.

    Set ``cuts_what_rose`` if tokens of negative advantage should weigh less once the actor finds them likelier than
    before the rollout's first step.
    """

    kind: ClassVar[Kind] = Kind.CORRECTION
    cuts_what_rose: ClassVar[bool] = False

    @given(packing=rows(), spread=st.sampled_from([0.01, 0.5, 5.0]))
    def test_weights_are_finite_and_not_negative(self, packing: Packing, spread: float) -> None:
        output = self._corrected(self._terms(packing, spread))
        require_column("weights_T", output.weights_T, packing.mask_T)
        weights_T = output.weights_T[(packing.mask_T * output.mask_T) != 0]
        require(
            bool((weights_T.isfinite() & (weights_T >= 0)).all()),
            f"a weight of a trained token is negative, NaN or infinite: {weights_T.tolist()}",
        )

    @given(packing=rows(some_masked=True), spread=st.sampled_from([0.01, 0.5, 5.0]))
    def test_the_mask_is_never_widened(self, packing: Packing, spread: float) -> None:
        mask_T = self._corrected(self._terms(packing, spread)).mask_T
        require_column("mask_T", mask_T, packing.mask_T)
        require(bool(((mask_T == 0) | (mask_T == 1)).all()), f"the mask holds {mask_T.tolist()}; 0 and 1 are wanted")
        require(
            bool((mask_T <= packing.mask_T).all()),
            f"tokens that were masked are trained: the mask came in as {packing.mask_T.tolist()} and went out as "
            f"{mask_T.tolist()}. Multiply by terms.mask_T.",
        )

    @given(packing=rows())
    def test_metrics_are_one_number_a_token(self, packing: Packing) -> None:
        for name, values_T in self._corrected(self._terms(packing, 0.5)).metrics_T.items():
            require_column(f"the metric {name!r}", values_T, packing.mask_T)
            require(not values_T.requires_grad, f"the metric {name!r} carries a gradient; detach it")

    @given(packing=rows())
    def test_the_terms_are_not_changed(self, packing: Packing) -> None:
        terms = self._terms(packing, 0.5)
        before = {name: getattr(terms, name).clone() for name in _COLUMNS}
        self._corrected(terms)
        require_unchanged(before, {name: getattr(terms, name) for name in _COLUMNS})

    @given(packing=rows(some_masked=True), hole=st.sampled_from([math.nan, math.inf, -math.inf]))
    def test_what_masked_tokens_hold_does_not_leak(self, packing: Packing, hole: float) -> None:
        terms = self._terms(packing, 0.5)
        holes = {name: getattr(terms, name).masked_fill(terms.mask_T == 0, hole) for name in _READ}
        clean, holed = self._corrected(terms), self._corrected(replace(terms, **holes))
        advice = "Leave masked tokens out with torch.where before anything is computed."
        for name in ("weights_T", "mask_T"):
            found_T, wanted_T = (getattr(output, name).where(terms.mask_T != 0, 0.0) for output in (holed, clean))
            require_equal(found_T, wanted_T, f"masked tokens that hold {hole} change {name} of trained ones. {advice}")

    @given(packing=rows(), others=rows())
    def test_a_sequence_does_not_depend_on_the_rest_of_the_batch(self, packing: Packing, others: Packing) -> None:
        alone, together = (
            self._corrected(self._terms(packing, 0.5)),
            self._corrected(self._terms(packing.followed_by(others), 0.5)),
        )
        for name in ("weights_T", "mask_T"):
            found_T, wanted_T = getattr(together, name)[: len(packing.mask)], getattr(alone, name)
            require_equal(found_T, wanted_T, f"{name} of a sequence changes with the other sequences in the batch.")

    @given(packing=st.sampled_from(EMPTY))
    def test_a_rank_without_tokens_is_taken(self, packing: Packing) -> None:
        output = self._corrected(self._terms(packing, 0.5))
        for name in ("weights_T", "mask_T"):
            require_column(name, getattr(output, name), packing.mask_T)

    @given(packing=rows())
    def test_nothing_is_corrected_where_trainer_and_engine_agree(self, packing: Packing) -> None:
        output = self._corrected(self._terms(packing, 0.0))
        trained_T = packing.mask_T != 0
        agree = "trainer and engine give every token the same log-probability, "
        require_equal(output.mask_T, packing.mask_T, f"{agree}and tokens are masked.")
        weights_T = output.weights_T.where(trained_T, 1.0)
        require_equal(weights_T, torch.ones_like(weights_T), f"{agree}and a weight is not 1.")

    @given(packing=rows(), sign=st.sampled_from([1, -1]))
    def test_the_ratio_is_trainer_over_engine(self, packing: Packing, sign: int) -> None:
        terms = self._terms(packing, 0.0)
        moved_T = terms.log_probs_T + sign * STEP
        moved = replace(terms, log_probs_T=moved_T, current_log_probs_T=moved_T)
        output = self._corrected(moved)
        weights_T = output.weights_T[(packing.mask_T * output.mask_T) != 0]
        right = (weights_T >= 1 - 1e-5) if sign > 0 else (weights_T <= 1 + 1e-5)
        side = "likelier" if sign > 0 else "less likely"
        require(
            bool(right.all()),
            f"the trainer finds every token {side} than the engine did, and the weights are {weights_T.tolist()}: the "
            "ratio is the wrong way round.",
        )

    @given(packing=rows(), step=st.sampled_from([STEP, 5.0]))
    def test_what_the_actor_left_is_cut_before_what_it_came_to(self, packing: Packing, step: float) -> None:
        terms = replace(self._terms(packing, 0.0), advantages_T=-torch.ones_like(packing.mask_T))
        then_T = terms.log_probs_T
        rose_T, fell_T = (self._kept(replace(terms, current_log_probs_T=then_T + sign * step)) for sign in (1, -1))
        require(
            self.cuts_what_rose or bool((rose_T >= fell_T).all()),
            f"at negative advantages, tokens that the actor finds {step:g} nats likelier than before its first step "
            f"count {rose_T.tolist()}, and those that it finds as much less likely {fell_T.tolist()}: "
            "current_log_probs_T and log_probs_T are the wrong way round. If that is intended, set cuts_what_rose = "
            "True in the test class.",
        )

    def _kept(self, terms: CorrectionTerms) -> torch.Tensor:
        output = self._corrected(terms)
        return output.weights_T.where((terms.mask_T * output.mask_T) != 0, 0.0)

    def _corrected(self, terms: CorrectionTerms) -> CorrectionOutput:
        output: CorrectionOutput = self.make()(terms)
        kind = type(output).__name__
        require(isinstance(output, CorrectionOutput), f"it returned {kind}; CorrectionOutput is wanted")
        return output

    def _terms(self, packing: Packing, spread: float) -> CorrectionTerms:
        columns = packing.engine_columns(self.traits().reads_engine)
        return replace(_terms(packing, spread), engine_columns_T=columns)


def _terms(packing: Packing, spread: float) -> CorrectionTerms:
    """Return log-probabilities of engine, trainer and current trainer that differ by at most ``spread``."""
    rollout_T = packing.uniform(0, low=-8.0, high=-5.5)
    log_probs_T = rollout_T + packing.uniform(1, low=-spread, high=spread)
    return CorrectionTerms(
        log_probs_T=log_probs_T,
        rollout_log_probs_T=rollout_T,
        mask_T=packing.mask_T,
        segments=packing.segments,
        current_log_probs_T=log_probs_T + packing.uniform(2, low=-spread, high=spread),
        advantages_T=packing.uniform(3, low=-1.0, high=1.0),
    )
