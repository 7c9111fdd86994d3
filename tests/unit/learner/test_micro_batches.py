from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_core.learner.micro_batches import idle_micro_batch, make_micro_batches
from slime_core.modeling.layout import ParallelLayout
from slime_core.types import StepPlan, TrainBatch


def shard(*plans: tuple[tuple[int, ...], ...]) -> TrainBatch:
    """Sample 0: prompt 5 14 5, response 7 1. Sample 1: prompt 20 21, response 22."""
    return TrainBatch(
        rollout=0,
        tokens_T=np.array([5, 14, 5, 7, 1, 20, 21, 22], np.int32),
        lengths_B=np.array([5, 3]),
        response_lengths_B=np.array([2, 1]),
        loss_mask_U=np.array([1, 0, 1], np.int8),
        loss_weights_B=np.array([0.5, 0.25], np.float32),
        rollout_log_probs_U=np.array([-0.1, -0.2, -0.3], np.float32),
        columns_B={"advantages": np.array([2, -1], np.float32)},
        steps=tuple(StepPlan(plan) for plan in plans),
        indices_B=np.array([10, 11]),
        temperature=0.7,
    )


def test_two_samples_in_one_row_by_hand():
    ((micro,),) = make_micro_batches(shard(((0, 1),)))
    assert micro.tokens_1T.tolist() == [[5, 14, 5, 7, 1, 20, 21, 22]]
    assert micro.position_ids_1T.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert micro.cu_seqlens.tolist() == [0, 5, 8]
    assert micro.max_seqlen == 5
    assert micro.rows_U.tolist() == [2, 3, 6]
    assert micro.targets_U.tolist() == [7, 1, 22]
    assert micro.samples_U.tolist() == [0, 0, 1]
    assert micro.mask_U.tolist() == [1, 0, 1]
    assert micro.weights_U.tolist() == [0.5, 0, 0.25]
    assert micro.advantages_U.tolist() == [2, 2, -1]
    assert micro.rollout_log_probs_U.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert (micro.num_tokens, micro.temperature) == (8, 0.7)
    assert (micro.old_log_probs_U, micro.ref_log_probs_U) == (None, None)
    assert micro.lengths == [5, 3]


def test_the_other_order_moves_everything_along():
    ((micro,),) = make_micro_batches(shard(((1, 0),)))
    assert micro.tokens_1T.tolist() == [[20, 21, 22, 5, 14, 5, 7, 1]]
    assert micro.rows_U.tolist() == [1, 5, 6]
    assert micro.targets_U.tolist() == [22, 7, 1]
    assert micro.samples_U.tolist() == [0, 1, 1]
    assert micro.weights_U.tolist() == [0.25, 0.5, 0]
    assert micro.advantages_U.tolist() == [-1, 2, 2]
    assert micro.rollout_log_probs_U.tolist() == pytest.approx([-0.3, -0.1, -0.2])


def test_micro_batches_and_steps_are_those_of_the_plan():
    (together,) = make_micro_batches(shard(((0,), (1,))))
    first, second = make_micro_batches(shard(((1,),), ((0,),)))
    assert [micro.tokens_1T.tolist() for micro in together] == [[[5, 14, 5, 7, 1]], [[20, 21, 22]]]
    assert [[micro.num_tokens for micro in step] for step in (first, second)] == [[3], [5]]
    assert together[1].rows_U.tolist() == [1]


def test_types_are_what_the_model_takes():
    ((micro,),) = make_micro_batches(shard(((0, 1),)))
    assert {micro.tokens_1T.dtype, micro.position_ids_1T.dtype, micro.rows_U.dtype} == {torch.int64}
    assert micro.cu_seqlens.dtype == torch.int32
    assert {micro.weights_U.dtype, micro.mask_U.dtype, micro.advantages_U.dtype} == {torch.float32}


def test_an_empty_response_takes_no_row_of_the_logits():
    empty = shard(((0, 1),))
    empty.response_lengths_B = np.array([2, 0])
    for name in ("loss_mask_U", "rollout_log_probs_U"):
        setattr(empty, name, np.ones(2, np.float32))
    ((micro,),) = make_micro_batches(empty)
    assert micro.rows_U.tolist() == [2, 3]
    assert micro.samples_U.tolist() == [0, 0]


def test_a_sample_without_a_prompt_is_refused():
    bare = shard(((0, 1),))
    bare.response_lengths_B = np.array([2, 3])
    with pytest.raises(ValueError, match="without a prompt token"):
        make_micro_batches(bare)


# --- Shared rows ------------------------------------------------------------------------------------------------------


def test_a_row_is_padded_for_sequence_parallelism_with_a_sequence_of_its_own():
    ((micro,),) = make_micro_batches(shard(((0, 1),)), layout=ParallelLayout(tensor=3, sequence=True))
    assert micro.tokens_1T.tolist() == [[5, 14, 5, 7, 1, 20, 21, 22, 0]]
    assert micro.position_ids_1T.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0]]
    assert micro.cu_seqlens.tolist() == [0, 5, 8, 9]
    assert (micro.num_samples, micro.rows_U.tolist()) == (2, [2, 3, 6])
    assert micro.lengths == [5, 3]


def test_padding_longer_than_every_sample_sets_the_longest_length():
    ((micro,),) = make_micro_batches(shard(((1,),)), layout=ParallelLayout(context=4))
    assert (micro.num_tokens, micro.max_seqlen) == (2, 5)


def test_context_parallel_ranks_hold_every_response_token_once():
    layout = ParallelLayout(context=2)
    ((first,),), ((second,),) = (
        make_micro_batches(shard(((0, 1),)), layout=layout, context_rank=rank) for rank in range(2)
    )
    assert first.tokens_1T.tolist() == [[5, 14, 21, 22]]
    assert second.tokens_1T.tolist() == [[5, 7, 1, 20]]
    assert second.position_ids_1T.tolist() == [[2, 3, 4, 0]]
    assert (first.rows_U.tolist(), second.rows_U.tolist()) == ([2], [0, 1])
    assert (first.targets_U.tolist(), second.targets_U.tolist()) == ([22], [7, 1])
    assert (first.samples_U.tolist(), second.samples_U.tolist()) == ([1], [0, 0])
    assert (first.weights_U.tolist(), second.weights_U.tolist()) == ([0.25], [0.5, 0])
    assert first.cu_seqlens.tolist() == second.cu_seqlens.tolist() == [0, 5, 8]


def test_a_target_may_be_held_by_another_rank_than_its_prediction():
    layout = ParallelLayout(context=2)
    short = shard(((0,),))  # padded to 8: the row 5 14 5 7 1 0 0 0
    ((first,),), ((second,),) = (make_micro_batches(short, layout=layout, context_rank=rank) for rank in range(2))
    assert first.tokens_1T.tolist() == [[5, 14, 0, 0]]
    assert first.rows_U.tolist() == []
    assert second.targets_U.tolist() == [7, 1]


def test_an_idle_micro_batch_trains_nothing():
    ((micro,),) = make_micro_batches(shard(((0, 1),)))
    spare = idle_micro_batch(micro)
    assert spare.tokens_1T is micro.tokens_1T
    assert spare.mask_U.tolist() == spare.weights_U.tolist() == [0, 0, 0]
    assert micro.weights_U.tolist() == [0.5, 0, 0.25]
