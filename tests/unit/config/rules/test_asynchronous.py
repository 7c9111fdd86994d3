"""The rules of generating ahead: each broken once, with its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load

HERE = Path.cwd()


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


@pytest.mark.parametrize(
    "line",
    [
        "--async-buffer-size 1",
        "--async-buffer-size 1 --max-staleness 1",
        "--async-buffer-size 2 --max-staleness 3 --update-weights-interval 4",
        "--max-staleness 0",
        "--max-staleness 2 --update-weights-interval 0 --num-rollout 3",
        "--async-buffer-size 1 --max-staleness 1 --stale-samples correct --corrections tis",
        "--async-buffer-size 1 --max-staleness 1 --stale-samples correct --use-rollout-logprobs",
        "--async-buffer-size 3 --pause-generation-mode in_place",
    ],
)
def test_what_can_be_kept_breaks_no_rule(line: str) -> None:
    assert broken_rules(line) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--async-buffer-size 1 --colocate",
            "async_buffer_size = 1 generates while the learner trains, and with colocate engines and learner take "
            "turns on the same devices, so that nothing can be generated meanwhile; give 0, or leave colocate out",
        ),
        (
            "--async-buffer-size 1 --load-debug-rollout-data r-{rollout_id}.jsonl",
            "async_buffer_size = 1 has no effect where rollouts are read, because nothing is generated; give 0",
        ),
        (
            "--async-buffer-size 1 --debug-rollout-only",
            "async_buffer_size = 1 has no effect with debug_rollout_only = true: nothing trains that generation could "
            "go beside; give 0",
        ),
        (
            "--async-buffer-size 1 --rollout-function-path mine.py:f",
            "async_buffer_size = 1 begins single groups ahead, and rollout_function_path = mine.py:f makes whole "
            "rollouts when it is called; give 0 (the function may keep generating by itself), or leave the function "
            "out",
        ),
        (
            "--async-buffer-size 2 --true-on-policy-mode",
            "true_on_policy_mode trains only on what the trained weights drew, and async_buffer_size = 2 has weights r "
            "draw what is trained by weights up to r + 2; give 0, or leave the mode out",
        ),
        (
            "--async-buffer-size 1 --keep-old-actor --update-weights-interval 2",
            "keep_old_actor keeps one copy of the weights, those published last, and async_buffer_size = 1 trains what "
            "older ones drew; for the log-probs of the weights that drew each token add --use-rollout-logprobs, and "
            "leave keep_old_actor out",
        ),
        (
            "--max-staleness 1 --debug-rollout-only",
            "max_staleness = 1 has no effect where one half of the loop runs alone; add --max-staleness none",
        ),
        (
            "--max-staleness 0 --update-weights-interval 2",
            "max_staleness = 0, but update_weights_interval = 2 publishes weights after every 2 rollouts: the last "
            "rollout that they draw is trained 1 rollouts later; give a bound of at least 1, or a shorter interval",
        ),
        (
            "--max-staleness 3 --update-weights-interval 0 --num-rollout 9",
            "max_staleness = 3, but update_weights_interval = 0 publishes weights never, and there are num_rollout = "
            "9: the last rollout that they draw is trained 8 rollouts later; give a bound of at least 8, or a shorter "
            "interval",
        ),
        (
            "--max-staleness 0 --async-buffer-size 1",
            "max_staleness = 0 begins no group that would be trained more than 0 rollouts after the weights that drew "
            "it, and async_buffer_size = 1 asks for 1, so that 1 of them would never be there; give a buffer of at "
            "most 0, or a bound of at least 1",
        ),
        (
            "--stale-samples evict",
            "stale_samples = evict has no effect without max_staleness, because no sample is too old; add "
            "--max-staleness N, or leave it out",
        ),
        (
            "--async-buffer-size 1 --max-staleness 1 --stale-samples correct",
            "stale_samples = correct trains samples above max_staleness, and nothing weighs them by how likely they "
            "are today; add --corrections tis, or --use-rollout-logprobs, or choose requeue or evict",
        ),
        (
            "--pause-generation-mode abort",
            "pause_generation_mode = abort has no effect with async_buffer_size = 0: nothing is in flight when weights "
            "are published; add --async-buffer-size 1, or leave it out",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_arithmetic(line: str, message: str) -> None:
    assert broken_rules(line) == [message]
