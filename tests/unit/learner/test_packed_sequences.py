from __future__ import annotations

import numpy as np
import pytest

from slime_core.learner.micro_batches import MicroBatch, make_micro_batches
from slime_core.modeling.layout import ParallelLayout
from slime_core.types import StepPlan, TrainBatch


def shard(*plan: tuple[int, ...], shares_prompts: bool = True) -> TrainBatch:
    """Prompt 5 14 with the responses 7 1, 8 and none; prompt 5 with 14 9; prompt 5 14 with 6 6 6."""
    samples = [([5, 14], [7, 1]), ([5, 14], [8]), ([5], [14, 9]), ([5, 14], []), ([5, 14], [6, 6, 6])]
    count = sum(len(response) for _, response in samples)
    return TrainBatch(
        rollout=0,
        tokens_T=np.concatenate([np.array(prompt + response) for prompt, response in samples]),
        lengths_B=np.array([len(prompt + response) for prompt, response in samples]),
        response_lengths_B=np.array([len(response) for _, response in samples]),
        loss_mask_U=np.ones(count, np.float32),
        loss_weights_B=np.arange(1, 6).astype(np.float32),
        rollout_log_probs_U=-np.arange(count).astype(np.float32),
        columns_B={"advantages": np.arange(5).astype(np.float32)},
        steps=(StepPlan(plan),),
        indices_B=np.arange(5),
        shares_prompts=shares_prompts,
    )


def shared(*plan: tuple[int, ...], **options: object) -> list[MicroBatch]:
    (step,) = make_micro_batches(shard(*plan), share=True, **options)
    return step


def test_a_prompt_stands_once_before_its_responses():
    (micro,) = shared((0, 1))
    assert micro.tokens_1T.tolist() == [[5, 14, 7, 1, 8]]
    assert micro.position_ids_1T.tolist() == [[0, 1, 2, 3, 2]]
    assert micro.cu_seqlens.tolist() == [0, 2, 4, 5]
    assert micro.shared.continues.tolist() == [-1, 0, 0]
    assert micro.rows_U.tolist() == [1, 2, 1]
    assert micro.targets_U.tolist() == [7, 1, 8]
    assert (micro.lengths, micro.max_seqlen, micro.num_samples) == ([4, 3], 4, 2)


def test_a_common_beginning_is_not_shared():
    (micro,) = shared((0, 2))
    assert micro.shared is None
    assert micro.tokens_1T.tolist() == [[5, 14, 7, 1, 5, 14, 9]]


def test_samples_of_one_prompt_meet_over_others_between_them():
    (micro,) = shared((1, 2, 4))
    assert micro.tokens_1T.tolist() == [[5, 14, 8, 6, 6, 6, 5, 14, 9]]
    assert micro.cu_seqlens.tolist() == [0, 2, 3, 6, 9]
    assert micro.shared.continues.tolist() == [-1, 0, 0, -1]
    assert micro.rows_U.tolist() == [1, 6, 7, 1, 3, 4]
    assert micro.targets_U.tolist() == [8, 14, 9, 6, 6, 6]
    assert micro.lengths == [3, 3, 5]


def test_an_empty_response_predicts_nothing():
    (micro,) = shared((3, 0))
    assert micro.tokens_1T.tolist() == [[5, 14, 7, 1]]
    assert micro.rows_U.tolist() == [1, 2]
    assert micro.samples_U.tolist() == [1, 1]
    assert micro.lengths == [2, 4]


COLUMNS = ("targets_U", "samples_U", "places_U", "mask_U", "weights_U", "advantages_U", "rollout_log_probs_U")


def test_columns_of_response_tokens_are_those_of_repeated_prompts():
    ((repeated,),), (once,) = make_micro_batches(shard((4, 0, 2, 3, 1))), shared((4, 0, 2, 3, 1))
    assert (repeated.num_tokens, once.num_tokens) == (17, 11)
    for name in COLUMNS:
        assert getattr(once, name).tolist() == getattr(repeated, name).tolist(), name
    assert (once.lengths, once.max_seqlen) == (repeated.lengths, repeated.max_seqlen)
    assert repeated.cu_seqlens.diff().tolist() == repeated.lengths


def test_a_group_over_two_micro_batches_has_its_prompt_in_both():
    first, second = shared((0, 1), (3, 4))
    assert first.tokens_1T.tolist() == [[5, 14, 7, 1, 8]]
    assert second.tokens_1T.tolist() == [[5, 14, 6, 6, 6]]


def test_padding_for_sequence_parallelism_continues_nothing():
    (micro,) = shared((0, 1), layout=ParallelLayout(tensor=4, sequence=True))
    assert micro.tokens_1T.tolist() == [[5, 14, 7, 1, 8, 0, 0, 0]]
    assert micro.cu_seqlens.tolist() == [0, 2, 4, 5, 8]
    assert micro.shared.continues.tolist() == [-1, 0, 0, -1]


def test_nothing_is_shared_unless_the_plan_counts_on_it():
    ((micro,),) = make_micro_batches(shard((0, 1), shares_prompts=False), share=True, max_tokens=1)
    assert micro.tokens_1T.tolist() == [[5, 14, 7, 1, 5, 14, 8]]


def test_without_shared_prompts_micro_batches_are_split_to_the_budget():
    (step,) = make_micro_batches(shard((0, 1, 2)), max_tokens=7)
    assert [micro.tokens_1T.tolist() for micro in step] == [[[5, 14, 7, 1, 5, 14, 8]], [[5, 14, 9]]]
    assert [micro.weights_U.tolist() for micro in step] == [[1, 1, 2], [3, 3]]


def test_context_parallel_ranks_cannot_share():
    with pytest.raises(ValueError, match="context-parallel"):
        make_micro_batches(shard((0, 1)), share=True, layout=ParallelLayout(context=2))
