"""The buffered data source: the order of groups, trajectories that arrive, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core import PromptGroup, RunView, Sample, Status
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.provisional import PromptRequest, SpecInfo
from slime_core.rollout.group_generator import reset_sample
from slime_core.rollout.prompt_filter import RunFilter
from slime_core.rollout.row_checks import RowChecks
from slime_core.types import LogProbs, TokenIds
from slime_datasets.arrivals import screen_arrivals
from slime_datasets.buffer import BufferedPrompts
from slime_datasets.options import DatasetsOptions
from slime_datasets.recorded import from_buffer
from slime_datasets.trajectories import Fit

Make = Callable[..., BufferedPrompts]
GOOD: dict[str, Any] = {
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
def inbox(tmp_path: Path) -> Path:
    (tmp_path / "inbox").mkdir()
    return tmp_path / "inbox"


@pytest.fixture
def make(tmp_path: Path, inbox: Path) -> Make:
    """``make(**fields)``: the data source of four prompts and the inbox, with fields of its request."""
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "p{n}"}}\n' for n in range(4)))

    def made(*, options: Any = None, **fields: Any) -> BufferedPrompts:
        request = PromptRequest(tmp_path / "prompts.jsonl", **{"label_key": None, "shuffle": False, **fields})
        return BufferedPrompts(DatasetsOptions(**{"buffer_data": inbox, **(options or {})}), RunView(prompts=request))

    return made


def write(path: Path, *rows: dict[str, Any] | str) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def prompts(groups: list[PromptGroup]) -> list[Any]:
    return [group[0].prompt for group in groups]


def context() -> GenerateContext:
    """A context without an engine."""
    no_client: Any = None
    return GenerateContext(no_client, PromptEncoder(ARITHMETIC / "model", apply_chat_template=False))


# --- The order of groups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({"buffer_filter": "oldest"}, ["g0", "g1", "g2", "g3"]),
        ({"buffer_filter": "newest"}, ["g4", "g3", "g2", "g1"]),
        ({"buffer_filter": "prioritised"}, ["g3", "g1", "g0", "g4"]),
        ({"buffer_filter": "stratified", "buffer_key": "kind"}, ["g0", "g2", "g1", "g3"]),
    ],
)
def test_the_filter_decides_which_groups_come_next(make: Make, options: dict[str, str], chosen: list[str]) -> None:
    source = make(options=options)
    rewards, kinds = [0.25, 0.5, None, 1.0, 0.0], ["a", "a", "b", "b", "b"]
    for n, (reward, kind) in enumerate(zip(rewards, kinds, strict=True)):
        sample = Sample(group_index=n, index=n, prompt=f"g{n}", reward=reward, metadata={"kind": kind})
        source.add_samples([[sample]])
    assert prompts(source.get_samples(4)) == chosen
    (left,) = {f"g{n}" for n in range(5)} - set(chosen)
    assert prompts(source.get_samples(3)) == [left, "p0", "p1"]


# --- Arrivals ---------------------------------------------------------------------------------------------------------


def test_trajectories_arrive_as_groups_under_new_numbers(make: Make, inbox: Path) -> None:
    source = make(n_samples_per_prompt=2)
    four = {**GOOD, "group_index": 4}
    write(inbox / "a.jsonl", GOOD, {**GOOD, "response": "3", "reward": 0}, four, four)
    for unfinished in (".half.jsonl", "_half.jsonl"):
        write(inbox / unfinished, "nonsense")
    first, second, fresh = source.next_groups(3)
    assert [(one.group_index, one.index, one.reward) for one in first] == [(-1, -2, 1.0), (-1, -1, 0)]
    assert [(one.group_index, one.index) for one in second] == [(-2, -4), (-2, -3)]
    assert (fresh[0].prompt, fresh[0].group_index) == ("p0", 0)
    write(inbox / "b.jsonl", GOOD, GOOD)
    assert prompts(source.next_groups(2)) == ["1+1", "p1"]


def test_a_file_that_is_named_may_start_with_an_underscore(make: Make, inbox: Path) -> None:
    write(inbox / "_a.jsonl", GOOD)
    assert prompts(make(options={"buffer_data": inbox / "_a.jsonl"}).next_groups(1)) == ["1+1"]


def test_lines_without_a_group_are_groups_of_one(make: Make, inbox: Path) -> None:
    alone = {key: value for key, value in GOOD.items() if key != "group_index"}
    write(inbox / "a.jsonl", alone, alone)
    assert [len(group) for group in make().next_groups(2)] == [1, 1]
    with pytest.raises(DataError, match="n_samples_per_prompt = 2"):
        make(n_samples_per_prompt=2).next_groups(1)


def test_a_resumed_source_neither_loses_nor_repeats_arrivals(make: Make, inbox: Path) -> None:
    source, resumed = make(), make()
    write(inbox / "a.jsonl", GOOD, {**GOOD, "group_index": 4, "prompt": "other"})
    assert prompts(source.next_groups(1)) == ["1+1"]
    resumed.restore(json.loads(json.dumps(source.state())))
    write(inbox / "b.jsonl", GOOD)
    assert resumed.next_groups(3) == source.next_groups(3)
    assert prompts(resumed.next_groups(1)) == ["p1"]


def test_everything_that_a_sample_writes_is_read_again(make: Make, inbox: Path) -> None:
    sample = Sample(
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
    write(inbox / "a.jsonl", sample.to_dict())
    ((again,),) = make().next_groups(1)
    numbers = {"status": Status.PENDING, "group_index": -1, "index": -1, "generate_function_path": None}
    given = {"metadata": {"reward_key": "acc"}, "train_metadata": {"given": ["truncated", sample.reward]}}
    assert again == replace(sample, **numbers, **given)
    assert (again.multimodal_train_inputs["pixels"] == 1).all()
    assert np.shape(again.rollout_routed_experts) == (4, 2, 1)


async def test_a_trajectory_is_trained_unchanged(make: Make, inbox: Path) -> None:
    write(inbox / "a.jsonl", {**GOOD, "train_metadata": {"theirs": 1}})
    (samples,) = make().next_groups(1)
    reset_sample(samples[0])  # as the sampler does with every sample
    (sample,) = await from_buffer(context(), samples, SamplingParams())
    assert (sample.status, sample.reward, sample.tokens) == (Status.COMPLETED, 1.0, TokenIds(GOOD["tokens"]))
    assert (sample.rollout_log_probs, sample.train_metadata) == (LogProbs([-0.5, -0.25]), {"theirs": 1})


# --- Trajectories that are refused ------------------------------------------------------------------------------------

ARRAY = {"__array__": "<f4", "shape": [9], "data": "AAAA"}
WRONG: dict[str, list[Any]] = {
    "status": ["pending"],
    "tokens": [5, [1, "2", 3], [1, -2, 3], [1, 2**31, 3], None],
    "response_length": [5, 0, 2.0],
    "rollout_log_probs": [[-0.5], [-0.5, float("nan")], [-0.5, -1e39], [0.6, 0.7], [-(10**400), -0.5], None],
    "loss_mask": [[1, 2], [1]],
    "reward": ["high", 1e39, {}, {"a": True}, {"acc": 1, "form": 0}, 10**400],
    "unknown": [1],
    "group_index": [1.5],
    "index": ["3"],
    "rollout_id": [[3]],
    "prompt": [[1], 5],
    "weight_versions": [[7]],
    "weight_spans": [[["7", 0]], [["7", 0, 3]], [["7", 1, 1]]],
    "spec_info": [{"spec_verify_ct": "a"}, {"more": 1}],
    "rollout_top_p_token_ids": [[1.5], [1]],
    "rollout_top_p_token_offsets": [[]],
    "rollout_routed_experts": [[[1]], [[[1]], [[1, 2]]], [[[1]], [[2]]]],
    "engine_columns": [5, {"a": [0.5]}, {"a": [["x"]]}, {"a": [[0.5]]}],
    "multimodal_train_inputs": [5, {"a": ["x"]}, {"a": ARRAY}],
    "multimodal_inputs": ["x.png"],
    "non_generation_time": [-1],
    "remove_sample": [1],
    "session_id": [5],
    "error": [[]],
    "generate_function_path": [5],
    "train_metadata": [[1]],
    "metadata": [None],
    "response": [5],
    "label": [5],
}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        *((name, {name: value}) for name, values in WRONG.items() for value in values),
        ("'done'", {"status": "done"}),
        ("token 30", {"tokens": [1, 2, 30, 4, 5]}),
        ("rewrd.*reward", {"rewrd": 1}),
        ("3 for 2", {"rollout_top_p_token_ids": [1, 2], "rollout_top_p_token_offsets": [0, 2, 1]}),
        ("--reward-key", {"reward": {"acc": 1}, "metadata": {"reward_key": ["acc"]}}),
    ],
)
def test_a_trajectory_that_could_not_be_trained_is_named_by_file_and_line(
    make: Make, inbox: Path, name: str, changed: dict[str, Any]
) -> None:
    write(inbox / "a.jsonl", "", {**GOOD, **changed})
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2.*{name}"):
        make(vocab_size=20).next_groups(1)
    left_out = RunFilter()
    skipping = make(skips_bad=True, vocab_size=20, filter=left_out)
    assert prompts(skipping.next_groups(1)) == ["p0"]
    assert left_out.metrics() == {"data/left_out/bad": 1.0}
    assert f"\n  {inbox}/a.jsonl, line 2: " in left_out.news()[0]


@pytest.mark.parametrize("name", ["tokens", "response_length", "rollout_log_probs", "status"])
def test_a_trajectory_that_lacks_a_required_field_is_named(make: Make, inbox: Path, name: str) -> None:
    write(inbox / "a.jsonl", {key: value for key, value in GOOD.items() if key != name})
    with pytest.raises(DataError, match=f"no field {name}"):
        make().next_groups(1)


async def test_a_trajectory_of_another_tokenizer_is_refused(make: Make, inbox: Path) -> None:
    write(inbox / "a.jsonl", {**GOOD, "tokens": [6, 15, 6, 99999, 1]})
    (samples,) = make().next_groups(1)
    with pytest.raises(DataError, match="99999"):
        await from_buffer(context(), samples, SamplingParams())


def test_trajectories_are_checked_before_anything_starts(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "b.jsonl", GOOD, {**GOOD, "tokens": 5, "group_index": 4})
    write(tmp_path / "c.jsonl", {**GOOD, "reward": None, "metadata": {"rm_type": "lenght"}})
    screen_arrivals(tmp_path / "a.jsonl", Fit())
    screen_arrivals(tmp_path / "b.jsonl", Fit(), most_bytes=10)
    checks = RowChecks({"rm_type": {"length": ""}})
    for path, fit, named in (
        (tmp_path, Fit(), r"b\.jsonl, line 2: tokens"),
        (tmp_path / "b.jsonl", Fit(), r"b\.jsonl, line 2: tokens"),
        (tmp_path / "a.jsonl", Fit(size=2), r"a\.jsonl, line 1: .* n_samples_per_prompt = 2"),
        (tmp_path / "c.jsonl", Fit(filter=checks), "line 1: metadata rm_type"),
    ):
        with pytest.raises(DataError, match=named):
            screen_arrivals(path, fit)
