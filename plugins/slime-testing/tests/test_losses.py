"""A policy loss and a correction, right and broken in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slime_testing import CorrectionSuite, PolicyLossSuite

TRAINED = "trained_T = terms.mask_T != 0"
ADVANTAGES = "terms.advantages_T.where(trained_T, 0.0)"
METRICS = '{"ratio": ratio_T.detach()}'
LOSS = f"""
from slime_core import LossOutput

class Loss:
    def __call__(self, terms):
        {TRAINED}
        log_ratio_T = (terms.log_probs_T - terms.old_log_probs_T).where(trained_T, 0.0)
        ratio_T = log_ratio_T.exp()
        loss_T = -ratio_T * {ADVANTAGES}
        return LossOutput(loss_T, {METRICS})
"""
ADDED = 'policy_loss("mine", Loss)'
OTHERS = "the_losses_of_a_sequence_do_not_depend_on_the_rest_of_the_batch"
LEAKS = "what_masked_tokens_hold_does_not_leak"
METRIC = "metrics_are_one_number_a_token_without_gradient"
LOSSES = {
    "an average": ("LossOutput(loss_T", "LossOutput(loss_T.mean()", "every_token_gets_one_finite_loss"),
    "divided by the batch": ("LossOutput(loss_T", "LossOutput(loss_T / trained_T.sum()", OTHERS),
    "advantages whitened": (
        ADVANTAGES,
        f"({ADVANTAGES} - terms.advantages_T[trained_T].mean()).where(trained_T, 0.0)",
        OTHERS,
    ),
    "a loss without a token": (
        "LossOutput(loss_T",
        "LossOutput(loss_T if len(trained_T) else terms.log_probs_T.sum()[None]",
        "a_rank_without_tokens_is_taken",
    ),
    "a mean over masked tokens": (ADVANTAGES, f"({ADVANTAGES} - terms.advantages_T.mean())", LEAKS),
    "masked by a product": (".where(trained_T, 0.0)\n        ratio_T", " * terms.mask_T\n        ratio_T", LEAKS),
    "masked tokens are trained": (
        TRAINED,
        "trained_T = terms.mask_T >= 0",
        "masked_tokens_have_no_loss_and_no_gradient",
    ),
    "detached": ("(terms.log_probs_T -", "(terms.log_probs_T.detach() -", "the_gradient_comes_through_log_probs"),
    "half detached": (
        "LossOutput(loss_T",
        "LossOutput(loss_T.detach() + (0.0 * terms.log_probs_T).where(trained_T, 0.0)",
        "the_gradient_comes_through_log_probs",
    ),
    "input changed": (TRAINED, f"{TRAINED}\n        terms.advantages_T.clamp_(-0.5, 0.5)", "the_terms_are_not_changed"),
    "a metric of the batch": (METRICS, '{"ratio": ratio_T.detach().mean()}', METRIC),
    "a metric with a gradient": (METRICS, '{"ratio": ratio_T}', METRIC),
}

MASK = "terms.mask_T * (ratio_T < 50)"
WEIGHTS = "ratio_T.clamp(max=2.0)"
CORRECTION = f"""
import torch
from slime_core import CorrectionOutput

class Truncated:
    def __call__(self, terms):
        {TRAINED}
        ratio_T = (terms.log_probs_T - terms.rollout_log_probs_T).where(trained_T, 0.0).exp()
        weights_T = {WEIGHTS}
        return CorrectionOutput(weights_T, {MASK}, {{"capped": (ratio_T > 2).float()}})
