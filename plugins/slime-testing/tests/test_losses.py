"""The clipped policy loss of the core, and a correction, broken in one place."""

from __future__ import annotations

import pytest

from slime_testing import CorrectionSuite, PolicyLossSuite
from slime_testing.suite import properties

LOSS = """
from slime_core import Component, hookimpl

@hookimpl
def slime_register_policy_losses():
    yield Component("mine", target=f"{__name__}:Clipped")
"""
RETURNED = "return LossOutput(surrogate.loss_T, surrogate.metrics(log_ratio_T))"
LOSSES = {
    "an average": (
        RETURNED,
        "return LossOutput(surrogate.loss_T.mean(), surrogate.metrics(log_ratio_T))",
        "every_token_gets_one_finite_loss",
    ),
    "divided by the batch": (
        RETURNED,
        "return LossOutput(surrogate.loss_T / trained_T.sum(), surrogate.metrics(log_ratio_T))",
        "the_losses_of_a_sequence_do_not_depend_on_the_rest_of_the_batch",
    ),
    "advantages whitened over the micro-batch": (
        "trained_T = terms.mask_T != 0",
        "import dataclasses\n        trained_T = terms.mask_T != 0\n"
        "        kept_T = terms.advantages_T[trained_T]\n"
        "        white_T = (terms.advantages_T - kept_T.mean()) / (kept_T.std(unbiased=False) + 1e-6)\n"
        "        terms = dataclasses.replace(terms, advantages_T=white_T)",
        "the_losses_of_a_sequence_do_not_depend_on_the_rest_of_the_batch",
    ),
    "one loss where there is no token": (
        "return LossOutput(surrogate.loss_T, ",
        "loss_T = surrogate.loss_T if len(trained_T) else terms.log_probs_T.sum()[None]\n"
        "        return LossOutput(loss_T, ",
        "a_rank_without_tokens_is_taken",
    ),
    "advantages whitened again": (
        "advantages_T=terms.advantages_T.where",
        "advantages_T=(terms.advantages_T - terms.advantages_T.mean() + 0 * terms.log_probs_T.detach().sum()).where",
        "what_masked_tokens_hold_does_not_leak",
    ),
    "masked tokens are trained": (
        "trained_T = terms.mask_T != 0",
        "trained_T = terms.mask_T >= 0",
        "masked_tokens_have_no_loss_and_no_gradient",
    ),
    "masked by a product": (
        RETURNED,
        "return LossOutput(-(terms.log_probs_T - terms.old_log_probs_T).exp() * terms.advantages_T * terms.mask_T, {})",
        "what_masked_tokens_hold_does_not_leak",
    ),
    "detached": (
        "(terms.log_probs_T - terms.old",
        "(terms.log_probs_T.detach() - terms.old",
        "the_gradient_comes_through_log_probs",
    ),
    "half detached": (
        RETURNED,
        "loss_T = surrogate.loss_T.detach() + (0.0 * terms.log_probs_T).where(trained_T, 0.0)\n"
        "        return LossOutput(loss_T, surrogate.metrics(log_ratio_T))",
        "the_gradient_comes_through_log_probs",
    ),
    "input changed": (
        "trained_T = terms.mask_T != 0",
        "trained_T = terms.mask_T != 0\n        terms.advantages_T.clamp_(-0.5, 0.5)",
        "the_terms_are_not_changed",
    ),
    "a metric of the batch": (
        RETURNED,
        RETURNED.replace("log_ratio_T))", "log_ratio_T) | {'ratio': surrogate.ratio_T.mean()})"),
        "metrics_are_one_number_a_token_without_gradient",
    ),
    "a metric with a gradient": (
        RETURNED,
        RETURNED.replace("log_ratio_T))", "log_ratio_T) | {'ppo_kl': -log_ratio_T})"),
        "metrics_are_one_number_a_token_without_gradient",
    ),
}

