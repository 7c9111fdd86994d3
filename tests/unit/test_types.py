from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from slime_core.types import LogProbs, Mask, Sample, Status, StepPlan, TokenIds, TrainBatch


def test_token_ids_read_and_compare_like_a_list():
    ids = TokenIds([5, 14, 5])
    assert ids == [5, 14, 5]
    assert ids == [5, 14, 5]
    assert ids != [5, 14]
    assert ids[1:] == [14, 5]
    assert isinstance(ids[1:], TokenIds)
    assert ids[-1] == 5


def test_token_ids_add_to_lists_on_either_side_and_stay_token_ids():
    ids = TokenIds([1, 2])
    behind, before = ids + [3], [0] + ids  # noqa: RUF005 - the operators are what is tested
    assert (behind, before) == ([1, 2, 3], [0, 1, 2])
    assert isinstance(behind, TokenIds)
    assert isinstance(before, TokenIds)
    ids += [7]
    assert ids == [1, 2, 7]


def test_a_copy_shares_nothing_with_the_original():
    ids = TokenIds([1, 2])
    for copied in (copy.copy(ids), copy.deepcopy(ids)):
        copied.append(3)
        assert isinstance(copied, TokenIds)
    assert ids == [1, 2]


@pytest.mark.parametrize(
    ("numbers", "item_bytes"), [(TokenIds([70000, -1]), 4), (LogProbs([-0.5, -1.25]), 4), (Mask([1, 0]), 1)]
)
def test_numbers_survive_pickling_with_their_class_and_width(numbers, item_bytes):
    restored = pickle.loads(pickle.dumps(numbers))
    assert type(restored) is type(numbers)
    assert restored == list(numbers)
    assert restored.itemsize == item_bytes


def test_a_number_that_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        Mask([300])
    with pytest.raises(TypeError):
        TokenIds([0.5])


def test_numbers_become_arrays_without_a_detour_over_python():
    assert np.asarray(TokenIds([5, 14]), np.int64).tolist() == [5, 14]
    assert np.asarray(LogProbs([-0.5])).dtype == np.float32


def test_samples_do_not_share_their_default_fields():
    first, second = Sample(), Sample()
    first.tokens.append(1)
    first.metadata["carries"] = 1
    first.spec_info.completion_token_num = 3
    assert (second.tokens, second.metadata, second.spec_info.completion_token_num) == ([], {}, 0)
    assert second.status is Status.PENDING


def test_the_prompt_is_what_stands_before_the_response():
    sample = Sample(tokens=[5, 14, 5, 7, 1], response_length=2)
    assert sample.prompt_length == 3


def test_the_reward_is_the_number_or_the_entry_of_the_key():
    assert Sample(reward=1).reward_value() == 1.0
    assert Sample(reward=0.25).reward_value("ignored") == 0.25
    assert Sample(reward={"score": 0.5, "format": 1.0}).reward_value("format") == 1.0


def test_a_reward_that_is_not_there_names_the_sample_and_what_it_has():
    with pytest.raises(ValueError, match=r"sample 3 has rewards \['format', 'score'\]; reward key 'length'"):
        Sample(index=3, reward={"score": 0.5, "format": 1.0}).reward_value("length")
    with pytest.raises(ValueError, match="sample 4 has no reward \\(status failed\\)"):
        Sample(index=4, status=Status.FAILED).reward_value()


def test_a_sample_survives_pickling():
    sample = Sample(index=1, tokens=TokenIds([5, 1]), rollout_log_probs=LogProbs([-0.5]), status=Status.TRUNCATED)
    restored = pickle.loads(pickle.dumps(sample))
    assert restored == sample
    assert restored.status is Status.TRUNCATED


def test_the_length_of_a_shard_is_its_number_of_samples():
    shard = TrainBatch(
        rollout=0,
        tokens_T=np.arange(8),
        lengths_B=np.array([5, 3]),
        response_lengths_B=np.array([2, 1]),
        loss_mask_U=np.ones(3, np.float32),
        loss_weights_B=np.ones(2, np.float32),
        rollout_log_probs_U=np.zeros(3, np.float32),
        columns_B={},
        steps=(StepPlan(((0, 1),)),),
        indices_B=np.array([0, 1]),
    )
    assert len(shard) == 2
