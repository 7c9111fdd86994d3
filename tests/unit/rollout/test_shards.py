"""Samples become shards: weights, plans and what a rank is given."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slime_core.config.load import load
from slime_core.config.model_config import ForwardFlops
from slime_core.errors import RunError
from slime_core.modeling.layout import ParallelLayout
from slime_core.ops.groups import loss_factor, loss_weights
from slime_core.rollout.shards import (
    BatchPlan,
    batch_metrics,
    grouped_rewards,
    loss_masks,
    make_shards,
    rollout_numbers,
)
from slime_core.types import LogProbs, Mask, Sample, Status, TokenIds, TrainBatch


def sample(index: int, *, prompt: int, response: int, group: int | None = None, **fields) -> Sample:
    """Token ids and log-probs that tell where they come from: sample 3, token 2 is 302."""
    return Sample(
        group_index=index // 2 if group is None else group,
        index=index,
        tokens=TokenIds(100 * index + i for i in range(prompt + response)),
        response_length=response,
        rollout_log_probs=LogProbs(-float(100 * index + i) for i in range(response)),
        reward=float(index),
        status=Status.COMPLETED,
        **fields,
    )


def trained_sums(samples: list[Sample]) -> np.ndarray:
    return np.array([mask.sum() for mask in loss_masks(samples)], np.int64)


def weights(samples: list[Sample], *, per_token: bool = False) -> list[float]:
    return loss_weights(rollout_numbers(samples), trained_sums(samples), per_token=per_token).tolist()


def factor(samples: list[Sample], token_divisor: float | None) -> float:
    return loss_factor(rollout_numbers(samples), trained_sums(samples), token_divisor=token_divisor)


def shards(samples: list[Sample], *, num_ranks: int = 1, max_tokens: int = 64, **plan: Any) -> list[TrainBatch]:
    advantages_B = np.array([10.0 * (s.index or 0) for s in samples], np.float32)
    made = BatchPlan(num_ranks=num_ranks, max_tokens=max_tokens, **plan)
    return make_shards(samples, advantages_B, made, rollout=4, temperature=0.7)


def test_a_mask_is_the_samples_own_or_ones_or_zeros_for_a_removed_sample():
    found = loss_masks(
        [
            sample(0, prompt=1, response=3, loss_mask=Mask([1, 0, 1])),
            sample(1, prompt=1, response=2),
            sample(2, prompt=1, response=2, loss_mask=[1, 1], remove_sample=True),
        ]
    )
    assert [mask.tolist() for mask in found] == [[1, 0, 1], [1, 1], [0, 0]]
    assert {mask.dtype for mask in found} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("mask", "found"), [([1, 1], "2 .* 3"), *(([1, entry, 0], f" {entry};") for entry in (0.5, 2, -1, float("nan")))]
)
def test_a_mask_of_another_length_or_of_other_numbers_than_zero_and_one_is_refused(mask, found):
    with pytest.raises(ValueError, match=f"sample 7: the loss mask .*{found}"):
        loss_masks([sample(7, prompt=1, response=3, loss_mask=mask)])


@pytest.mark.parametrize(
    ("responses", "per_token", "expected"),
    [
        ([(2, {}), (8, {})], False, [1 / 2 / 2, 1 / 2 / 8]),
        ([(2, {}), (6, {"loss_mask": [1, 1, 0, 0, 0, 0]})], True, [1 / 4, 1 / 4]),
        ([(4, {"loss_mask": [1, 0, 0, 1]}), (1, {})], False, [1 / 2 / 2, 1 / 2]),
        ([(1, {"group": 3, "rollout_id": 5}), (2, {"group": 3, "rollout_id": 6}), (3, {"group": 3, "rollout_id": 5})],
         False, [1 / 2 / 4, 1 / 2 / 2, 1 / 2 / 4]),
        ([(1, {"group": 0, "rollout_id": 0}), (2, {"group": 1, "rollout_id": 0}), (3, {"group": 0, "rollout_id": 0})],
         False, [1 / 2 / 4, 1 / 2 / 2, 1 / 2 / 4]),
        ([(1, {"rollout_id": 1}), (4, {})], False, [1 / 2, 1 / 2 / 4]),
    ],
    ids=["responses", "tokens", "masked tokens", "siblings", "one id in two groups", "an id is no position"],
)  # fmt: skip
def test_weights_by_hand(responses: list[Any], per_token: bool, expected: list[float]) -> None:
    samples = [sample(i, prompt=1, response=length, **more) for i, (length, more) in enumerate(responses)]
    assert weights(samples, per_token=per_token) == expected


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.sampled_from([None, 1, 2])), min_size=1), st.booleans())
def test_weights_times_trained_tokens_add_up_to_one(shapes, per_token):
    samples = [
        sample(i, prompt=1, response=length, remove_sample=removed, rollout_id=rollout)
        for i, (length, removed, rollout) in enumerate(shapes)
    ]
    sums_B = np.array([mask.sum() for mask in loss_masks(samples)])
    expected = float(not all(removed for _, removed, _ in shapes))
    assert float((np.array(weights(samples, per_token=per_token)) * sums_B).sum()) == pytest.approx(expected, abs=1e-5)


def test_masked_rollouts_count_in_the_divisor_where_that_is_wanted() -> None:
    # slime: the sum of 4 rollouts' means over 4, masked ones included; ours by default: over the 3 that train.
    samples = [Sample(tokens=[1] * 4, response_length=3) for _ in range(4)]
    sums_B = np.array([3, 0, 1, 2])
    assert loss_factor(rollout_numbers(samples), sums_B, token_divisor=None) == 1.0
    assert loss_factor(rollout_numbers(samples), sums_B, token_divisor=None, counts_masked=True) == 3 / 4
    weights_B = loss_weights(rollout_numbers(samples), sums_B, per_token=False) * (3 / 4)
    assert (weights_B * np.maximum(sums_B, 1)).tolist() == pytest.approx([1 / 4] * 4)
    # Dr. GRPO's constant: 6 tokens over 10 each and 4 rollouts.
    factor = loss_factor(rollout_numbers(samples), sums_B, token_divisor=10.0, counts_masked=True)
    assert factor == pytest.approx(6 / (10 * 4))


@pytest.mark.parametrize(("counts_masked", "expected"), [(False, 1.0), (True, 0.5)])
def test_a_plan_counts_masked_rollouts_in_each_step(counts_masked: bool, expected: float) -> None:
    samples = [sample(i, prompt=1, response=2, remove_sample=i == 1) for i in range(2)]
    (shard,) = shards(samples, counts_masked=counts_masked)
    assert [step.loss_factor for step in shard.steps] == [expected]


def test_a_constant_divisor_by_hand():
    # Responses of 2 and 6 trained tokens by 4: (2 x + 6 y) / 4 / 2, against (2 x + 6 y) / 8 for the mean of tokens.
    samples = [sample(0, prompt=1, response=2), sample(1, prompt=1, response=7, loss_mask=[1, 1, 1, 0, 1, 1, 1])]
    assert factor(samples, 4) == 1.0
    assert factor(samples, 16) == 0.25
    assert factor(samples, None) == 1.0


def test_rewards_are_grouped_by_group_index_and_removed_samples_stay_in():
    samples = [sample(0, prompt=1, response=2), sample(3, prompt=1, response=3, remove_sample=True)]
    samples[1].reward = {"score": 0.5, "format": 1.0}
    samples[0].reward = {"score": 0.25}
    batch = grouped_rewards(samples, loss_masks(samples), key="score")
    assert batch.rewards_B.tolist() == [0.25, 0.5]
    assert batch.groups_B.tolist() == [0, 1]
    assert batch.lengths_B.tolist() == [2, 3]
    assert batch.mask_sums_B.tolist() == [2, 0]


def test_one_shard_by_hand():
    samples = [
        sample(0, prompt=3, response=2, loss_mask=[1, 0]),
        sample(1, prompt=2, response=1),
        sample(2, prompt=1, response=7),
    ]
    (shard,) = shards(samples, max_tokens=8)
    assert shard.tokens_T.tolist() == [0, 1, 2, 3, 4, 100, 101, 102, *range(200, 208)]
    assert (shard.tokens_T.dtype, shard.loss_mask_U.dtype) == (np.int32, np.int8)
    assert shard.lengths_B.tolist() == [5, 3, 8]
    assert shard.response_lengths_B.tolist() == [2, 1, 7]
    assert shard.loss_mask_U.tolist() == [1, 0, 1, 1, 1, 1, 1, 1, 1, 1]
    assert shard.rollout_log_probs_U.tolist() == [0, -1, -100, *(-float(200 + i) for i in range(7))]
    assert shard.loss_weights_B.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 21])
    assert shard.columns_B["advantages"].tolist() == [0, 10, 20]
    assert shard.indices_B.tolist() == [0, 1, 2]
    assert [step.micro_batches for step in shard.steps] == [((2,), (0, 1))]
    assert (shard.rollout, shard.temperature) == (4, 0.7)


def test_siblings_share_an_optimizer_step_wherever_they_stand():
    # Three rollouts, 7 8 9, in two steps: 7 and 8, then 9; the last sample is a third sibling of 7.
    ids = [7, 7, 8, 9, 7]
    samples = [sample(i, prompt=1, response=1, group=0, rollout_id=number) for i, number in enumerate(ids)]
    (shard,) = shards(samples, num_steps=2)
    assert [sorted(place for micro in step.micro_batches for place in micro) for step in shard.steps] == [
        [0, 1, 2, 4],
        [3],
    ]
    assert shard.loss_weights_B.tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 2, 1, 1 / 6])
    assert [step.divisor for step in shard.steps] == [2, 1]


def test_fewer_rollouts_than_steps_are_refused():
    siblings = [sample(i, prompt=1, response=1, group=0, rollout_id=5) for i in range(4)]
    with pytest.raises(ValueError, match=r"1 rollouts .* 2 optimizer steps"):
        shards(siblings, num_steps=2)


def step_losses(found, num_steps: int) -> list[float]:
    """The loss of each step where the loss of a token is its log-prob, as the learner would sum it."""
    totals = [0.0] * num_steps
    for shard in found:
        starts = np.concatenate([[0], np.cumsum(shard.response_lengths_B)])
        for number, step in enumerate(shard.steps):
            for place in (place for micro in step.micro_batches for place in micro):
                span = slice(starts[place], starts[place + 1])
                loss = (shard.loss_mask_U[span] * shard.rollout_log_probs_U[span]).sum()
                totals[number] += float(step.loss_factor * shard.loss_weights_B[place] * loss)
    assert all(len({shard.steps[number].loss_factor for shard in found}) == 1 for number in range(num_steps))
    return totals


PARTS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 12), st.sampled_from([None, 0, 1, 2]), st.integers(0, 4)),
    min_size=8,
    max_size=24,
)
"""Prompt, response, rollout (fanned out where several of a group share one), and what is masked: nothing, some, all,
removed."""

AVERAGES = st.sampled_from([{}, {"per_token": True}, {"token_divisor": 7.0}])


def ragged(parts) -> list[Sample]:
    """Samples in three groups by turns, so that one rollout id occurs in several groups."""
    found = []
    for i, (prompt, response, rollout, masking) in enumerate(parts):
        mask = [1] * response if masking < 2 else [int(masking == 2 and (i + t) % 3 > 0) for t in range(response)]
        one = sample(i, prompt=prompt, response=response, group=i % 3, rollout_id=rollout, loss_mask=Mask(mask))
        one.remove_sample = masking == 4
        found.append(one)
    return found


def by_rollout(samples: list[Sample]) -> list[list[Sample]]:
    """The siblings of each rollout, in the order in which rollouts first occur."""
    rollouts: dict[object, list[Sample]] = {}
    for one in samples:
        key = ("alone", one.index) if one.rollout_id is None else (one.group_index, one.rollout_id)
        rollouts.setdefault(key, []).append(one)
    return list(rollouts.values())


def by_definition(
    rollouts: list[list[Sample]], *, per_token: bool = False, token_divisor: float | None = None
) -> float:
    """The average by its definition, of log-probs in place of losses: rollout after rollout."""
    losses = [
        [
            p
            for one, mask in zip(siblings, loss_masks(siblings), strict=True)
            for p, m in zip(one.rollout_log_probs, mask, strict=True)
            if m
        ]
        for siblings in rollouts
    ]
    trained = [of_rollout for of_rollout in losses if of_rollout]
    if not trained:
        return 0.0
    if per_token:
        return float(np.mean([loss for of_rollout in trained for loss in of_rollout]))
    return float(np.mean([sum(of_rollout) / (token_divisor or len(of_rollout)) for of_rollout in trained]))


@given(
    PARTS,
    AVERAGES,
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(1, 30),
    st.sampled_from([None, 3]),
    st.booleans(),
    st.randoms(),
)
def test_every_average_is_what_it_is_called_however_samples_are_cut(
    parts, average, num_steps, num_ranks, max_tokens, size, by_work, random
):
    samples = ragged(parts)
    random.shuffle(samples)
    rollouts = by_rollout(samples)
    first = -(-len(rollouts) // num_steps)
    of_steps = [rollouts[:first], rollouts[first:]][:num_steps]
    assume(all(sum(map(len, of_step)) >= num_ranks for of_step in of_steps))
    flops = ForwardFlops(per_token=10, per_pair=3) if by_work else None
    plan = {"num_ranks": num_ranks, "num_steps": num_steps, "max_tokens": max_tokens, "micro_batch_size": size}
    found = shards(samples, flops=flops, **plan, **average)
    expected = [by_definition(of_step, **average) for of_step in of_steps]
    assert step_losses(found, num_steps) == pytest.approx(expected, rel=1e-5)
    assert all(step.micro_batches for shard in found for step in shard.steps)


def test_fewer_samples_than_ranks_in_a_step_are_refused():
    with pytest.raises(ValueError, match="--num-steps-per-rollout"):
        shards([sample(i, prompt=1, response=1) for i in range(2)], num_ranks=2, num_steps=2)


def test_a_shard_holds_the_version_of_each_response_that_one_version_sampled():
    recorded = [["7"], ["7", "7"], ["7", "8"], [], ["default"], ["0"], ["-3"]]
    samples = [sample(i, prompt=1, response=1, weight_versions=versions) for i, versions in enumerate(recorded)]
    first, second = shards(samples, num_ranks=2)
    found = dict(zip(first.indices_B.tolist(), first.weight_version_B.tolist(), strict=True))
    found |= dict(zip(second.indices_B.tolist(), second.weight_version_B.tolist(), strict=True))
    assert found == {0: 7, 1: 7, 2: -1, 3: -1, 4: -1, 5: 0, 6: -1}
    assert first.weight_version_B.dtype == np.int64


@pytest.mark.parametrize(("log_probs", "found"), [(None, "none"), ([-1.0], "1")])
def test_response_tokens_without_log_probs_are_refused(log_probs, found):
    broken = sample(0, prompt=1, response=2)
    broken.rollout_log_probs = log_probs
    with pytest.raises(ValueError, match=f"2 response tokens .*log-probs .* {found}"):
        shards([broken])


def answers(*groups: tuple[int, list[int]]) -> list[Sample]:
    """Prompts of so many tokens, which differ by group, and responses of so many each."""
    found = []
    for group, (prompt, responses) in enumerate(groups):
        for response in responses:
            one = sample(len(found), prompt=prompt, response=response)
            one.tokens = TokenIds([1000 + group] * prompt + list(one.tokens)[prompt:])
            found.append(one)
    return found


def plans(samples: list[Sample], **options) -> list[tuple[tuple[int, ...], ...]]:
    plan = BatchPlan(**{"num_ranks": 1, "max_tokens": 20, "share_prompts": True} | options)
    parts = make_shards(samples, None, plan, rollout=0, temperature=1.0)
    assert len({part.prefix_order_B is None for part in parts}) == 1
    return [step.micro_batches for part in parts for step in part.steps]


def test_a_shared_prompt_counts_once_in_the_budget():
    samples = answers((10, [2, 2, 2, 2]), (5, [5, 5]))
    assert plans(samples) == [((0, 1, 2, 3), (4, 5))]
    assert plans(samples, share_prompts=False) == [((0,), (1,), (2,), (3,), (4, 5))]


def test_prompts_are_shared_by_their_tokens_and_not_by_group():
    samples = answers((16, [2, 2]), (16, [2, 2]))
    for one in samples:
        one.group_index = one.index
    assert plans(samples) == [((0, 1), (2, 3))]
    samples[1].tokens = TokenIds([7, *samples[1].tokens[1:]])
    assert plans(samples) == [((2, 3), (0,), (1,))]


def test_too_little_saved_leaves_prompts_repeated():
    plan = BatchPlan(num_ranks=1, max_tokens=64, share_prompts=True)
    few, enough = (
        make_shards(answers((20, [response] * 2)), None, plan, rollout=0, temperature=1.0)[0] for response in (181, 180)
    )  # 20 tokens of 402, and of 400
    assert few.prefix_order_B is None
    assert enough.prefix_lengths_B.tolist() == [0, 20]


def test_every_shard_has_what_its_samples_have_in_common():
    samples = answers((20, [20, 2, 20]))
    samples[2].tokens = TokenIds([*list(samples[0].tokens)[:38], 7, 7])
    plan = BatchPlan(num_ranks=2, max_tokens=64, share_prompts=True)
    first, second = make_shards(samples, None, plan, rollout=0, temperature=1.0)
    assert (first.indices_B.tolist(), second.indices_B.tolist()) == ([0, 2], [1])
    assert (first.prefix_order_B.tolist(), first.prefix_lengths_B.tolist()) == ([1, 0], [0, 38])
    assert (second.prefix_order_B.tolist(), second.prefix_lengths_B.tolist()) == ([0], [0])


def test_sharing_changes_no_weight_and_no_column():
    samples = answers((20, [2, 3]), (10, [5, 1, 4]), (3, [6]))
    advantages_B = np.arange(6, dtype=np.float32)
    found = []
    for share in (False, True):
        plan = BatchPlan(num_ranks=2, max_tokens=30, share_prompts=share)
        parts = make_shards(samples, advantages_B, plan, rollout=0, temperature=1.0)
        columns = [(part.indices_B, part.loss_weights_B, part.columns_B["advantages"]) for part in parts]
        rows = [row for part in columns for row in zip(*(column.tolist() for column in part), strict=True)]
        found.append((sorted(rows), [step.divisor for part in parts for step in part.steps]))
    assert found[0] == found[1]


def plan(*, num_ranks: int = 1, max_tokens: int = 10, **fields) -> BatchPlan:
    return BatchPlan(num_ranks=num_ranks, max_tokens=max_tokens, **fields)


def planned(lengths: list[int], made: BatchPlan) -> list[TrainBatch]:
    samples = [sample(i, prompt=n - 1, response=1) for i, n in enumerate(lengths)]
    return make_shards(samples, np.zeros(len(samples), np.float32), made, rollout=0, temperature=1.0)


def rows(lengths: list[int], made: BatchPlan) -> list[list[list[int]]]:
    """The lengths in every micro-batch of every rank."""
    return [
        [[int(shard.lengths_B[i]) for i in micro] for step in shard.steps for micro in step.micro_batches]
        for shard in planned(lengths, made)
    ]


def test_ranks_that_share_a_row_hold_the_budget_each():
    assert rows([8, 8, 8], plan()) == [[[8], [8], [8]]]
    assert rows([8, 8, 8], plan(context=2)) == [[[8, 8], [8]]]


def test_padding_takes_no_row_above_the_budget():
    # 10 tokens a rank on two ranks; rows are padded to a multiple of 8, so 17 tokens would become 24.
    assert plan(context=2, row_multiple=8).budget == 16
    assert rows([9, 8, 7], plan(context=2, row_multiple=8)) == [[[9, 7], [8]]]
    assert plan(max_tokens=3, row_multiple=8).budget == 3


def test_work_is_balanced_where_tokens_are_not():
    # Of 8 tokens 36 pairs, of 4 tokens 10, of 2 tokens 3: the long sample alone outweighs all others.
    lengths, pairs = [8, 4, 4, 2], ForwardFlops(per_token=0, per_pair=1)
    assert [sum(map(sum, rank)) for rank in rows(lengths, plan(num_ranks=2))] == [10, 8]
    assert [sum(map(sum, rank)) for rank in rows(lengths, plan(num_ranks=2, flops=pairs))] == [8, 10]


def test_samples_above_the_budget_run_alone_with_one_warning():
    assert rows([30, 5, 25, 5], plan(context=2)) == [[[30], [25], [5, 5]]]
    (warning,) = plan(context=2).warnings([30, 5, 25, 5])
    assert "max_tokens_per_gpu" in warning
    assert plan().warnings([10, 5]) == []
    assert plan(micro_batch_size=2).warnings([30]) == []


def test_a_sample_above_a_hard_budget_ends_the_run():
    with pytest.raises(RunError, match="--hard-token-budget"):
        plan(hard=True).warnings([11, 5])
    assert plan(hard=True).warnings([10]) == []
    with pytest.raises(RunError, match="micro_batch_size"):
        plan(hard=True, micro_batch_size=2).warnings([6, 1])


def test_metrics_by_hand():
    # Ranks hold 9 and 4 + 3 tokens, in rows of 9, 4 and 3 that are padded to 12, 4 and 4.
    made = plan(num_ranks=2, max_tokens=4, row_multiple=4, flops=ForwardFlops(per_token=1, per_pair=0))
    found = batch_metrics(planned([9, 4, 3], made), made)
    expected = {"token_imbalance": 9 / 8, "padding_ratio": 4 / 20, "micro_batches_per_rank": 1.5}
    expected["flops_imbalance"] = 9 / 8
    assert found == pytest.approx({f"train/{name}": value for name, value in expected.items()})


def test_imbalance_is_that_of_each_step():
    # Steps of 2 + 6 and 6 + 2 tokens over two ranks: together the ranks are even, in no step they are.
    made = plan(num_ranks=2, num_steps=2)
    assert batch_metrics(planned([2, 6, 2, 6], made), made)["train/token_imbalance"] == 1.5


def test_a_plan_is_what_the_settings_say(tmp_path):
    line = (
        "--advantage-estimator toy --max-tokens-per-gpu 77 --context-parallel-size 2 --actor-num-gpus-per-node 8 "
        "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 3 --num-steps-per-rollout 4 "
        "--loss-token-divisor 5 --hard-token-budget --balance-by-flops"
    )
    config = load(line.split(), check_rules=False).config
    ones = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"), 1)
    shape = {"hidden_size": 2, **ones}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert BatchPlan.of(config, tmp_path) == BatchPlan(
        **{"num_ranks": 2, "num_steps": 4, "max_tokens": 77, "context": 2, "row_multiple": 8, "micro_batch_size": 3},
        hard=True,
        flops=ForwardFlops(per_token=32 + 12 + 4, per_pair=8),
        token_divisor=5,
    )
    assert config.parallel.row_multiple == ParallelLayout.of(config.parallel).row_multiple
