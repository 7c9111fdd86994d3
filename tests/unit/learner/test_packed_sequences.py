from __future__ import annotations

import numpy as np
import pytest

from slime_core.learner.micro_batches import PackedMicroBatch, make_micro_batches
from slime_core.modeling.layout import ParallelLayout
from slime_core.ops.prefixes import Prefixes
from slime_core.types import StepPlan, TrainBatch

Samples = list[tuple[list[int], list[int]]]

ANSWERS: Samples = [([5, 14], [7, 1]), ([5, 14], [8]), ([4], [14, 9]), ([5, 14], []), ([5, 14], [6, 6, 6])]
"""Prompt 5 14 with the responses 7 1, 8 and none; prompt 4 with 14 9; prompt 5 14 with 6 6 6."""

TURNS: Samples = [
    ([1, 2], [3, 4, 5, 6]),
    ([1, 2], [3, 4, 7]),
    ([1, 2, 3, 4, 7], [8, 9]),
    ([1], [2, 9]),
    ([1, 2], [3, 4]),
    ([1, 2], [3, 4, 7]),
]
"""Two continuations of 1 2 3 4, a next turn after one of them, and an edited history; the first turn by itself, and the
second continuation once more."""


def shard(*plan: tuple[int, ...], samples: Samples = ANSWERS, share: bool = True) -> TrainBatch:
    """``share``: the plan counts on every common token."""
    count = sum(len(response) for _, response in samples)
    tokens = [np.array(prompt + response) for prompt, response in samples]
    shared = Prefixes.of(tokens, least=1)
    return TrainBatch(
        rollout=0,
        tokens_T=np.concatenate(tokens),
        lengths_B=np.array([len(prompt + response) for prompt, response in samples]),
        response_lengths_B=np.array([len(response) for _, response in samples]),
        loss_mask_U=np.ones(count, np.float32),
        loss_weights_B=np.arange(1, 1 + len(samples)).astype(np.float32),
        rollout_log_probs_U=-np.arange(count).astype(np.float32),
        columns_B={"advantages": np.arange(len(samples)).astype(np.float32)},
        steps=(StepPlan(plan),),
        indices_B=np.arange(len(samples)),
        prefix_order_B=shared.samples if share else None,
        prefix_lengths_B=shared.common if share else None,
    )


def shared(*plan: tuple[int, ...], samples: Samples = ANSWERS, **options: object) -> list[PackedMicroBatch]:
    (step,) = make_micro_batches(shard(*plan, samples=samples), share=True, **options)
    return step


def test_a_prompt_stands_once_before_its_responses():
    (micro,) = shared((0, 1))
    assert micro.tokens_1T.tolist() == [[5, 14, 7, 1, 8]]
    assert micro.position_ids_1T.tolist() == [[0, 1, 2, 3, 2]]
    assert micro.cu_seqlens.tolist() == [0, 2, 4, 5]
    assert micro.continues.tolist() == [-1, 0, 0]
    assert micro.rows_U.tolist() == [1, 2, 1]
    assert micro.targets_U.tolist() == [7, 1, 8]
    assert (micro.lengths, micro.max_seqlen, micro.num_samples) == ([4, 3], 4, 2)


def test_conversations_stand_as_a_tree_and_a_shared_response_token_has_a_column_in_each_sample():
    (micro,) = shared((0, 1, 2, 3, 4, 5), samples=TURNS)
    assert micro.tokens_1T.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 9]]
    assert micro.cu_seqlens.tolist() == [0, 2, 4, 6, 7, 9, 10]
    assert micro.continues.tolist() == [-1, 0, 1, 1, 3, 0]
    assert micro.position_ids_1T.tolist() == [[0, 1, 2, 3, 4, 5, 4, 5, 6, 2]]
    assert micro.samples_U.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5]
    assert micro.targets_U.tolist() == [3, 4, 5, 6, 3, 4, 7, 8, 9, 2, 9, 3, 4, 3, 4, 7]
    assert micro.rows_U.tolist() == [1, 2, 3, 4, 1, 2, 3, 6, 7, 0, 1, 1, 2, 1, 2, 3]
    assert (micro.lengths, micro.max_seqlen, micro.num_samples) == ([6, 5, 7, 3, 4, 5], 7, 6)


def test_the_order_of_samples_changes_the_order_of_columns_and_nothing_else():
    order = (4, 1, 3, 5, 0, 2)
    (micro,), (turned,) = shared(tuple(range(6)), samples=TURNS), shared(order, samples=TURNS)
    for name in ("tokens_1T", "position_ids_1T", "cu_seqlens"):
        assert getattr(turned, name).tolist() == getattr(micro, name).tolist()
    for name in ("rows_U", "targets_U", "places_U"):
        columns = [getattr(micro, name)[micro.samples_U == sample].tolist() for sample in order]
        assert getattr(turned, name).tolist() == [token for column in columns for token in column]


COLUMNS = ("targets_U", "samples_U", "places_U", "mask_U", "weights_U", "advantages_U", "rollout_log_probs_U")


@pytest.mark.parametrize(
    ("samples", "plan", "tokens"), [(ANSWERS, (4, 0, 2, 3, 1), (17, 11)), (TURNS, (4, 0, 2, 3, 1, 5), (30, 10))]
)
def test_columns_of_response_tokens_are_those_of_repeated_prompts(samples, plan, tokens):
    ((repeated,),), (once,) = make_micro_batches(shard(plan, samples=samples)), shared(plan, samples=samples)
    assert (repeated.num_tokens, once.num_tokens) == tokens
    for name in COLUMNS:
        assert getattr(once, name).tolist() == getattr(repeated, name).tolist(), name
    assert (once.lengths, once.max_seqlen) == (repeated.lengths, repeated.max_seqlen)
    assert repeated.cu_seqlens.diff().tolist() == repeated.lengths


def test_padding_for_sequence_parallelism_continues_nothing():
    (micro,) = shared((0, 1), layout=ParallelLayout(tensor=4, sequence=True))
    assert micro.tokens_1T.tolist() == [[5, 14, 7, 1, 8, 0, 0, 0]]
    assert micro.cu_seqlens.tolist() == [0, 2, 4, 5, 8]
    assert micro.continues.tolist() == [-1, 0, 0, -1]


def test_nothing_is_shared_unless_the_plan_counts_on_it():
    ((micro,),) = make_micro_batches(shard((0, 1), share=False), share=True, max_tokens=1)
    assert micro.tokens_1T.tolist() == [[5, 14, 7, 1, 5, 14, 8]]


def test_without_shared_prompts_micro_batches_are_split_to_the_budget():
    (step,) = make_micro_batches(shard((0, 1, 2)), max_tokens=7)
    assert [micro.tokens_1T.tolist() for micro in step] == [[[5, 14, 7, 1, 5, 14, 8]], [[4, 14, 9]]]
    assert [micro.weights_U.tolist() for micro in step] == [[1, 1, 2], [3, 3]]
