"""Advantage estimators of both scopes, right and broken in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slime_testing import AdvantageEstimatorSuite, TokenAdvantageEstimatorSuite

CENTRED = "batch.rewards_B - means_G[group_B]"
RETURNED = "(centred_B / divisor_B).astype(np.float32)"
SPREAD = "np.sqrt(np.bincount(group_B, weights_B * centred_B**2) / counts_G)[group_B]"
GROUPS = f"""
import numpy as np

EPS = 1e-6

class Estimator:
    def estimate(self, batch):
        _, group_B = np.unique(batch.groups_B, return_inverse=True)
        _, rollout_B, sizes_R = np.unique(batch.rollouts_B, return_inverse=True, return_counts=True)
        weights_B = 1 / sizes_R[rollout_B]
        counts_G = np.bincount(group_B, weights_B)
        means_G = np.bincount(group_B, weights_B * batch.rewards_B) / counts_G
        centred_B = {CENTRED}
        divisor_B = {SPREAD} + EPS
        return {RETURNED}
"""
ADDED = 'advantage_estimator("mine", Estimator, reads={"rewards", "groups", "rollouts"})'
SAMPLE = {
    "no epsilon": (" + EPS", "", "constant_rewards_give_finite_advantages"),
    "epsilon too small": ("EPS = 1e-6", "EPS = 1e-15", "a_negligible_difference_of_rewards_stays_negligible"),
    "deviation of the batch": (SPREAD, "batch.rewards_B.std()", "other_groups_change_nothing"),
    "mean of the batch": (CENTRED, "batch.rewards_B - batch.rewards_B.mean()", "other_groups_change_nothing"),
    "input changed": ("divisor_B = ", "batch.rewards_B[:] += 1\n        divisor_B = ", "the_batch_is_not_changed"),
    "groups taken as blocks": (
        "np.unique(batch.groups_B,",
        "np.unique(np.cumsum(np.diff(batch.groups_B, prepend=0) != 0),",
        "permuting_the_samples_permutes_the_advantages",
    ),
    "sorted": (RETURNED, f"np.sort({RETURNED})", "permuting_the_samples_permutes_the_advantages"),
    "the id is a number": (
        "(centred_B",
        "((1 + 0.01 * batch.groups_B) * centred_B",
        "group_ids_are_names_without_meaning",
    ),
    "the wrong sign": (CENTRED, f"-({CENTRED})", "a_higher_reward_in_a_group_never_has_the_lower_advantage"),
    "float64": (".astype(np.float32)", "", "every_sample_gets_one_finite_float32_number"),
    "one number for the batch": (RETURNED, f"{RETURNED}[:1]", "every_sample_gets_one_finite_float32_number"),
    "reads an undeclared column": (
        "/ divisor_B",
        "/ divisor_B / batch.lengths_B",
        "only_the_declared_columns_are_read",
    ),
    "siblings counted each": (
        "1 / sizes_R[rollout_B]",
        "np.ones(len(group_B))",
        "a_rollout_that_fanned_out_counts_once",
    ),
}

SUMS = "reduce.sum(torch.stack([(raw_U * batch.mask_U).sum(), batch.mask_U.sum()]))"
ADVANTAGES = "TokenAdvantages(raw_U * torch.rsqrt(variance + 1e-8) * batch.mask_U, returns_U)"
VARIANCE = "variance = reduce.sum("
WHITENED = f"""
import torch
from slime_core import TokenAdvantages

class Estimator:
    def estimate(self, batch, reduce):
        rows = zip(batch.rewards_B.tolist(), batch.values_U.split(batch.lengths_B.tolist()))
        raw_U = torch.cat([self.row(reward, values, batch.settings) for reward, values in rows])
        returns_U = raw_U + batch.values_U
        sums = {SUMS}
        raw_U = raw_U - sums[0] / sums[1]
        {VARIANCE}(raw_U.square() * batch.mask_U).sum()) / sums[1]
        return {ADVANTAGES}

    def row(self, reward, values, settings):
        advantages, later, following = [], 0.0, 0.0
        for place, value in enumerate(reversed(values.tolist())):
            delta = (reward if place == 0 else 0.0) + settings.gamma * following - value
            later = delta + settings.gamma * settings.lambd * later
            following = value
            advantages.append(later)
        return torch.tensor(advantages[::-1])
