"""Generalised advantage estimation with whitening, right and broken in one place."""

from __future__ import annotations

import pytest

from slime_testing import TokenAdvantageEstimatorSuite
from slime_testing.suite import properties

SOURCE = """
import torch
from slime_core import AdvantageTraits, Component, TokenAdvantages, hookimpl

@hookimpl
def slime_register_advantage_estimators():
    traits = AdvantageTraits(scope="token", reads={"rewards", "values"})
    yield Component("mine", target=f"{__name__}:Whitened", traits=traits)

class Whitened:
    def __init__(self, options, run): pass

    def estimate(self, batch, reduce):
        rows = zip(batch.rewards_B.tolist(), batch.values_U.split(batch.lengths_B.tolist()))
        raw_U = torch.cat([self.row(reward, values, batch.settings) for reward, values in rows])
        returns_U = raw_U + batch.values_U
        sums = reduce.sum(torch.stack([(raw_U * batch.mask_U).sum(), batch.mask_U.sum()]))
        raw_U = raw_U - sums[0] / sums[1]
        variance = reduce.sum((raw_U.square() * batch.mask_U).sum()) / sums[1]
        return TokenAdvantages(raw_U * torch.rsqrt(variance + 1e-8) * batch.mask_U, returns_U)

    def row(self, reward, values, settings):
        found, later, following = [], 0.0, 0.0
        for place, value in enumerate(reversed(values.tolist())):
            delta = (reward if place == 0 else 0.0) + settings.gamma * following - value
            later = delta + settings.gamma * settings.lambd * later
            following = value
            found.append(later)
        return torch.tensor(found[::-1])
"""
SUMS = "reduce.sum(torch.stack([(raw_U * batch.mask_U).sum(), batch.mask_U.sum()]))"
RETURNED = "TokenAdvantages(raw_U * torch.rsqrt(variance + 1e-8) * batch.mask_U, returns_U)"

TOKENS = """
import torch
from slime_core import AdvantageTraits, Component, TokenAdvantages, hookimpl

@hookimpl
def slime_register_advantage_estimators():
    traits = AdvantageTraits(scope="token", reads={"rewards", "tokens"})
    yield Component("mine", target=f"{__name__}:Odd", traits=traits)

class Odd:
    def __init__(self, options, run): pass

    def estimate(self, batch, reduce):
        texts = batch.tokens_T.split(batch.total_lengths_B.tolist())
        responses = [text[len(text) - length :] for text, length in zip(texts, batch.lengths_B.tolist())]
        assert all(len(text) > len(response) for text, response in zip(texts, responses)), "no prompt"
        return TokenAdvantages(torch.cat(responses) % 2 * batch.rewards_B[batch.samples_U])
"""

GALLERY = {
    "no epsilon": ("variance + 1e-8", "variance", "constant_rewards_give_finite_advantages"),
    "the rank's own mean": (SUMS, SUMS.removeprefix("reduce.sum"), "how_samples_are_split_over_ranks_changes_nothing"),
    "a reduction that one rank leaves out": (
        "variance = reduce.sum(",
        "if len(batch.lengths_B) > 1: reduce.sum(batch.mask_U.sum())\n        variance = reduce.sum(",
        "how_samples_are_split_over_ranks_changes_nothing",
    ),
    "reductions of different shapes": (
        "variance = reduce.sum(",
        "reduce.sum(batch.rewards_B)\n        variance = reduce.sum(",
        "how_samples_are_split_over_ranks_changes_nothing",
    ),
    "counts padding": ("batch.mask_U.sum()])", "raw_U.new_tensor(len(raw_U))])", "padding_changes_nothing"),
    "a metric of the batch": (
        RETURNED,
        RETURNED.replace("returns_U)", "returns_U, {'spread': variance})"),
        "metrics_are_one_number_a_token",
    ),
    "divides by the length": (
        "variance = reduce.sum(",
        "raw_U = raw_U + 0 * (1 / batch.lengths_B).sum()\n        variance = reduce.sum(",
        "a_response_without_tokens_is_taken",
    ),
    "input changed": ("rows = zip", "batch.rewards_B.clamp_(max=0.75)\n        rows = zip", "the_batch_is_not_changed"),
    "no returns": (", returns_U)", ")", "an_estimator_that_reads_values_gives_returns"),
    "one number per sample": (
        RETURNED,
        "TokenAdvantages(batch.rewards_B, returns_U)",
        "every_token_gets_one_finite_advantage",
    ),
    "the first sample is special": (
        "batch.rewards_B.tolist()",
        "[0.0, *batch.rewards_B.tolist()[1:]]",
        "permuting_the_samples_permutes_the_advantages",
    ),
}


@pytest.mark.parametrize("name", GALLERY)
def test_a_broken_estimator_is_caught_by_the_property_that_names_it(name, broken, violation):
    old, new, prop, *error = GALLERY[name]
    violation(TokenAdvantageEstimatorSuite, broken(SOURCE, old, new), prop, *error)


@pytest.mark.parametrize("name", properties(TokenAdvantageEstimatorSuite))
def test_the_right_one_holds_every_property(name, suite_of):
    getattr(suite_of(TokenAdvantageEstimatorSuite, SOURCE)(), name)()


@pytest.mark.parametrize("name", properties(TokenAdvantageEstimatorSuite))
def test_an_estimator_that_reads_tokens_gets_them_and_holds_every_property(name, suite_of):
    getattr(suite_of(TokenAdvantageEstimatorSuite, TOKENS)(), name)()


def test_tokens_that_are_written_to_are_found(broken, violation):
    writing = broken(TOKENS, "texts = batch", "batch.tokens_T.zero_()\n        texts = batch")
    found = violation(TokenAdvantageEstimatorSuite, writing, "the_batch_is_not_changed")
    assert "changed in place: tokens_T" in found


def test_an_estimator_that_mixes_up_the_texts_of_samples_is_found(broken, violation):
    mixed = broken(TOKENS, "torch.cat(responses)", "batch.tokens_T[: len(batch.samples_U)]")
    found = violation(TokenAdvantageEstimatorSuite, mixed, "permuting_the_samples_permutes_the_advantages")
    assert "order of the samples" in found
