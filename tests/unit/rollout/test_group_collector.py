"""The group generator with its components: which reward counts, what hooks see, which component is blamed."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from slime_core.config.sampling import RolloutConfig
from slime_core.errors import EngineError, PluginError, RequestFailed, RequestRefused, RunError
from slime_core.generation import GenerateContext, Interrupted, SamplingParams
from slime_core.plugins.discovery import PluginIdentity
from slime_core.rollout.components import CheckedDataSource, RoutedComponent
from slime_core.rollout.group_generator import GroupGenerator, mark_missing_failed, reset_sample
from slime_core.types import PromptGroup, RewardFailure, Sample, Status

ACME = PluginIdentity("acme", "acme-rl", "1.2", "acme.plugin")
WHOSE = r"^plugin 'acme' \(acme-rl 1\.2, entry point acme\.plugin\): "


class Only:
    """A choice of one component."""

    def __init__(self, component: Any, *, takes_groups: bool = False) -> None:
        self._chosen = RoutedComponent("mine", component, takes_groups, ACME)

    def of(self, sample: Sample) -> RoutedComponent:
        return self._chosen


class Scores:
    """Gives 1 to every sample and keeps which it saw."""

    def __init__(self) -> None:
        self.seen: list[int | None] = []

    async def score(self, samples: list[Sample]) -> list[float]:
        self.seen += [sample.index for sample in samples]
        return [1.0] * len(samples)


class Hooks:
    def __init__(self) -> None:
        self.seen: list[Status] = []

    def implementers(self, hook: str) -> str:
        return "mine"

    async def after_generate(self, sample: Sample, context: GenerateContext) -> Sample:
        self.seen.append(sample.status)
        sample.response += "!"
        return sample


async def collect(generator: Only, scores: Any = None, **options: Any) -> PromptGroup:
    rewards = Only(scores or Scores(), takes_groups=options.pop("together", False))
    collector = GroupGenerator(generator, rewards, rollout=RolloutConfig(), **options)  # type: ignore[arg-type]
    context = GenerateContext(None, None)  # type: ignore[arg-type]
    group = [Sample(group_index=3, index=index) for index in range(3)]
    found = await collector.collect(context, group, SamplingParams())
    return found


def generating(function: Any, *, takes_groups: bool) -> Only:
    """A generate function that does ``function`` to every sample."""

    async def one(context: Any, sample: Sample, sampling: Any) -> Any:
        return function(sample)

    async def several(context: Any, samples: PromptGroup, sampling: Any) -> Any:
        return [function(sample) for sample in samples]

    return Only(several if takes_groups else one, takes_groups=takes_groups)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("takes_groups", [False, True])
@pytest.mark.parametrize("own", [0.25, np.float32(0.25), 0])
async def test_a_reward_that_the_generate_function_gave_stays(takes_groups, together, own):
    def answer(sample: Sample) -> Sample:
        sample.status, sample.reward = Status.COMPLETED, own if sample.index == 1 else None
        return sample

    scores = Scores()
    found = await collect(generating(answer, takes_groups=takes_groups), scores, together=together)
    assert [sample.reward for sample in found] == [1.0, float(own), 1.0]
    assert type(found[1].reward) in (int, float)
    assert sorted(scores.seen) == [0, 2]


async def test_a_reward_of_its_own_that_is_no_finite_number_fails_the_sample():
    def answer(sample: Sample) -> Sample:
        sample.status, sample.reward = Status.COMPLETED, float("nan")
        return sample

    found = await collect(generating(answer, takes_groups=True))
    assert {(sample.status, sample.reward) for sample in found} == {(Status.FAILED, None)}
    assert re.search("generate function .* nan;.* --reward-key", found[0].error or "")


@pytest.mark.parametrize("takes_groups", [False, True])
async def test_hooks_see_samples_that_have_an_answer_and_no_others(takes_groups):
    def answer(sample: Sample) -> Sample:
        sample.status = [Status.FAILED, Status.TRUNCATED, Status.ABORTED][sample.index or 0]
        return sample

    hooks = Hooks()
    found = await collect(generating(answer, takes_groups=takes_groups), hooks=hooks)
    assert hooks.seen == [Status.TRUNCATED]
    assert [(sample.index, sample.response) for sample in found] == [(0, ""), (1, "!"), (2, "")]


async def test_finished_responses_are_not_lost_with_a_group_that_no_engine_answers():
    async def fail(context: Any, samples: PromptGroup, sampling: Any) -> Any:
        samples[2].status = Status.COMPLETED
        raise RequestFailed("no answer within 3 s", "engine_timeout")

    collector = GroupGenerator(Only(fail, takes_groups=True), Only(Scores()), rollout=RolloutConfig())  # type: ignore[arg-type]
    group = [Sample(group_index=3, index=index) for index in range(3)]
    group[1].status, group[1].reward = Status.TRUNCATED, 0.25
    context = GenerateContext(None, None)  # type: ignore[arg-type]
    found = await collector.collect(context, group, SamplingParams())
    assert [(sample.status, sample.reward, sample.failure_cause) for sample in found] == [
        (Status.FAILED, None, "engine_timeout"),
        (Status.TRUNCATED, 0.25, None),
        (Status.FAILED, None, "engine_timeout"),
    ]


@pytest.mark.parametrize("takes_groups", [False, True])
async def test_a_generate_function_that_fails_is_named_with_its_plugin_and_place(takes_groups):
    def fail(sample: Sample) -> Sample:
        raise KeyError("answer")

    with pytest.raises(
        PluginError, match=rf"{WHOSE}generate function 'mine' failed with KeyError: 'answer' \(.*py:\d+"
    ):
        await collect(generating(fail, takes_groups=takes_groups))


@pytest.mark.parametrize("takes_groups", [False, True])
async def test_errors_of_slime_pass_as_they_are(takes_groups):
    def raising(error: Exception) -> Only:
        def fail(sample: Sample) -> Sample:
            raise error

        return generating(fail, takes_groups=takes_groups)

    for error in (RequestRefused("too long"), RunError("no")):
        with pytest.raises(type(error), match=f"^{error}$"):
            await collect(raising(error))
    assert [sample.error for sample in await collect(raising(EngineError("gone")))] == ["gone"] * 3


@pytest.mark.parametrize(
    ("takes_groups", "returned", "found"),
    [
        (True, None, "a NoneType"),
        (True, Sample(), "a Sample"),
        (True, [], "an empty list"),
        (True, [Sample(), "text"], "a list with a str"),
        (False, None, "a NoneType"),
        (False, [], "an empty list"),
        (False, [None], "a list with a NoneType"),
    ],
)
async def test_a_return_value_that_is_no_sample_is_refused(takes_groups, returned, found):
    async def generate(context: Any, given: Any, sampling: Any) -> Any:
        return returned

    accepted = "a list of at least one Sample" if takes_groups else "a Sample, or a list of at least one"
    what = f"generate function 'mine' returned {found}; accepted: {accepted}: those that it was handed, finished"
    with pytest.raises(PluginError, match=rf"{WHOSE}{what}\.\nCorrect acme-rl\.$"):
        await collect(Only(generate, takes_groups=takes_groups))


async def test_samples_that_a_group_generator_made_inherit_group_and_index():
    found = await collect(generating(lambda _: Sample(status=Status.COMPLETED), takes_groups=True))
    assert [(sample.group_index, sample.index) for sample in found] == [(3, 0), (3, 1), (3, 2)]


def test_a_pending_sample_keeps_what_its_source_gave_it_and_loses_its_reward():
    sample = Sample(tokens=[5, 6], loss_mask=[], reward=1.0)
    reset_sample(sample)
    assert (sample.tokens, sample.loss_mask, sample.reward) == ([5, 6], [], None)


class Source:
    """A data source of which every method divides by zero."""

    def _fail(self, *_: Any) -> Any:
        return 1 // 0

    next_groups = put_back = state = restore = __len__ = _fail


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("next_groups", [2]), ("put_back", [[]]), ("state", []), ("restore", [{}]), ("__len__", [])],
)
def test_a_data_source_that_fails_is_named_with_its_plugin(method, arguments):
    guarded = CheckedDataSource(Source(), name="mine", plugin=ACME)
    with pytest.raises(PluginError, match=rf"{WHOSE}data source 'mine': {method} failed with ZeroDivisionError"):
        getattr(guarded, method)(*arguments)


@pytest.mark.parametrize(
    ("returned", "found"),
    [(None, "a NoneType"), ([], "0 entries"), ([[Sample()]], "1 entries"), ([[Sample()], []], "2 entries")],
)
def test_a_data_source_that_returns_no_groups_is_refused(returned, found):
    source = Source()
    source.next_groups = lambda n: returned  # type: ignore[method-assign]
    what = rf"{WHOSE}data source 'mine': next_groups\(2\) returned {found}; accepted: a list of 2 groups, each a list"
    with pytest.raises(PluginError, match=what):
        CheckedDataSource(source, name="mine", plugin=ACME).next_groups(2)


# --- Failed samples ---------------------------------------------------------------------------------------------------


class FailsFirst:
    """Fails for each sample as often as the test sets, then answers."""

    def __init__(self, *times: int, cause: str = "engine_timeout") -> None:
        self.left, self.cause = list(times), cause
        self.requests: list[int] = []

    async def __call__(self, context: Any, sample: Sample, sampling: Any) -> Sample:
        place = sample.index or 0
        self.requests.append(place)
        if self.left[place]:
            self.left[place] -= 1
            raise RequestFailed("no engine answered", self.cause)
        sample.status, sample.response_length = Status.COMPLETED, 1
        return sample


class Ones:
    def __init__(self) -> None:
        self.scored: list[int] = []

    async def score(self, samples: Any) -> list[float]:
        self.scored.append(len(samples))
        return [1.0] * len(samples)


def retrying(generate: Any, *, takes_groups: bool = False, retries: int = 2) -> tuple[GroupGenerator, Ones]:
    reward = Ones()
    rollout = RolloutConfig(failed_samples="retry", failed_sample_retries=retries)
    choices: list[Any] = [Only(generate), Only(reward, takes_groups=takes_groups)]
    return GroupGenerator(*choices, rollout=rollout), reward


async def collected(collector: GroupGenerator, *, evaluation: bool = False) -> list[Sample]:
    nothing: Any = None
    context = GenerateContext(nothing, nothing, evaluation)
    group = [Sample(group_index=0, index=place) for place in range(3)]
    made = await collector.collect(context, group, SamplingParams())
    return made


async def test_a_failed_sample_is_generated_again_and_its_siblings_are_not():
    generate = FailsFirst(0, 2, 1)
    collector, _ = retrying(generate)
    made = await collected(collector)
    assert sorted(generate.requests) == [0, 1, 1, 1, 2, 2]
    assert [(sample.index, sample.status, sample.error) for sample in made] == [
        (place, Status.COMPLETED, None) for place in range(3)
    ]
    assert collector.take_metrics() == {"rollout/retries/engine_timeout": 3.0}
    assert collector.take_metrics() == {}


async def test_retries_are_bounded_and_the_cause_stays():
    collector, _ = retrying(FailsFirst(0, 9, 0), retries=1)
    made = await collected(collector)
    assert [sample.status for sample in made] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert (made[1].failure_cause, made[1].error, made[1].reward) == ("engine_timeout", "no engine answered", None)


async def test_a_refused_request_is_not_generated_again():
    generate = FailsFirst(0, 1, 0, cause="engine_status_429")
    collector, reward = retrying(generate)
    refused = RewardFailure("refused", "no")
    reward.score = lambda samples: answered(samples, {2: refused})  # type: ignore[method-assign]
    made = await collected(collector)
    assert sorted(generate.requests) == [0, 1, 2]
    assert [one.failure_cause for one in made] == [None, "engine_status_429", "reward_refused"]
    assert collector.take_metrics() == {"rollout/reward_failures/refused": 1.0}


async def answered(samples: list[Sample], found: dict[int, Any]) -> list[Any]:
    return [found.get(sample.index or 0, 1.0) for sample in samples]


async def test_a_row_says_which_of_several_rewards_counts():
    class Named:
        async def score(self, samples: Any) -> Any:
            return [{"score": 1.0, "acc": 0.5}] * len(samples)

    async def done(context: Any, sample: Sample, sampling: Any) -> Sample:
        sample.status, sample.metadata = Status.COMPLETED, {"reward_key": [None, "acc", "other"][sample.index or 0]}
        return sample

    choices: list[Any] = [Only(done), Only(Named())]
    made = await collected(GroupGenerator(*choices, rollout=RolloutConfig(reward_key="score")))
    assert [sample.reward_value("score") for sample in made[:2]] == [1.0, 0.5]
    assert (made[2].status, made[2].failure_cause) == (Status.FAILED, "reward_invalid")
    assert re.search("reward model 'mine' .*{'score': 1.0, 'acc': 0.5}.* other", made[2].error or "")
    measured = await collected(GroupGenerator(*choices, rollout=RolloutConfig(reward_key="score")), evaluation=True)
    assert [sample.reward_value("score") for sample in measured] == [1.0, 0.5, 0.0]


async def test_a_reward_of_whole_groups_waits_for_the_second_try():
    collector, reward = retrying(FailsFirst(0, 1, 0), takes_groups=True)
    assert [sample.reward for sample in await collected(collector)] == [1.0, 1.0, 1.0]
    assert reward.scored == [3]


async def test_an_evaluation_is_not_generated_again():
    generate = FailsFirst(1, 0, 0)
    collector, _ = retrying(generate)
    await collected(collector, evaluation=True)
    assert sorted(generate.requests) == [0, 1, 2]


def test_a_sample_that_was_not_returned_is_a_failed_one():
    given = [Sample(group_index=0, index=place) for place in range(3)]
    (lost,) = mark_missing_failed(given, [given[0], given[2]])
    assert (lost.index, lost.status, lost.failure_cause) == (1, Status.FAILED, "not_returned")


class AtOnce:
    """Scores, and knows how many calls it had at the same time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def score(self, samples: list[Sample]) -> list[float]:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return [1.0] * len(samples)


