"""Groups in the sampler: transformed, replaced, too old, counted and written; errors end the run."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.sampling import EvalConfig, RolloutConfig
from slime_core.config.schema import RunConfig, eval_sets
from slime_core.errors import PluginError, RunError
from slime_core.generation import Generation
from slime_core.rollout import group_scheduler as module
from slime_core.rollout.collected_rollout import Staleness, oldest_version
from slime_core.rollout.transforms import refuse_unusable
from slime_core.types import LogProbs, Sample, Status, TokenIds
from tests.unit.rollout.samplers import FakeClient, answer, written
from tests.unit.rollout.token_versions import token_versions

PLUGIN = '''
from slime_core import hookimpl, Transformed

calls = []
spoiled = []


class Log:
    """Notes which groups it was handed, and their rewards."""

    def __init__(self, options, run):
        pass

    def __call__(self, samples):
        calls.append(("log", samples[0].group_index, [sample.reward for sample in samples]))
        return Transformed(samples)


class Halve:
    """Halves every reward, in place, of all groups at once."""

    def __init__(self, options, run):
        pass

    def __call__(self, groups):
        calls.append(("halve", [group[0].group_index for group in groups]))
        for group in groups:
            for sample in group:
                sample.reward /= 2
        return [Transformed(group, changed={"halved": len(group)}) for group in groups]


class DropFirst(Halve):
    """Drops the first group of the rollout, and halves the rest."""

    def __call__(self, groups):
        found = super().__call__(groups)
        return [Transformed(found[0].samples, dropped="first"), *found[1:]]


class First(Log):
    """Keeps the first sample of a group."""

    def __call__(self, samples):
        return Transformed(samples[:1])


class Pop(Log):
    """Takes the last sample out of the list that it is handed."""

    def __call__(self, samples):
        samples.pop()
        return Transformed(samples)


class Bad(Log):
    def __call__(self, samples):
        return BAD(samples)


@hookimpl
def slime_before_rollout(rollout, groups):
    calls.append(("before", rollout, [group[0].group_index for group in groups]))


@hookimpl
def slime_after_rollout(rollout, samples):
    calls.append(("after", rollout, [sample.index for sample in samples]))
    for reward in spoiled:
        samples[0].reward = reward


@hookimpl
def slime_register(add):
    add.sample_transform("log", Log, scope="group")
    add.sample_transform("halve", Halve, scope="rollout")
    add.sample_transform("drop_first", DropFirst, scope="rollout")
    add.sample_transform("first", First, scope="group")
    add.sample_transform("pop", Pop, scope="group")
    add.sample_transform("bad", Bad, scope="group")
    add.sample_transform("bad_rollout", Bad, scope="rollout")
'''

MIXED = [answer("2"), answer("3")]
SAME = [answer("2"), answer("2")]
PROMPTS = ["1+1", "1+2", "1+3", "1+4", "1+5", "1+6"]


Build = Callable[..., tuple[Any, FakeClient, Any]]


@pytest.fixture
def build(tmp_path: Path, make_sampler: Callable[..., Any]) -> Build:
    """A sampler over six prompts whose right answer is 2, its client, and the toy plugin's module."""
    (tmp_path / "toy.py").write_text(PLUGIN)

    def make(answers: Any, *transforms: str, **rollout: Any) -> tuple[Any, FakeClient, Any]:
        client = FakeClient(answers)
        rows = [{"prompt": prompt, "label": "2"} for prompt in PROMPTS]
        settings = {"sample_transforms": transforms, **rollout}
        sampler = make_sampler(client, rows, rollout=settings, plugins=[tmp_path / "toy.py"])
        return sampler, client, sampler._components._registry.loaded["toy"].holder

    return make