"""
ADDED_TOKEN = 'advantage_estimator("mine", Estimator, scope="token", reads={"rewards", "values"})'
SPLIT = "how_samples_are_split_over_ranks_changes_nothing"
TOKEN = {
    "no epsilon": ("variance + 1e-8", "variance", "constant_rewards_give_finite_advantages"),
    "the mean of the rank": (SUMS, SUMS.removeprefix("reduce.sum"), SPLIT),
    "a reduction that one rank leaves out": (
        VARIANCE,
        f"if len(batch.lengths_B) > 1: reduce.sum(batch.mask_U.sum())\n        {VARIANCE}",
        SPLIT,
    ),
    "reductions of different shapes": (VARIANCE, f"reduce.sum(batch.rewards_B)\n        {VARIANCE}", SPLIT),
    "counts padding": ("batch.mask_U.sum()])", "raw_U.new_tensor(len(raw_U))])", "padding_changes_nothing"),
    "a metric of the batch": ("returns_U)", "returns_U, {'spread': variance})", "metrics_are_one_number_a_token"),
    "divides by the length": (
        VARIANCE,
        f"raw_U = raw_U + 0 * (1 / batch.lengths_B).sum()\n        {VARIANCE}",
        "a_response_without_tokens_is_taken",
    ),
    "input changed": ("rows = zip", "batch.rewards_B.clamp_(max=0.75)\n        rows = zip", "the_batch_is_not_changed"),
    "no returns": (", returns_U)", ")", "an_estimator_that_reads_values_gives_returns"),
    "one number per sample": (
        ADVANTAGES,
        "TokenAdvantages(batch.rewards_B, returns_U)",
        "every_token_gets_one_finite_advantage",
    ),
    "the first sample is special": (
        "batch.rewards_B.tolist()",
        "[0.0, *batch.rewards_B.tolist()[1:]]",
        "permuting_the_samples_permutes_the_advantages",
    ),
}

OF_TOKENS = """
import torch
from slime_core import TokenAdvantages

class Estimator:
    def estimate(self, batch, reduce):
        texts = batch.tokens_T.split(batch.total_lengths_B.tolist())
        responses = [text[len(text) - length :] for text, length in zip(texts, batch.lengths_B.tolist())]
        assert all(len(text) > len(response) for text, response in zip(texts, responses)), "no prompt"
        return TokenAdvantages(torch.cat(responses) % 2 * batch.rewards_B[batch.samples_U])
"""
ADDED_TOKENS = ADDED_TOKEN.replace('"values"', '"tokens"')
TOKENS = {
    "tokens changed": ("texts = batch", "batch.tokens_T.zero_()\n        texts = batch", "the_batch_is_not_changed"),
    "texts of other samples": (
        "torch.cat(responses)",
        "batch.tokens_T[: len(batch.samples_U)]",
        "permuting_the_samples_permutes_the_advantages",
    ),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_broken_estimator_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(AdvantageEstimatorSuite, GROUPS, ADDED, SAMPLE[name])


@pytest.mark.parametrize("name", TOKEN)
def test_a_broken_estimator_of_tokens_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(TokenAdvantageEstimatorSuite, WHITENED, ADDED_TOKEN, TOKEN[name])


@pytest.mark.parametrize("name", TOKENS)
def test_a_broken_estimator_that_reads_token_ids_is_caught(name: str, violation: Callable[..., str]) -> None:
    violation(TokenAdvantageEstimatorSuite, OF_TOKENS, ADDED_TOKENS, TOKENS[name])


def test_right_ones_hold_every_property(holds: Callable[..., None]) -> None:
    holds(AdvantageEstimatorSuite, GROUPS, ADDED)
    holds(TokenAdvantageEstimatorSuite, WHITENED, ADDED_TOKEN)
    holds(TokenAdvantageEstimatorSuite, OF_TOKENS, ADDED_TOKENS)


def test_an_estimator_that_declares_it_may_look_at_other_groups(suite_of: Callable[..., Any]) -> None:
    whitened, declared = GROUPS.replace(SPREAD, "batch.rewards_B.std()"), ADDED.replace("})", "}, across_groups=True)")
    suite_of(AdvantageEstimatorSuite, whitened, declared)().test_other_groups_change_nothing()


def test_the_suite_of_the_other_scope_names_the_right_one(violation: Callable[..., str]) -> None:
    message = violation(TokenAdvantageEstimatorSuite, GROUPS, ADDED, ("EPS", "EPS", "the_scope_is_token"))
    assert "AdvantageEstimatorSuite" in message