async def test_groups_of_a_rollout_function_are_scored_concurrently():
    scores = AtOnce()
    collector = GroupGenerator(Only(None), Only(scores), rollout=RolloutConfig())  # type: ignore[arg-type]
    groups = [[Sample(index=index, status=Status.COMPLETED)] for index in range(3)]
    groups[1][0].reward = 0.5
    await collector.reward_missing(groups)
    assert [group[0].reward for group in groups] == [1.0, 0.5, 1.0]
    assert scores.most == 2


async def test_nothing_is_generated_any_more_once_an_engine_has_refused_a_request():
    ended = []

    async def answer(context: Any, sample: Sample, sampling: Any) -> Sample:
        if sample.index == 1:
            raise RequestRefused("too long")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(sample.index)
            raise
        return sample

    with pytest.raises(RequestRefused, match="too long"):
        await collect(Only(answer))
    for _ in range(3):  # the cancelled ones take their turn
        await asyncio.sleep(0)
    assert ended == [0, 2]
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("takes_groups", [False, True])
async def test_an_aborted_turn_leaves_its_sample_aborted_and_finished_ones_as_they_are(takes_groups):
    def answer(sample: Sample) -> Sample:
        sample.status = Status.ABORTED if sample.index == 1 else Status.COMPLETED
        sample.response = str(sample.index)
        if sample.index == 1:
            raise Interrupted("aborted", sample)
        return sample

    found = await collect(generating(answer, takes_groups=takes_groups))
    # A function of groups stops at the first abort: later samples have not started.
    last = (Status.ABORTED, "") if takes_groups else (Status.COMPLETED, "2")
    assert [(one.status, one.response) for one in found] == [(Status.COMPLETED, "0"), (Status.ABORTED, "1"), last]


async def test_a_response_has_as_many_tokens_as_its_row_allows():
    seen: list[tuple[int | None, int]] = []

    async def generate(context: Any, sample: Sample, sampling: Any) -> Sample:
        seen.append((context.max_response_len, sampling.max_new_tokens))
        sample.status = Status.COMPLETED
        return sample

    context = GenerateContext(None, None)  # type: ignore[arg-type]
    collector = GroupGenerator(Only(generate), Only(Scores()), rollout=RolloutConfig())  # type: ignore[arg-type]
    groups = [[Sample()], [Sample(metadata={"sampling_params": {"max_new_tokens": 3}})]]
    for group in groups:
        await collector.collect(context, group, SamplingParams(max_new_tokens=8))
    assert seen == [(8, 8), (3, 3)]