async def test_groups_without_spread_are_replaced_until_the_rollout_is_full(build, tmp_path):
    answers = {"1+1": SAME, "1+2": MIXED, "1+3": SAME, "1+4": MIXED, "1+5": MIXED}
    sampler, client, _ = build(answers, "drop_zero_std")
    sampled = await sampler.sample(0)
    assert [prompt for prompt, _, _ in client.requests] == ["1+1", "1+2", "1+3", "1+4"]
    assert sampled.shards[0].indices_B.tolist() == [2, 3, 6, 7]
    metrics = sampled.metrics
    assert metrics["rollout/dropped/zero_std"] == 2.0
    assert metrics["rollout/refills"] == 2.0
    # Of what was generated, whatever was dropped.
    assert metrics["rollout/raw_reward"] == 0.75
    assert metrics["rollout/zero_std_groups"] == 0.5
    assert sampled.warnings == []
    rows = [(row["index"], row.get("dropped")) for row in written(tmp_path)]
    assert rows == [(2, None), (3, None), (6, None), (7, None), *((i, "zero_std") for i in (0, 1, 4, 5))]


async def test_the_cursor_counts_every_prompt_that_was_taken_and_the_next_rollout_continues_there(build):
    answers = {"1+1": SAME, "1+2": MIXED, "1+3": MIXED, "1+4": MIXED, "1+5": MIXED}
    sampler, _, _ = build(answers, "drop_zero_std")
    await sampler.sample(0)
    cursor = sampler.cursor()
    assert cursor["source"]["next"] == 3
    again, _, _ = build(answers, "drop_zero_std")
    again.restore(cursor)
    assert (await again.sample(1)).shards[0].indices_B.tolist() == [6, 7, 8, 9]


async def test_an_aborted_group_is_put_back_and_neither_replaced_nor_transformed(build):
    answers = {"1+1": [answer("2"), answer("2", "abort")], "1+2": SAME, "1+3": MIXED}
    sampler, client, toy = build(answers, "log", "drop_zero_std")
    await sampler.sample(0)
    assert [prompt for prompt, _, _ in client.requests] == ["1+1", "1+2", "1+3"]
    assert [call[1] for call in toy.calls if call[0] == "log"] == [1, 2]
    cursor = sampler.cursor()["source"]
    assert (cursor["next"], cursor["returned"]) == (3, [0])


async def test_hooks_see_the_replacements_too_and_at_the_end_what_is_trained_on(build):
    sampler, _, toy = build({"1+1": SAME, "1+2": MIXED, "1+3": MIXED}, "drop_zero_std")
    await sampler.sample(7)
    assert toy.calls == [("before", 7, [0, 1]), ("before", 7, [2]), ("after", 7, [2, 3, 4, 5])]


async def test_a_hook_that_leaves_no_number_as_reward_is_named(build):
    sampler, _, toy = build({"1+1": MIXED, "1+2": MIXED})
    toy.spoiled.append(float("nan"))
    with pytest.raises(PluginError, match=r"slime_after_rollout \(toy\) .*sample 0 of group 0 .* nan;"):
        await sampler.sample(0)


@pytest.mark.parametrize("run_key", [None, "score"])
def test_the_reward_that_a_row_names_is_the_one_that_has_to_be_there(run_key):
    sample = Sample(reward={"acc": 1.0}, metadata={"reward_key": "acc"})
    refuse_unusable(sample, run_key, source="slime_after_rollout")
    sample.metadata["reward_key"] = "score"
    with pytest.raises(PluginError, match=r"slime_after_rollout .*\{'acc': 1.0\}"):
        refuse_unusable(sample, run_key, source="slime_after_rollout")


async def test_too_many_dropped_groups_end_the_run_with_reasons_and_counts(build, tmp_path):
    sampler, client, _ = build(dict.fromkeys(PROMPTS, SAME), "drop_zero_std", rollout_max_refills=2)
    with pytest.raises(RunError, match=r"rollout 4: 0 of 2 .* 2 .*\(rollout_max_refills\).* 6: zero_std 6\."):
        await sampler.sample(4)
    assert len(client.requests) == 6
    assert [row["dropped"] for row in written(tmp_path, 4)] == ["zero_std"] * 12


