"""``rollout_data_postprocess_path``: what the function sees of a shard, and what comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_compat.columns import Postprocess
from slime_core.errors import PluginError
from slime_core.learner.micro_batches import PackedMicroBatch, idle_micro_batch, make_micro_batches
from slime_core.types import StepPlan, TrainBatch
from tests.function_paths import options_for


def shard() -> TrainBatch:
    """Three samples of 2 + 1, 1 + 2 and 1 + 1 tokens; the last two share a micro-batch, in the other order."""
    return TrainBatch(
        rollout=5,
        tokens_T=np.arange(8),
        lengths_B=np.array([3, 3, 2]),
        response_lengths_B=np.array([1, 2, 1]),
        loss_mask_U=np.float32([1, 1, 0, 1]),
        loss_weights_B=np.float32([0.5, 0.5, 1.0]),
        rollout_log_probs_U=np.float32([-1, -2, -3, -4]),
        columns_B={"advantages": np.float32([1, 2, 3]), "rewards": np.float32([0, 1, 0])},
        steps=(StepPlan(((0,),)), StepPlan(((2, 1),))),
        indices_B=np.array([7, 8, 9]),
    )


Steps = list[list[PackedMicroBatch]]


def run(folder: Path, body: str, *, max_tokens: int | None = None, critic: bool = False) -> tuple[Any, Steps]:
    """Return what the function saw, and the micro-batches after it, the last one idle."""
    code = f"def f(args, rollout_id, data):\n    args.seen = (rollout_id, dict(data))\n    {body}\n"
    loss = "def loss(args, batch, logits, sum_of_sample_mean): ...\n" if "source" in body else ""
    paths = {"rollout_data_postprocess_path": "f", **({"custom_loss_function_path": "loss"} if loss else {})}
    options = options_for(folder, code + loss, **paths)
    batch = shard()
    if max_tokens is not None:  # the plan counts on shared prefixes, which the model cannot take
        batch = replace(batch, prefix_order_B=np.arange(3), prefix_lengths_B=np.zeros(3, np.int64))
    steps = make_micro_batches(batch, max_tokens=max_tokens)
    steps[1].append(idle_micro_batch(steps[1][0]))
    steps[1][0].fresh_U = torch.ones(len(steps[1][0].mask_U), dtype=torch.bool)
    for micro in (micro for step in steps for micro in step if critic):
        micro.returns_U = micro.advantages_U + 0.5
    Postprocess(options)(batch, steps)
    return options.arguments.seen, steps


def lists(column: Any) -> list[Any]:
    return [values.tolist() for values in column]


def test_a_function_sees_the_columns_in_the_order_of_the_shard(tmp_path: Path) -> None:
    (rollout, seen), _ = run(tmp_path, "pass")
    assert rollout == 5
    assert lists(seen["tokens"]) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert (seen["total_lengths"], seen["response_lengths"], seen["rewards"]) == ([3, 3, 2], [1, 2, 1], [0, 1, 0])
    assert seen["sample_indices"] == [7, 8, 9]
    assert lists(seen["loss_masks"]) == [[1], [1, 0], [1]]
    assert lists(seen["advantages"]) == [[1], [2, 2], [3]]
    assert lists(seen["rollout_log_probs"]) == [[-1], [-2, -3], [-4]]
    assert "log_probs" not in seen


def test_columns_that_a_function_changes_are_trained(tmp_path: Path) -> None:
    body = "data['advantages'] = [a * 10 for a in data['advantages']]; data['loss_masks'][1][0] = 0"
    _, steps = run(tmp_path, f"{body}; data['rollout_log_probs'][2] = [-9.0]")
    first, second, fill = steps[0][0], *steps[1]
    assert first.advantages_U.tolist() == [10.0]
    assert second.advantages_U.tolist() == [30.0, 20.0, 20.0]
    assert second.mask_U.tolist() == [1.0, 0.0, 0.0]
    assert second.weights_U.tolist() == [1.0, 0.5, 0.0]  # the divisors stay
    assert second.rollout_log_probs_U.tolist() == [-9.0, -2.0, -3.0]
    assert fill.mask_U.tolist() == [0.0, 0.0, 0.0]
    assert second.fresh_U.tolist() == [False, True, True]  # parity compares the engine's log-probs


def test_the_critic_learns_the_returns_that_the_function_sets(tmp_path: Path) -> None:
    (_, seen), steps = run(tmp_path, "data['returns'] = [value * 10 for value in data['returns']]", critic=True)
    assert lists(seen["returns"]) == [[1.5], [2.5, 2.5], [3.5]]
    assert steps[0][0].returns_U.tolist() == [15.0]
    assert steps[1][0].returns_U.tolist() == [35.0, 25.0, 25.0]
    assert steps[1][0].advantages_U.tolist() == [3.0, 2.0, 2.0]
    assert "returns" not in steps[0][0].extra


def test_a_plan_that_was_cut_further_gives_and_takes_the_columns_of_the_right_samples(tmp_path: Path) -> None:
    """The second step's [2, 1] counts on shared prefixes, which the model cannot take: two rows, and a repeated one."""
    (_, seen), steps = run(tmp_path, "data['advantages'] = [a * 10 for a in data['advantages']]", max_tokens=3)
    assert lists(seen["advantages"]) == [[1], [2, 2], [3]]
    assert [[micro.members for micro in step] for step in steps] == [[(0,)], [(1,), (2,), (1,)]]
    assert [lists(micro.advantages_U for micro in step) for step in steps] == [[[10]], [[20, 20], [30], [20, 20]]]


def test_another_column_reaches_a_loss_named_by_path(tmp_path: Path) -> None:
    _, steps = run(tmp_path, "data['source'] = ['a', 'b', 'c']")
    assert (steps[1][0].extra["source"], steps[1][0].extra["rewards"]) == (["c", "b"], [0, 1])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("data['other'] = [1, 2, 3]", "other"),
        ("del data['advantages']", "advantages"),
        ("data['rewards'] = [1.0]", "rewards has 1 entries"),
        ("data['advantages'][1] = [1.0]", r"the shapes \(1,\), \(1,\)"),
        ("data['loss_masks'][1][1] = 1", "loss masks train"),
        ("data['tokens'][0][0] = 9", "tokens"),
        ("data['response_lengths'] = [1, 1, 1]", "response_lengths"),
        ("data['rewards'] = 1.0", "rewards is a float"),
        ("data['log_probs'] = None", "log_probs is a NoneType"),
        ("data['advantages'] = {'a': 1, 'b': 2, 'c': 3}", "advantages is a dict"),
        ("data['tokens'] = None", "tokens is a NoneType"),
        ("data['rewards'] = data['advantages'][0].sum()", "rewards is a Tensor"),
        ("data['tokens'] = ['a', 'b', 'c']", "TypeError"),
        ("raise KeyError('x')", "KeyError: 'x'"),
    ],
)
def test_columns_that_cannot_be_trained_are_refused(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        run(tmp_path, body)
