"""The suite of policy losses: from log-probabilities to one loss per token, with gradients at trained tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st

from slime_core import LossOutput, LossSettings, LossTerms
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

__all__ = ["PolicyLossSuite"]

SETTINGS = (LossSettings(), LossSettings(eps_clip_high=0.28), LossSettings(eps_clip_c=3.0))
settings = st.sampled_from(SETTINGS)


class PolicyLossSuite(ComponentSuite):
    """For policy losses."""

    kind: ClassVar[Kind] = Kind.POLICY_LOSS

    @given(packing=rows(), settings=settings)
    def test_every_token_gets_one_finite_loss(self, packing: Packing, settings: LossSettings) -> None:
        terms = self._terms(packing, settings)
        output = self.make()(terms)
        require(isinstance(output, LossOutput), f"the loss returned {type(output).__name__}; LossOutput is wanted")
        require_column("loss_T", output.loss_T, terms.mask_T)
        require(bool(output.loss_T.isfinite().all()), f"a loss is NaN or infinite: {output.loss_T.tolist()}")

    @given(packing=rows(), settings=settings)
    def test_metrics_are_one_number_a_token_without_gradient(self, packing: Packing, settings: LossSettings) -> None:
        terms = self._terms(packing, settings)
        for name, values_T in self.make()(terms).metrics_T.items():
            require_column(f"the metric {name!r}", values_T, terms.mask_T)
            require(not values_T.requires_grad, f"the metric {name!r} carries a gradient; detach it")

    @given(packing=rows(some_masked=True), settings=settings)
    def test_masked_tokens_have_no_loss_and_no_gradient(self, packing: Packing, settings: LossSettings) -> None:
        terms = self._terms(packing, settings)
        loss_T, gradient_T = self._loss_and_gradient(terms)
        masked_T = terms.mask_T == 0
        require(not loss_T[masked_T].any(), f"masked tokens have the losses {loss_T[masked_T].tolist()}, not exactly 0")
        require(not gradient_T[masked_T].any(), "masked tokens pass a gradient to log_probs_T; it must be exactly 0")

    @given(packing=rows(some_masked=True), settings=settings, hole=st.sampled_from([math.nan, math.inf, -math.inf]))
    def test_what_masked_tokens_hold_does_not_leak(self, packing: Packing, settings: LossSettings, hole: float) -> None:
        terms = self._terms(packing, settings)
        loss_T, gradient_T = self._loss_and_gradient(_with_holes(terms, hole))
        require(
            bool(loss_T.isfinite().all() and gradient_T.isfinite().all()),
            f"masked tokens that hold {hole} make a loss or a gradient NaN or infinite. 0 times infinity is NaN: leave "
            "masked tokens out with torch.where before anything is computed.",
        )
        clean_T, _ = self._loss_and_gradient(terms)
        require_equal(loss_T, clean_T, f"masked tokens that hold {hole} change the loss of trained ones.")

    @given(packing=rows(), others=rows(), settings=settings)
    def test_the_losses_of_a_sequence_do_not_depend_on_the_rest_of_the_batch(
        self, packing: Packing, others: Packing, settings: LossSettings
    ) -> None:
        tokens = len(packing.mask)
        alone = self._loss_and_gradient(self._terms(packing, settings))
        together = self._loss_and_gradient(self._terms(packing.followed_by(others), settings))
        for what, alone_T, together_T in zip(("losses", "gradients"), alone, together, strict=True):
            require_equal(
                together_T[:tokens],
                alone_T,
                f"the {what} of a sequence change with the other sequences in the batch: something is averaged or "
                "normalised over the batch. The core does the averaging.",
            )

    @given(packing=st.sampled_from(EMPTY), settings=settings)
    def test_a_rank_without_tokens_is_taken(self, packing: Packing, settings: LossSettings) -> None:
        terms = self._terms(packing, settings)
        require_column("loss_T", self._loss_and_gradient(terms)[0], terms.mask_T)
        for name, values_T in self.make()(terms).metrics_T.items():
            require_column(f"the metric {name!r}", values_T, terms.mask_T)

    @given(packing=rows(), settings=settings)
    def test_the_terms_are_not_changed(self, packing: Packing, settings: LossSettings) -> None:
        terms = self._terms(packing, settings)
        leaf_T = terms.log_probs_T
        held = replace(terms, log_probs_T=leaf_T * 1.0)  # not a leaf, because torch refuses in-place writes to leaves
        before = {name: column.detach().clone() for name, column in _columns(held).items()}
        self.make()(held)
        require_unchanged(before, {name: column.detach() for name, column in _columns(held).items()})

    @given(packing=rows())
    def test_the_gradient_comes_through_log_probs(self, packing: Packing) -> None:
        terms = self._terms(packing, LossSettings())
        on_policy = replace(terms, old_log_probs_T=terms.log_probs_T.detach().clone())
        trained_T = on_policy.mask_T != 0
        _, gradient_T = self._loss_and_gradient(on_policy)
        require(
            bool(gradient_T[trained_T].all()),
            "on-policy, where no ratio is clipped, a trained token with an advantage passes no gradient to "
            f"log_probs_T: {gradient_T.tolist()}. Is something detached?",
        )

    def _loss_and_gradient(self, terms: LossTerms) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses, and the gradient of their sum with respect to ``log_probs_T``; both [T]."""
        loss_T = self.make()(terms).loss_T
        require(loss_T.requires_grad, "loss_T carries no gradient, so nothing would be trained. Is something detached?")
        (gradient_T,) = torch.autograd.grad(loss_T.sum(), terms.log_probs_T, allow_unused=True)
        require(gradient_T is not None, "the loss does not depend on log_probs_T, so nothing would be trained")
        return loss_T.detach(), gradient_T

    def _terms(self, packing: Packing, settings: LossSettings) -> LossTerms:
        columns = packing.engine_columns(self.traits().reads_engine)
        return replace(_terms(packing, settings), engine_columns_T=columns)


def _terms(packing: Packing, settings: LossSettings) -> LossTerms:
    """Return terms with ratios between e^-0.5 and e^0.5, and advantages of both signs, none near 0."""
    log_probs_T = packing.uniform(0, low=-3.0, high=-0.1)
    uniform_T = packing.uniform(2, low=-2.0, high=2.0)
    return LossTerms(
        log_probs_T=log_probs_T.clone().requires_grad_(),
        old_log_probs_T=log_probs_T + packing.uniform(1, low=-0.5, high=0.5),
        advantages_T=uniform_T + 0.1 * (uniform_T >= 0) - 0.1 * (uniform_T < 0),
        mask_T=packing.mask_T,
        settings=settings,
        segments=packing.segments,
    )


def _columns(terms: LossTerms) -> dict[str, torch.Tensor]:
    names = ("log_probs_T", "old_log_probs_T", "advantages_T", "mask_T")
    return {name: getattr(terms, name) for name in names}


def _with_holes(terms: LossTerms, hole: float) -> LossTerms:
    """Return the terms with ``hole`` instead of all values of masked tokens."""
    masked_T = terms.mask_T == 0
    log_probs_T = terms.log_probs_T.detach().masked_fill(masked_T, hole).requires_grad_()
    others: dict[str, Any] = {
        name: _columns(terms)[name].masked_fill(masked_T, hole) for name in ("old_log_probs_T", "advantages_T")
    }
    return replace(terms, log_probs_T=log_probs_T, **others)