async def test_transforms_run_in_the_order_in_which_they_are_named(build):
    answers = {"1+1": MIXED, "1+2": MIXED}
    sampler, _, toy = build(answers, "log", "halve", "log")
    sampled = await sampler.sample(0)
    first = [("log", 0, [1.0, 0.0]), ("log", 1, [1.0, 0.0])]
    last = [("log", 0, [0.5, 0.0]), ("log", 1, [0.5, 0.0])]
    hooks = [("before", 0, [0, 1])], [("after", 0, [0, 1, 2, 3])]
    assert toy.calls == [*hooks[0], *first, ("halve", [0, 1]), *last, *hooks[1]]
    assert sampled.metrics["rollout/changed/halved"] == 4.0
    assert sampled.metrics["rollout/raw_reward"] == 0.5


async def test_transforms_of_the_whole_rollout_see_every_group_again_when_one_was_replaced(build, tmp_path):
    answers = {"1+1": MIXED, "1+2": MIXED, "1+3": MIXED}
    sampler, _, toy = build(answers, "log", "drop_first")
    sampled = await sampler.sample(0)
    assert [call for call in toy.calls if call[0] == "halve"] == [("halve", [0, 1]), ("halve", [0, 1, 2])]
    # Each group was halved once, however often it was seen.
    assert [call for call in toy.calls if call[0] == "log"] == [("log", index, [1.0, 0.0]) for index in range(3)]
    assert sampled.shards[0].indices_B.tolist() == [2, 3, 4, 5]
    assert sampled.metrics["rollout/dropped/first"] == 1.0
    assert sampled.metrics["rollout/changed/halved"] == 4.0
    assert [row["reward"] for row in written(tmp_path)] == [0.5, 0.0, 0.5, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("first", ["first", "pop"])
async def test_a_sample_that_is_taken_out_of_a_group_that_is_dropped_later_is_written_down(build, tmp_path, first):
    sampler, _, _ = build({"1+1": MIXED, "1+2": MIXED}, first, "drop_first", rollout_max_refills=0)
    assert (await sampler.sample(0)).shards[0].indices_B.tolist() == [2]
    assert {(row["index"], row.get("dropped")) for row in written(tmp_path)} == {
        *((2, None), (0, "first"), (1, "left_out"), (3, "left_out"))
    }


async def test_truncated_samples_are_masked_counted_and_keep_their_reward(build, tmp_path):
    cut = [answer("2"), answer("22", "length")]
    sampler, _, _ = build({"1+1": cut, "1+2": MIXED}, "mask_truncated")
    sampled = await sampler.sample(0)
    (shard,) = sampled.shards
    assert shard.loss_mask_U.tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    assert sampled.metrics["rollout/changed/truncated"] == 1.0
    assert [row.get("masked") for row in written(tmp_path)] == [None, True, None, None]


async def test_evaluations_are_not_transformed(build, tmp_path):
    sampler, _, toy = build(dict.fromkeys(PROMPTS, SAME), "log", "drop_zero_std")
    (one,) = eval_sets(RunConfig(eval=EvalConfig(eval_prompt_data=(("sums", tmp_path / "train.jsonl"),))))
    sampler.evaluation._sets = {"sums": sampler.evaluation._load(one)}
    assert (await sampler.evaluate(0))["eval/sums"] == 1.0
    assert toy.calls == []


@pytest.mark.parametrize(
    ("name", "bad", "named"),
    [
        ("bad", "lambda samples: samples", "list"),
        ("bad", "lambda samples: Transformed([])", ""),
        ("bad", "lambda samples: Transformed(samples + samples)", "sample 0 of group 0"),
        ("bad", "lambda samples: Transformed(samples, dropped='a b')", "'a b'"),
        ("bad_rollout", "lambda groups: groups", "list"),
        ("bad_rollout", "lambda groups: []", "2 groups"),
        ("bad_rollout", "lambda groups: None", "2 groups"),
        ("bad_rollout", "lambda groups: [Transformed(group) for group in groups[::-1]]", "sample 2 of group 1"),
    ],
)
async def test_a_broken_contract_names_plugin_and_component(build, name, bad, named):
    sampler, _, toy = build({"1+1": MIXED, "1+2": MIXED}, name)
    toy.BAD = eval(bad, vars(toy))
    with pytest.raises(PluginError, match=rf"^plugin 'toy' \(.*: sample transform {name!r} .*{named}"):
        await sampler.sample(0)


@pytest.mark.parametrize("reward", ["float('nan')", "None", "{'right': 1.0}"])
async def test_a_reward_that_cannot_be_trained_on_names_who_left_it(build, reward):
    sampler, _, toy = build({"1+1": MIXED, "1+2": MIXED}, "bad")

    def spoil(samples):
        samples[1].reward = eval(reward)
        return toy.Transformed(samples)

    toy.BAD = spoil
    with pytest.raises(PluginError, match=r"sample transform 'bad' .*sample 1 of group 0 .*reward"):
        await sampler.sample(0)


def test_turns_of_a_conversation_keep_their_versions() -> None:
    sample = Sample(tokens=[5])
    first = {"finish_reason": "stop", "weight_version": "3"}
    second = {"finish_reason": "stop", "weight_versions": [{"version": "3", "start": 0, "end": 1}]}
    second["weight_versions"].append({"version": "4", "start": 1, "end": 3})
    sample.append_response_tokens(tokens=[6, 7], log_probs=[-1, -1], meta_info=first)
    sample.append_response_tokens(tokens=[8], trainable=False)
    sample.append_response_tokens(tokens=[9, 9, 9], log_probs=[-1, -1, -1], meta_info=second)
    assert token_versions(sample) == [3, 3, -1, 3, 4, 4]
    assert (sample.weight_versions, oldest_version(sample)) == (["3", "4"], 3)


def group(*versions: str) -> list[Sample]:
    return [Sample(weight_versions=[version]) for version in versions]


def measured(samples: list[Sample], staleness: Staleness, *, left_out: int = 0) -> dict[str, float]:
    metrics = staleness.metrics(samples, rollout=5, num_untrained=left_out)
    return {name.removeprefix("rollout/staleness/"): value for name, value in metrics.items()}


def test_staleness_is_measured_in_trained_rollouts() -> None:
    trained = [*group("5", "4"), *group("1", "")]
    assert measured(trained, Staleness(2, "correct")) == {"mean": 5 / 3, "max": 4.0, "corrected": 1.0}
    assert measured(group("5"), Staleness(2, "evict"), left_out=3)["evicted"] == 3.0
    assert measured(group(""), Staleness(2), left_out=3) == {"requeued": 3.0}
    assert measured(group("5"), Staleness(measured=False)) == {}
    assert measured(group("4"), Staleness(measured=False)) == {"mean": 1.0, "max": 1.0}


@pytest.mark.parametrize(
    ("interval", "rollout", "is_measured"),
    [
        (1, {}, False),
        (2, {}, True),
        (1, {"async_buffer_size": 1}, True),
        (1, {"max_staleness": 0}, True),
        (1, {"over_sampling_batch_size": 64}, True),
        (1, {"partial_rollout": True}, True),
    ],
)
def test_a_run_that_may_be_off_policy_measures_it(interval: int, rollout: dict[str, Any], is_measured: bool) -> None:
    config = RunConfig(
        rollout=RolloutConfig(**rollout),
        weights={"update_weights_interval": interval},  # type: ignore[arg-type]
    )
    assert Staleness.of(config) == Staleness(rollout.get("max_staleness"), "requeue", is_measured)


def by(version: str) -> list[Generation]:
    """A right and a wrong answer, sampled by ``version``."""
    return [answer("2", version=version), answer("3", version=version)]


class Moving(FakeClient):
    """Answers a prompt with the next of its answers, and with the last one from then on."""

    async def generate(self, input_ids: list[int], **more: Any) -> list[Generation]:
        answers = await super().generate(input_ids, **more)
        prompt = self.requests[-1][0]
        if len(self.answers[prompt]) > 2:
            self.answers[prompt] = self.answers[prompt][2:]
        return answers


Aging = Callable[..., tuple[Any, Moving]]


@pytest.fixture
def aging(make_sampler: Callable[..., Any]) -> Aging:
    def make(answers: dict[str, list[Generation]], **rollout: Any) -> tuple[Any, Moving]:
        client = Moving(dict(answers))
        return make_sampler(client, [{"prompt": f"1+{n}", "label": "2"} for n in range(1, 7)], rollout=rollout), client

    return make


def dropped(folder: Path, rollout: int) -> list[tuple[int, str]]:
    return [(row["index"], row["dropped"]) for row in written(folder, rollout) if "dropped" in row]


OLD = {"1+1": [*by("3"), *by("5")], "1+2": by("5"), "1+3": by("5")}
"""The first answer to 1+1 is two rollouts old in rollout 5."""


async def test_a_group_over_the_bound_comes_again_and_is_trained_when_it_is_new(aging: Aging, tmp_path: Path) -> None:
    sampler, _ = aging(OLD, max_staleness=1)
    sampled = await sampler.sample(5)
    assert sampled.shards[0].indices_B.tolist() == [2, 3, 0, 1]
    assert sampled.shards[0].weight_version_B is not None
    assert sampled.shards[0].weight_version_B.tolist() == [5] * 4
    assert sampled.metrics["rollout/staleness/requeued"] == 2.0
    assert dropped(tmp_path, 5) == [(0, "requeued"), (1, "requeued")]
    assert sampler.cursor()["source"]["next"] == 2


async def test_a_response_that_is_too_old_to_resume_is_restarted(aging: Aging) -> None:
    rest = Generation(array("i", [1]), array("f", [-0.5]), "stop", ("5",))
    sampler, client = aging({"1+1": by("5"), "1+2": by("5"), "1+22": [rest]}, max_staleness=1, partial_rollout=True)
    groups = sampler._rollouts.prompts.next_groups(2)
    for place, sample in enumerate(one for group in groups for one in group):
        sample.tokens, sample.rollout_log_probs = TokenIds([6, 15, 6 + place // 2, 7]), LogProbs([-0.5])
        sample.response_length, sample.weight_versions, sample.status = 1, [str(3 + place // 2)], Status.ABORTED
    sampler._rollouts.prompts.put_back(groups)
    metrics = (await sampler.sample(5)).metrics
    assert [prompt for prompt, *_ in client.requests] == ["1+1", "1+22", "1+22"]
    assert (metrics["rollout/staleness/begun_anew"], metrics["rollout/staleness/max"]) == (2.0, 1.0)
    assert metrics["rollout/staleness/requeued"] == 0.0


async def test_a_group_over_the_bound_is_trained_where_it_is_corrected(aging: Aging, tmp_path: Path) -> None:
    sampler, _ = aging(OLD, max_staleness=1, stale_samples="correct")
    sampled = await sampler.sample(5)
    assert sampled.shards[0].indices_B.tolist() == [0, 1, 2, 3]
    metrics = {name.rpartition("/")[2]: value for name, value in sampled.metrics.items() if "staleness" in name}
    assert metrics == {"mean": 1.0, "max": 2.0, "corrected": 2.0}
    assert dropped(tmp_path, 5) == []


async def test_groups_that_are_always_too_old_end_the_run_and_are_named(
    aging: Aging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STALE_ROUNDS", 2)
    sampler, _ = aging({f"1+{n}": by("1") for n in range(1, 7)}, max_staleness=1, rollout_max_refills=0)
    with pytest.raises(RunError, match="--max-staleness"):
        await sampler.sample(5)
