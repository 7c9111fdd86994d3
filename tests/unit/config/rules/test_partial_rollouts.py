"""The rules of over-sampling, of responses that go on and of samples that failed: each broken once, with its text."""

from __future__ import annotations

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


@pytest.mark.parametrize(
    "line",
    [
        "--rollout-batch-size 8 --over-sampling-batch-size 8",
        "--rollout-batch-size 8 --over-sampling-batch-size 20 --partial-rollout",
        "--async-buffer-size 1 --pause-generation-mode abort --partial-rollout --mask-offpolicy-in-partial-rollout",
        "--partial-rollout --generate-function mine",
        "--failed-samples retry --failed-sample-retries 5",
        "--over-sampling-batch-size 64 --max-staleness 0 --true-on-policy-mode --kl-loss-coef 0",
    ],
)
def test_what_can_be_kept_breaks_no_rule(line: str) -> None:
    assert broken_rules(line) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--rollout-batch-size 8 --over-sampling-batch-size 7",
            "over_sampling_batch_size = 7 begins fewer prompts than rollout_batch_size = 8 takes; give at least 8, or "
            "leave it out",
        ),
        (
            "--partial-rollout",
            "partial_rollout goes on with responses that were ended before their time, and none is: give "
            "--over-sampling-batch-size N, or --async-buffer-size N with --pause-generation-mode abort, or leave it "
            "out",
        ),
        (
            "--partial-rollout --over-sampling-batch-size 64 --async-buffer-size 2",
            "partial_rollout goes on with responses that were ended before their time, and none is with "
            "async_buffer_size = 2, where they go on meanwhile: give --pause-generation-mode abort, or leave it out",
        ),
        (
            "--over-sampling-batch-size 64 --true-on-policy-mode",
            "true_on_policy_mode trains only on what the trained weights drew, and over_sampling_batch_size = 64 keeps "
            "groups that finish besides for later rollouts; add --max-staleness 0, with which they are drawn anew, or "
            "leave one of the two out",
        ),
        (
            "--over-sampling-batch-size 64 --keep-old-actor --update-weights-interval 2",
            "keep_old_actor keeps one copy of the weights, those published last, and over_sampling_batch_size = 64 "
            "keeps groups that older ones drew; for the log-probs of the weights that drew each token add "
            "--use-rollout-logprobs, and leave keep_old_actor out",
        ),
    ],
)
def test_a_broken_rule_says_so(line: str, message: str) -> None:
    assert broken_rules(line) == [message]