CORRECTION = """
import torch
from slime_core import Component, CorrectionOutput, hookimpl

@hookimpl
def slime_register_corrections():
    yield Component("mine", target=f"{__name__}:Truncated")

class Truncated:
    def __init__(self, options, run): pass

    def __call__(self, terms):
        trained_T = terms.mask_T != 0
        ratio_T = (terms.log_probs_T - terms.rollout_log_probs_T).where(trained_T, 0.0).exp()
        weights_T = ratio_T.clamp(max=2.0)
        return CorrectionOutput(weights_T, terms.mask_T * (ratio_T < 50), {"capped": (ratio_T > 2).float()})
"""
DIFFERENCE = "(terms.log_probs_T - terms.rollout_log_probs_T)"
CORRECTIONS = {
    "the mask is widened": ("terms.mask_T * (ratio_T < 50)", "(ratio_T < 50).float()", "the_mask_is_never_widened"),
    "the mask is a weight": ("terms.mask_T * (ratio_T < 50)", "0.5 * terms.mask_T", "the_mask_is_never_widened"),
    "negative weights": ("ratio_T.clamp(max=2.0)", "2 * ratio_T - 1", "weights_are_finite_and_not_negative"),
    "the wrong way round": (
        DIFFERENCE,
        "(terms.rollout_log_probs_T - terms.log_probs_T)",
        "the_ratio_is_trainer_over_engine",
    ),
    "the wrong way round, of the actor as it trains": (
        "terms.mask_T * (ratio_T < 50)",
        "terms.mask_T * ((terms.current_log_probs_T - terms.log_probs_T).where(trained_T, 0.0) < 1)",
        "what_the_actor_left_is_cut_before_what_it_came_to",
    ),
    "it corrects nothing away": (
        "ratio_T.clamp(max=2.0)",
        "0.5 * ratio_T",
        "nothing_is_corrected_where_trainer_and_engine_agree",
    ),
    "input changed": (
        "weights_T = ratio_T",
        "terms.mask_T.zero_()\n        weights_T = ratio_T",
        "the_terms_are_not_changed",
    ),
    "weights of mean 1": (
        "ratio_T.clamp(max=2.0)",
        "(ratio_T / ratio_T.sum())",
        "a_sequence_does_not_depend_on_the_rest_of_the_batch",
    ),
    "weights of mean 1 over equal batches": (
        "ratio_T.clamp(max=2.0)",
        "ratio_T / ratio_T[trained_T].mean()",
        "a_sequence_does_not_depend_on_the_rest_of_the_batch",
    ),
    "one weight where there is no token": (
        "weights_T = ratio_T.clamp(max=2.0)",
        "weights_T = ratio_T.clamp(max=2.0) if len(ratio_T) else torch.ones(1)",
        "a_rank_without_tokens_is_taken",
    ),
    "masked tokens leak": (
        ".where(trained_T, 0.0).exp()",
        ".exp()\n        ratio_T = ratio_T / ratio_T.mean() * ratio_T.mean()",
        "what_masked_tokens_hold_does_not_leak",
    ),
    "a metric of the batch": (
        "(ratio_T > 2).float()",
        "(ratio_T > 2).float().mean()",
        "metrics_are_one_number_a_token",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_broken_loss_is_caught_by_the_property_that_names_it(name, first_party, broken, violation):
    old, new, prop, *error = LOSSES[name]
    source = broken(first_party("slime_core/builtin/losses.py", LOSS), old, new)
    violation(PolicyLossSuite, source, prop, *error)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_broken_correction_is_caught_by_the_property_that_names_it(name, broken, violation):
    old, new, prop, *error = CORRECTIONS[name]
    violation(CorrectionSuite, broken(CORRECTION, old, new), prop, *error)


@pytest.mark.parametrize("name", properties(CorrectionSuite))
def test_the_right_correction_holds_every_property(name, suite_of):
    getattr(suite_of(CorrectionSuite, CORRECTION)(), name)()


def test_masked_tokens_of_a_correction_may_have_any_weight(broken, suite_of):
    without = broken(CORRECTION, "ratio_T.clamp(max=2.0)", "ratio_T.where(ratio_T < 50, float('nan'))")
    suite_of(CorrectionSuite, without)().test_weights_are_finite_and_not_negative()


def test_a_loss_that_reads_the_first_token_fails_where_there_is_none(first_party, broken, suite_of):
    old, new = "trained_T = terms.mask_T != 0", "terms.log_probs_T.max()\n        trained_T = terms.mask_T != 0"
    tested = suite_of(PolicyLossSuite, broken(first_party("slime_core/builtin/losses.py", LOSS), old, new))()
    with pytest.raises(RuntimeError, match="numel"):
        tested.test_a_rank_without_tokens_is_taken()


OPSM = """
from slime_core import Component, hookimpl

@hookimpl
def slime_options():
    return OffPolicyOptions

@hookimpl
def slime_register_corrections():
    yield Component("mine", target=f"{__name__}:OffPolicySequenceMasking")
"""
LEFT = "what_the_actor_left_is_cut_before_what_it_came_to"


@pytest.fixture
def flipped(first_party, broken) -> str:
    """Off-policy sequence masking that takes out what came nearer."""
    source = first_party("plugins/slime-offpolicy/src/slime_offpolicy/sequences.py", OPSM)
    return broken(source, "(terms.log_probs_T - current_T)", "(current_T - terms.log_probs_T)")


def test_a_masking_of_what_came_nearer_is_caught(flipped, violation):
    words = violation(CorrectionSuite, flipped, LEFT)
    assert "current_log_probs_T and log_probs_T" in words


def test_a_masking_of_what_came_nearer_may_be_meant(flipped, suite_of):
    getattr(suite_of(CorrectionSuite, flipped, cuts_what_rose=True)(), f"test_{LEFT}")()
