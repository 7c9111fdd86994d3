"""The buffered data source: what comes first, what arrives from elsewhere, and what of that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core import PromptRequest, Sample
from slime_core.config.embedded import ARITHMETIC
from slime_core.data.arrivals import screen_arrivals
from slime_core.data.buffer import BufferedPrompts
from slime_core.data.chat import PromptEncoder
from slime_core.errors import CheckpointError, DataError
from slime_core.plugins.contracts import BufferRequest
from slime_core.rollout.buffered import FromBuffer
from slime_core.rollout.engines.generation import SamplingParams
from slime_core.rollout.generate import GenerateContext
from slime_core.rollout.resuming import anew
from slime_core.types import LogProbs, Status, TokenIds

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
        buffer = BufferRequest(**{"data": tmp_path / "inbox", **changed.pop("buffer", {})})
        request = {"label_key": None, "shuffle": False, "buffer": buffer, **changed}
        return BufferedPrompts(request=PromptRequest(tmp_path / "prompts.jsonl", **request))

    return made


def write(path: Path, *rows: dict[str, Any] | str) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def group(number: int, reward: float | None = None, **metadata: Any) -> list[Sample]:
    return [Sample(group_index=number, index=number, prompt=f"g{number}", reward=reward, metadata=metadata)]


def prompts(groups: list[list[Sample]]) -> list[Any]:
    return [each[0].prompt for each in groups]


@pytest.mark.parametrize(
    ("buffer", "wanted"),
    [
        ({"filter": "oldest"}, ["g0", "g1", "g2", "g3"]),
        ({"filter": "newest"}, ["g4", "g3", "g2", "g1"]),
        ({"filter": "prioritised"}, ["g3", "g1", "g0", "g4"]),
        ({"filter": "stratified", "key": "kind"}, ["g0", "g2", "g1", "g3"]),
    ],
)
def test_the_filter_says_which_groups_come_next(make, buffer, wanted):
    source = make(buffer=buffer)
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
    with pytest.raises(
        CheckpointError, match=r"^the checkpoint's place in the data has no buffer.*--data-source of that run$"
    ):
        make().restore({"next": 1, "returned": []})


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"status": "pending"}, "status is pending; accepted: completed or truncated"),
        ({"tokens": [1, "2", 3]}, "tokens are not a list of whole numbers from 0 on"),
        ({"tokens": [1, -2, 3]}, "tokens are not a list of whole numbers from 0 on"),
        ({"response_length": 5}, "response_length is 5 of 5 tokens; accepted: at least 1, with a prompt before it"),
        ({"rollout_log_probs": [-0.5]}, "rollout_log_probs are not 2 numbers, one a response token"),
        ({"rollout_log_probs": None}, "rollout_log_probs are not 2 numbers, one a response token"),
        ({"rollout_log_probs": [-0.5, float("nan")]}, "rollout_log_probs are not 2 numbers, one a response token"),
        ({"loss_mask": [1, 2]}, "loss_mask is not 2 times 0 or 1"),
        ({"reward": "high"}, "reward is 'high'; accepted: a finite number, or named ones"),
        ({"unknown": 1}, "no such field unknown"),
        ({"rewrd": 1}, r"no such field rewrd; did you mean reward\?"),
        ({"tokens": 5}, "tokens is 5; accepted: a list"),
        ({"tokens": None}, "tokens is None; accepted: a list"),
        ({"rollout_log_probs": [-(10**400), -0.5]}, "rollout_log_probs are not 2 numbers, one a response token"),
        ({"reward": 10**400}, "reward is 10*; accepted: a finite number, or named ones"),
        ({"train_metadata": [1]}, r"train_metadata is \[1\]; accepted: an object or null"),
        ({"metadata": None}, "metadata is None; accepted: an object"),
        ({"prompt": 5}, "prompt is 5; accepted: text or a list"),
        ({"response": 5}, "response is 5; accepted: text"),
        ({"label": 5}, "label is 5; accepted: text or null"),
    ],
)
def test_a_trajectory_that_could_not_be_trained_is_named_by_file_and_line(make, tmp_path, changed, found):
    write(tmp_path / "inbox" / "a.jsonl", "", {**GOOD, **changed})
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: {found}"):
        make().next_groups(1)
    told: list[Any] = []
    skipping = make(skips_bad=True, tell=lambda *said: told.append(said))
    assert (prompts(skipping.next_groups(1)), told) == (["p0"], [("bad", 1)])


def test_a_group_of_another_size_is_refused(make, tmp_path):
    write(tmp_path / "inbox" / "a.jsonl", GOOD)
    with pytest.raises(
        DataError,
        match=r"a\.jsonl, line 1: group 3 has 1 samples, and n_samples_per_prompt = 2; accepted: groups of that size",
    ):
        make(n_samples_per_prompt=2).next_groups(1)


def test_trajectories_are_looked_through_before_anything_starts(tmp_path):
    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "b.jsonl", GOOD, {**GOOD, "tokens": 5})
    screen_arrivals(tmp_path / "a.jsonl")
    for path in (tmp_path, tmp_path / "b.jsonl"):
        with pytest.raises(DataError, match=r"b\.jsonl, line 2: tokens is 5; accepted: a list"):
            screen_arrivals(path)
    screen_arrivals(tmp_path / "b.jsonl", most_bytes=10)


async def test_a_trajectory_is_trained_as_it_came(make, tmp_path):
    write(tmp_path / "inbox" / "a.jsonl", {**GOOD, "train_metadata": {"theirs": 1}})
    (samples,) = make().next_groups(1)
    anew(samples[0])  # as the sampler does with all that it is handed
    encoder = PromptEncoder(ARITHMETIC / "model", apply_chat_template=False)
    nobody: Any = None
    (sample,) = await FromBuffer()(GenerateContext(nobody, encoder), samples, SamplingParams())
    assert (sample.status, sample.reward, sample.tokens) == (Status.COMPLETED, 1.0, TokenIds(GOOD["tokens"]))
    assert (sample.rollout_log_probs, sample.train_metadata) == (LogProbs([-0.5, -0.25]), {"theirs": 1})


async def test_a_trajectory_of_another_tokenizer_is_refused(make, tmp_path):
    write(tmp_path / "inbox" / "a.jsonl", {**GOOD, "tokens": [6, 15, 6, 99999, 1]})
    (samples,) = make().next_groups(1)
    encoder = PromptEncoder(ARITHMETIC / "model", apply_chat_template=False)
    nobody: Any = None
    with pytest.raises(
        DataError, match=r"sample -1: token 99999, and the model's vocabulary has 0 to \d+; it is of another"
    ):
        await FromBuffer()(GenerateContext(nobody, encoder), samples, SamplingParams())