"""
TRUNCATED = 'correction("mine", Truncated)'
LEFT = "what_the_actor_left_is_cut_before_what_it_came_to"
FLIPPED = (
    MASK,
    "terms.mask_T * ((terms.current_log_probs_T - terms.log_probs_T).where(trained_T, 0.0) < 1)",
    LEFT,
)
SEQUENCE = "a_sequence_does_not_depend_on_the_rest_of_the_batch"
CORRECTIONS = {
    "the mask is widened": (MASK, "(ratio_T < 50).float()", "the_mask_is_never_widened"),
    "the mask is a weight": (MASK, "0.5 * terms.mask_T", "the_mask_is_never_widened"),
    "negative weights": (WEIGHTS, "2 * ratio_T - 1", "weights_are_finite_and_not_negative"),
    "the wrong way round": (
        ").where(trained_T, 0.0).exp()",
        ").where(trained_T, 0.0).neg().exp()",
        "the_ratio_is_trainer_over_engine",
    ),
    "cuts what came nearer": FLIPPED,
    "weights without a difference": (WEIGHTS, "0.5 * ratio_T", "nothing_is_corrected_where_trainer_and_engine_agree"),
    "input changed": (
        "weights_T = ratio_T",
        "terms.mask_T.zero_()\n        weights_T = ratio_T",
        "the_terms_are_not_changed",
    ),
    "weights of sum 1": (WEIGHTS, "ratio_T / ratio_T.sum()", SEQUENCE),
    "weights of mean 1": (WEIGHTS, "ratio_T / ratio_T[trained_T].mean()", SEQUENCE),
    "a weight without a token": (
        WEIGHTS,
        f"{WEIGHTS} if len(ratio_T) else torch.ones(1)",
        "a_rank_without_tokens_is_taken",
    ),
    "masked tokens leak": (
        ".where(trained_T, 0.0).exp()",
        ".exp()\n        ratio_T = ratio_T / ratio_T.mean() * ratio_T.mean()",
        LEAKS,
    ),
    "a metric of the batch": (
        "(ratio_T > 2).float()",
        "(ratio_T > 2).float().mean()",
        "metrics_are_one_number_a_token",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_broken_loss_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(PolicyLossSuite, LOSS, ADDED, LOSSES[name])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_broken_correction_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(CorrectionSuite, CORRECTION, TRUNCATED, CORRECTIONS[name])


def test_right_ones_hold_every_property(holds: Callable[..., None]) -> None:
    holds(PolicyLossSuite, LOSS, ADDED)
    holds(CorrectionSuite, CORRECTION, TRUNCATED)


def test_masked_tokens_of_a_correction_may_have_any_weight(suite_of: Callable[..., Any]) -> None:
    source = CORRECTION.replace(WEIGHTS, "ratio_T.where(ratio_T < 50, float('nan'))")
    suite_of(CorrectionSuite, source, TRUNCATED)().test_weights_are_finite_and_not_negative()


def test_a_masking_of_what_came_nearer_may_be_intended(suite_of: Callable[..., Any]) -> None:
    tested = suite_of(CorrectionSuite, CORRECTION.replace(*FLIPPED[:2]), TRUNCATED, cuts_what_rose=True)
    getattr(tested(), f"test_{LEFT}")()


READS_ENGINE = 'reads_engine={"top": EngineColumn({"top_logprobs_num": 2}, lambda answer: [], width=2)}'


@pytest.mark.parametrize(
    ("suite", "source", "target", "old"),
    [
        (PolicyLossSuite, LOSS, "policy_loss('mine', Loss", ADVANTAGES),
        (CorrectionSuite, CORRECTION, "correction('mine', Truncated", "ratio_T.clamp(max=2.0)"),
    ],
)
def test_a_component_may_read_data_of_the_engine(
    suite: Any, source: str, target: str, old: str, holds: Callable[..., None], violation: Callable[..., str]
) -> None:
    imported = f"from slime_core import EngineColumn\n{source}"
    reading = imported.replace(old, f"{old} * (1.0 + 0.0 * terms.engine_columns_T['top'][:, 0])")
    added = f"{target}, {READS_ENGINE})"
    holds(suite, reading, added)
    name = OTHERS if suite is PolicyLossSuite else "a_sequence_does_not_depend_on_the_rest_of_the_batch"
    whitened = "(terms.engine_columns_T['top'].sum() + 1.0)"
    violation(suite, imported, added, (old, f"{old} * {whitened}", name))
