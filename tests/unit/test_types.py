from __future__ import annotations

import copy
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from slime_core.types import LogProbs, Mask, Sample, Status, TokenIds


def test_token_ids_read_and_compare_like_a_list():
    ids = TokenIds([5, 14, 5])
    assert ids == [5, 14, 5]
    assert ids != [5, 14]
    assert ids[1:] == [14, 5]
    assert isinstance(ids[1:], TokenIds)
    assert ids[-1] == 5


def test_token_ids_add_to_lists_on_either_side_and_stay_token_ids():
    ids = TokenIds([1, 2])
    after, before = ids + [3], [0] + ids  # noqa: RUF005 - the operators are what is tested
    assert (after, before) == ([1, 2, 3], [0, 1, 2])
    assert isinstance(after, TokenIds)
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
    assert np.asarray(restored).dtype.itemsize == item_bytes


def test_a_number_that_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        Mask([300])
    with pytest.raises(TypeError):
        TokenIds([0.5])


def test_samples_do_not_share_their_default_fields():
    first, second = Sample(), Sample()
    first.tokens.append(1)
    first.metadata["carries"] = 1
    first.spec_info.completion_token_num = 3
    assert (second.tokens, second.metadata, second.spec_info.completion_token_num) == ([], {}, 0)
    assert second.status is Status.PENDING


def test_the_reward_is_the_number_or_the_entry_of_the_key():
    assert Sample(reward=1).reward_value() == 1.0
    assert Sample(reward=0.25).reward_value("ignored") == 0.25
    assert Sample(reward={"score": 0.5, "format": 1.0}).reward_value("format") == 1.0


def test_a_reward_that_is_not_there_names_the_sample_and_what_it_has():
    with pytest.raises(ValueError, match=r"sample 3 .*\['format', 'score'\].*'length'"):
        Sample(index=3, reward={"score": 0.5, "format": 1.0}).reward_value("length")
    with pytest.raises(ValueError, match=r"sample 4 .*\(status failed\)"):
        Sample(index=4, status=Status.FAILED).reward_value()


def test_response_tokens_are_appended_with_the_meta_info_of_the_engine() -> None:
    sample = Sample(index=4, tokens=[5, 6])
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "3"}
    sample.append_response_tokens(None, tokens=[7, 1], log_probs=[-0.5, -0.25], meta_info=meta, text="a")
    sample.append_response_tokens(tokens=[8], trainable=False, text="b")
    again = {"finish_reason": "length", "weight_versions": [{"version": "3"}, {"version": "4"}]}
    sample.append_response_tokens(tokens=[9], log_probs=[-1.0], meta_info=again, text="c")
    assert sample.tokens == [5, 6, 7, 1, 8, 9]
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, -1.0]
    assert (sample.response, sample.response_length, sample.effective_response_length) == ("abc", 4, 3)
    assert (sample.status, sample.weight_versions) == (Sample.Status.TRUNCATED, ["3", "4"])


def test_the_end_of_an_answer_in_the_middle_may_be_left_out() -> None:
    sample = Sample(tokens=[5])
    meta = {"finish_reason": {"type": "stop"}}
    sample.append_response_tokens(tokens=[7], log_probs=[-0.5], meta_info=meta, update_terminal_info=False)
    assert (sample.status, sample.weight_versions) == (Status.PENDING, [])


@pytest.mark.parametrize(
    ("log_probs", "trainable", "message"),
    [
        (None, True, "sample 4: 2 .* no log-probs"),
        ([-0.5], True, "sample 4: 2 .* 1 log-probs"),
        ([-0.5, -0.5], False, "sample 4: 2 .* 2 log-probs"),
    ],
)
def test_sampled_tokens_have_log_probs_and_others_do_not(
    log_probs: list[float] | None, trainable: bool, message: str
) -> None:
    sample = Sample(index=4, tokens=[5])
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(tokens=[7, 8], log_probs=log_probs, trainable=trainable)
    assert (sample.tokens, sample.response_length) == ([5], 0)


def test_a_sample_comes_back_from_what_it_is_written_as() -> None:
    sample = Sample(index=4, tokens=[5], reward={"score": 0.5}, status=Status.TRUNCATED, metadata={"a": [1]})
    sample.append_response_tokens(tokens=[7], log_probs=[-0.5])
    sample.spec_info.spec_verify_ct = 3
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again == sample == pickle.loads(pickle.dumps(sample))
    assert again.status is Status.TRUNCATED
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        Sample.from_dict({"colour": 1})


def test_the_reward_is_read_by_the_key_of_args() -> None:
    assert Sample(reward={"score": 0.5, "acc": 1}).get_reward_value(SimpleNamespace(reward_key="score")) == 0.5
    assert Sample(metadata={"reward_key": ["score"]}).reward_key("acc") == "['score']"
