"""The buffered data source: what comes first, what arrives from elsewhere, and what of that is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_core import PromptRequest, RunView, Sample
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import CheckpointError, DataError
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.requests import RunFilter
from slime_core.prompts.row_checks import RowChecks
from slime_core.rollout.group_generator import reset_sample
from slime_core.types import LogProbs, SpecInfo, Status, TokenIds
from slime_datasets.arrivals import screen_arrivals
from slime_datasets.buffer import BufferedPrompts
from slime_datasets.given import FromBuffer
from slime_datasets.options import DatasetsOptions
from slime_datasets.trajectories import Fit

GOOD = {
    "group_index": 3,
    "prompt": "1+1",
    "tokens": [6, 15, 6, 7, 1],
    "response": "2",
    "response_length": 2,
    "reward": 1.0,
    "status": "completed",
    "rollout_log_probs": [-0.5, -0.25],
}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "p{n}"}}\n' for n in range(4)))
    (tmp_path / "inbox").mkdir()

    def made(**changed: Any) -> BufferedPrompts:
        options = DatasetsOptions(**{"buffer_data": tmp_path / "inbox", **changed.pop("options", {})})
        request = {"label_key": None, "shuffle": False, **changed}
        return BufferedPrompts(options, RunView(prompts=PromptRequest(tmp_path / "prompts.jsonl", **request)))

    return made


def write(path: Path, *rows: dict[str, Any] | str) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def group(number: int, reward: float | None = None, **metadata: Any) -> list[Sample]:
    return [Sample(group_index=number, index=number, prompt=f"g{number}", reward=reward, metadata=metadata)]


def prompts(groups: list[list[Sample]]) -> list[Any]:
    return [each[0].prompt for each in groups]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"buffer_filter": "oldest"}, ["g0", "g1", "g2", "g3"]),
        ({"buffer_filter": "newest"}, ["g4", "g3", "g2", "g1"]),
        ({"buffer_filter": "prioritised"}, ["g3", "g1", "g0", "g4"]),
        ({"buffer_filter": "stratified", "buffer_key": "kind"}, ["g0", "g2", "g1", "g3"]),
    ],
)
def test_the_filter_says_which_groups_come_next(make, options, wanted):
    source = make(options=options)
    rewards = [0.25, 0.5, None, 1.0, 0.0]
    kinds = ["a", "a", "b", "b", "b"]
    source.add_samples([group(n, rewards[n], kind=kinds[n]) for n in range(5)])
    assert prompts(source.get_samples(4)) == wanted
    (left,) = {f"g{n}" for n in range(5)} - set(wanted)
    assert prompts(source.get_samples(3)) == [left, "p0", "p1"]


def test_groups_that_come_back_keep_their_tokens(make):
    source = make()
    (first,) = source.next_groups(1)
    first[0].tokens = TokenIds([1, 2])
    source.put_back([first])
    assert source.next_groups(2)[0][0].tokens == [1, 2]


def test_trajectories_arrive_as_whole_groups_under_numbers_of_their_own(make, tmp_path):
    source = make(n_samples_per_prompt=2)
    write(
        tmp_path / "inbox" / "a.jsonl",
        GOOD,
        {**GOOD, "response": "3", "reward": 0},
        {**GOOD, "group_index": 4},
        GOOD | {"group_index": 4},
    )
    write(tmp_path / "inbox" / ".half.jsonl", "nonsense")
    first, second, fresh = source.next_groups(3)
    assert [(one.group_index, one.index, one.reward) for one in first] == [(-1, -2, 1.0), (-1, -1, 0)]
    assert [(one.group_index, one.index) for one in second] == [(-2, -4), (-2, -3)]
    assert (fresh[0].prompt, fresh[0].group_index) == ("p0", 0)
    write(tmp_path / "inbox" / "b.jsonl", GOOD, GOOD)
    assert prompts(source.next_groups(2)) == ["1+1", "p1"]


def test_a_resumed_source_neither_loses_nor_repeats_what_arrived(make, tmp_path):
    source = make()
    write(tmp_path / "inbox" / "a.jsonl", GOOD, {**GOOD, "group_index": 4, "prompt": "other"})
    assert prompts(source.next_groups(1)) == ["1+1"]
    state = json.loads(json.dumps(source.state()))
    resumed = make()
    resumed.restore(state)
    write(tmp_path / "inbox" / "b.jsonl", GOOD)
    assert resumed.next_groups(3) == source.next_groups(3)
    assert prompts(resumed.next_groups(1)) == ["p1"]


def test_the_state_of_another_data_source_is_refused(make):
    with pytest.raises(CheckpointError, match=r"buffer.*--data-source"):
        make().restore({"next": 1, "returned": []})


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"status": "pending"}, "status is pending"),
        ({"tokens": [1, "2", 3]}, r"is \[1, '2', 3\]"),
        ({"tokens": [1, -2, 3]}, r"is \[1, -2, 3\]"),
        ({"tokens": [1, 2**31, 3]}, r"\[1, 2147483648, 3\]"),
        ({"tokens": [1, 2, 30, 4, 5]}, "has 0 to 19"),
        ({"response_length": 5}, "response_length is 5"),
        ({"response_length": 0}, "response_length is 0"),
        ({"response_length": 2.0}, "response_length is 2.0"),
        ({"rollout_log_probs": [-0.5]}, "rollout_log_probs are 1"),
        ({"rollout_log_probs": None}, "rollout_log_probs"),
        ({"rollout_log_probs": [-0.5, float("nan")]}, r"rollout_log_probs is \[-0.5, nan\]"),
        ({"rollout_log_probs": [-0.5, -1e39]}, r"rollout_log_probs is \[-0.5, -1e\+39\]"),
        ({"rollout_log_probs": [0.6, 0.7]}, "rollout_log_probs hold 0.7"),
        ({"loss_mask": [1, 2]}, r"loss_mask is \[1, 2\]"),
        ({"loss_mask": [1]}, "loss_mask has 1"),
        ({"reward": "high"}, "reward is 'high'"),
        ({"unknown": 1}, "no such field unknown"),
        ({"rewrd": 1}, "no such field rewrd"),
        ({"tokens": 5}, "tokens is 5; accepted: a list"),
        ({"tokens": None}, "tokens is None; accepted: a list"),
        ({"rollout_log_probs": [-(10**400), -0.5]}, r"rollout_log_probs is \[-10*"),
        ({"reward": 1e39}, r"reward is 1e\+39"),
        ({"reward": {}}, r"reward is \{\}"),
        ({"reward": {"a": True}}, r"reward is \{'a': True\}"),
        ({"reward": {"acc": 1, "form": 0}}, "--reward-key"),
        ({"reward": {"acc": 1}, "metadata": {"reward_key": ["acc"]}}, "--reward-key"),
        ({"group_index": 1.5}, "group_index is 1.5"),
        ({"index": "3"}, "index is '3'"),
        ({"rollout_id": [3]}, r"rollout_id is \[3\]"),
        ({"prompt": [1]}, r"prompt is \[1\]"),
        ({"weight_versions": [7]}, r"weight_versions is \[7\]"),
        ({"weight_spans": [["7", 0]]}, r"weight_spans is \[\['7', 0\]\]"),
        ({"weight_spans": [["7", 0, 3]]}, "weight_spans"),
        ({"weight_spans": [["7", 1, 1]]}, "weight_spans"),
        ({"spec_info": {"spec_verify_ct": "a"}}, r"spec_info is \{'spec_verify_ct': 'a'\}"),
        ({"spec_info": {"more": 1}}, r"spec_info is \{'more': 1\}"),
        ({"rollout_top_p_token_ids": [1.5]}, r"rollout_top_p_token_ids is \[1.5\]"),
        ({"rollout_top_p_token_ids": [1]}, "3 for 2 response"),
        ({"rollout_top_p_token_offsets": []}, "3 for 2 response"),
        ({"rollout_top_p_token_ids": [1, 2], "rollout_top_p_token_offsets": [0, 2, 1]}, "3 for 2 response"),
        ({"rollout_routed_experts": [[1]]}, r"rollout_routed_experts is \[\[1\]\]"),
        (
            {"rollout_routed_experts": [[[1]], [[1, 2]]]},
            r"rollout_routed_experts is \[\[\[1\]\], \[\[1, 2\]\]\]; accepted",
        ),
        ({"rollout_routed_experts": [[[1]], [[2]]]}, "rollout_routed_experts"),
        ({"multimodal_train_inputs": 5}, "multimodal_train_inputs is 5"),
        ({"multimodal_train_inputs": {"a": ["x"]}}, r"multimodal_train_inputs is \{'a': \['x'\]\}; accepted: names"),
        (
            {"multimodal_train_inputs": {"a": {"__array__": "<f4", "shape": [9], "data": "AAAA"}}},
            "multimodal_train_inputs",
        ),
        ({"multimodal_inputs": "x.png"}, "multimodal_inputs is 'x.png'"),
        ({"non_generation_time": -1}, "non_generation_time is -1; accepted: seconds from 0 on"),
        ({"remove_sample": 1}, "remove_sample is 1"),
        ({"session_id": 5}, "session_id is 5"),
        ({"error": []}, r"error is \[\]"),
        ({"generate_function_path": 5}, "generate_function_path is 5"),
        ({"status": "done"}, "'done' is not a"),
        ({"reward": 10**400}, "reward is 10*"),
        ({"train_metadata": [1]}, r"train_metadata is \[1\]"),
        ({"metadata": None}, "metadata is None; accepted: an object"),
        ({"prompt": 5}, "prompt is 5"),
        ({"response": 5}, "response is 5; accepted: text"),
        ({"label": 5}, "label is 5"),
    ],
)
def test_a_trajectory_that_could_not_be_trained_is_named_by_file_and_line(make, tmp_path, changed, found):
    write(tmp_path / "inbox" / "a.jsonl", "", {**GOOD, **changed})
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2.*{found}"):
        make(vocab_size=20).next_groups(1)
    left_out = RunFilter()
    skipping = make(skips_bad=True, vocab_size=20, filter=left_out)
    assert prompts(skipping.next_groups(1)) == ["p0"]
    assert left_out.metrics() == {"data/left_out/bad": 1.0}
    assert f"\n  {tmp_path}/inbox/a.jsonl, line 2: " in left_out.news()[0]


@pytest.mark.parametrize("name", ["tokens", "response_length", "rollout_log_probs", "status"])
def test_a_trajectory_that_lacks_what_it_needs_is_named(make, tmp_path, name):
    write(tmp_path / "inbox" / "a.jsonl", {key: value for key, value in GOOD.items() if key != name})
    with pytest.raises(DataError, match="response_length, status, rollout_log"):
        make().next_groups(1)


def test_all_that_a_sample_writes_of_itself_is_read_again(make, tmp_path):
    import numpy as np

    whole = Sample(
        group_index=3,
        index=5,
        rollout_id=1,
        prompt=[{"role": "user", "content": "1+1"}],
        tokens=[6, 15, 6, 7, 1],
        response="2",
        response_length=2,
        reward={"acc": 1.0, "form": 0},
        loss_mask=[1, 0],
        status=Status.TRUNCATED,
        metadata={"reward_key": "acc", "generate_function": "of_another_run"},
        multimodal_train_inputs={"pixels": np.ones((2, 3), np.float32)},
        weight_versions=["7", "8"],
        weight_spans=[("7", 0, 1), ("8", 1, 2)],
        rollout_log_probs=[-0.5, 0.015625],
        rollout_top_p_token_ids=[7, 8, 1],
        rollout_top_p_token_offsets=[0, 2, 3],
        rollout_routed_experts=np.ones((4, 2, 1), np.int16),
        generate_function_path="of_another_run",
        spec_info=SpecInfo(spec_verify_ct=3),
    )
    write(tmp_path / "inbox" / "a.jsonl", whole.to_dict())
    ((found,),) = make().next_groups(1)
    made = {"status": Status.PENDING, "group_index": -1, "index": -1, "generate_function_path": None}
    given = {"metadata": {"reward_key": "acc"}, "train_metadata": {"given": ["truncated", whole.reward]}}
    assert found == replace(whole, **made, **given)
    assert (found.multimodal_train_inputs["pixels"] == 1).all()
    assert np.shape(found.rollout_routed_experts) == (4, 2, 1)


def test_lines_without_a_group_are_groups_of_their_own(make, tmp_path):
    alone = {key: value for key, value in GOOD.items() if key != "group_index"}
    write(tmp_path / "inbox" / "a.jsonl", alone, alone)
    assert [len(group) for group in make().next_groups(2)] == [1, 1]
    with pytest.raises(DataError) as caught:
        make(n_samples_per_prompt=2).next_groups(1)
    assert "n_samples_per_prompt = 2" in str(caught.value)


def test_files_whose_names_start_with_a_dot_or_an_underscore_are_not_read_yet(make, tmp_path):
    for name in ("_a.jsonl", ".b.jsonl"):
        write(tmp_path / "inbox" / name, GOOD)
    assert prompts(make().next_groups(1)) == ["p0"]
    source = make(options={"buffer_data": tmp_path / "inbox" / "_a.jsonl"})
    assert prompts(source.next_groups(1)) == ["1+1"]


def test_a_group_of_another_size_is_refused(make, tmp_path):
    write(tmp_path / "inbox" / "a.jsonl", GOOD)
    with pytest.raises(DataError, match="n_samples_per_prompt = 2"):
        make(n_samples_per_prompt=2).next_groups(1)


def test_trajectories_are_looked_through_before_anything_starts(tmp_path):
    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "b.jsonl", GOOD, {**GOOD, "tokens": 5, "group_index": 4})
    screen_arrivals(tmp_path / "a.jsonl", Fit())
    for path in (tmp_path, tmp_path / "b.jsonl"):
        with pytest.raises(DataError, match=r"b\.jsonl, line 2: tokens is 5; accepted: a list"):
            screen_arrivals(path, Fit())
    screen_arrivals(tmp_path / "b.jsonl", Fit(), most_bytes=10)
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: group 3 has 1 samples, and n_samples_per_prompt = 2"):
        screen_arrivals(tmp_path / "a.jsonl", Fit(size=2))
    write(tmp_path / "c.jsonl", {**GOOD, "metadata": {"rm_type": "lenght"}})
    with pytest.raises(DataError, match="1: metadata rm_type"):
        screen_arrivals(tmp_path / "c.jsonl", Fit(filter=RowChecks({"rm_type": {"length": ""}})))


async def test_a_trajectory_is_trained_as_it_came(make, tmp_path):
    write(tmp_path / "inbox" / "a.jsonl", {**GOOD, "train_metadata": {"theirs": 1}})
    (samples,) = make().next_groups(1)
    reset_sample(samples[0])  # as the sampler does with all that it is handed
    encoder = PromptEncoder(ARITHMETIC / "model", apply_chat_template=False)
    no_client: Any = None
    (sample,) = await FromBuffer(None, RunView())(GenerateContext(no_client, encoder), samples, SamplingParams())
    assert (sample.status, sample.reward, sample.tokens) == (Status.COMPLETED, 1.0, TokenIds(GOOD["tokens"]))
    assert (sample.rollout_log_probs, sample.train_metadata) == (LogProbs([-0.5, -0.25]), {"theirs": 1})


async def test_a_trajectory_of_another_tokenizer_is_refused(make, tmp_path):
    write(tmp_path / "inbox" / "a.jsonl", {**GOOD, "tokens": [6, 15, 6, 99999, 1]})
    (samples,) = make().next_groups(1)
    encoder = PromptEncoder(ARITHMETIC / "model", apply_chat_template=False)
    no_client: Any = None
    with pytest.raises(DataError, match="-1: token 99999"):
        await FromBuffer(None, RunView())(GenerateContext(no_client, encoder), samples, SamplingParams())
