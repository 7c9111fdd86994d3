"""The group generator with its components: which reward counts, what hooks see, which component is blamed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slime_core.config.sampling import RolloutConfig
from slime_core.errors import EngineError, PluginError, RequestFailed, RequestRefused, RunError
from slime_core.generation import GenerateContext, Interrupted, SamplingParams
from slime_core.plugins.discovery import Plugin
from slime_core.rollout.group_generator import GroupGenerator, mark_missing_failed, reset_sample
from slime_core.rollout.group_scheduler import RequeueBuffer
from slime_core.rollout.routing import RoutedComponent
from slime_core.track.ledger import Journal
from slime_core.types import PromptGroup, RewardFailure, Sample, Status

ACME = Plugin("acme", "acme-rl", "1.2", "acme.plugin")
NOTHING: Any = None


class Only:
    """A choice of one component."""

    def __init__(self, component: Any, *, takes_groups: bool = False) -> None:
        self._chosen = RoutedComponent("mine", component, takes_groups, ACME)

    def of(self, sample: Sample) -> RoutedComponent:
        return self._chosen


class Scores:
    """Gives 1 to every sample but those with another ``answers``, and keeps what it saw in each call."""

    def __init__(self, answers: dict[int, Any] | None = None) -> None:
        self.calls: list[list[int]] = []
        self._answers = answers or {}

    async def score(self, samples: list[Sample]) -> list[Any]:
        indices = [sample.index or 0 for sample in samples]
        self.calls.append(indices)
        return [self._answers.get(index, 1.0) for index in indices]


class Hooks:
    def __init__(self) -> None:
        self.seen: list[Status] = []

    def implementers(self, hook: str) -> str:
        return "mine"

    async def after_generate(self, sample: Sample, context: GenerateContext) -> Sample:
        self.seen.append(sample.status)
        sample.response += "!"
        return sample


def collector(
    generator: Any, scores: Any = None, *, together: bool = False, hooks: Any = None, **rollout: Any
) -> GroupGenerator:
    rewards: Any = Only(scores or Scores(), takes_groups=together)
    return GroupGenerator(generator, rewards, rollout=RolloutConfig(**rollout), hooks=hooks)


async def collect(made: GroupGenerator, group: PromptGroup | None = None, *, evaluation: bool = False) -> PromptGroup:
    group = group or [Sample(group_index=3, index=index) for index in range(3)]
    return await made.collect(GenerateContext(NOTHING, NOTHING, evaluation), group, SamplingParams())


def generating(function: Callable[[Sample], Any], *, takes_groups: bool) -> Only:
    """A generate function that does ``function`` to every sample."""

    async def one(context: Any, sample: Sample, sampling: Any) -> Any:
        return function(sample)

    async def several(context: Any, samples: PromptGroup, sampling: Any) -> Any:
        return [function(sample) for sample in samples]

    return Only(several if takes_groups else one, takes_groups=takes_groups)


def completed(sample: Sample) -> Sample:
    sample.status = Status.COMPLETED
    return sample


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("takes_groups", [False, True])
@pytest.mark.parametrize("reward", [0.25, np.float32(0.25), 0])
async def test_a_reward_that_the_generate_function_gave_stays(takes_groups: bool, together: bool, reward: Any) -> None:
    def answer(sample: Sample) -> Sample:
        sample.status, sample.reward = Status.COMPLETED, reward if sample.index == 1 else None
        return sample

    scores = Scores()
    group = await collect(collector(generating(answer, takes_groups=takes_groups), scores, together=together))
    assert [sample.reward for sample in group] == [1.0, float(reward), 1.0]
    assert type(group[1].reward) in (int, float)
    assert sorted(index for call in scores.calls for index in call) == [0, 2]


async def test_a_reward_of_its_own_that_is_no_finite_number_fails_the_sample() -> None:
    def answer(sample: Sample) -> Sample:
        sample.status, sample.reward = Status.COMPLETED, float("nan")
        return sample

    group = await collect(collector(generating(answer, takes_groups=True)))
    assert {(sample.status, sample.reward) for sample in group} == {(Status.FAILED, None)}
    assert re.search("generate function .* nan", group[0].error or "")


@pytest.mark.parametrize("takes_groups", [False, True])
async def test_hooks_see_samples_that_have_an_answer_and_no_others(takes_groups: bool) -> None:
    def answer(sample: Sample) -> Sample:
        sample.status = [Status.FAILED, Status.TRUNCATED, Status.ABORTED][sample.index or 0]
        return sample

    hooks = Hooks()
    group = await collect(collector(generating(answer, takes_groups=takes_groups), hooks=hooks))
    assert hooks.seen == [Status.TRUNCATED]
    assert [(sample.index, sample.response) for sample in group] == [(0, ""), (1, "!"), (2, "")]


async def test_finished_responses_are_not_lost_with_a_group_that_no_engine_answers() -> None:
    async def fail(context: Any, samples: PromptGroup, sampling: Any) -> Any:
        samples[2].status = Status.COMPLETED
        raise RequestFailed("no answer within 3 s", "engine_timeout")

    group = [Sample(group_index=3, index=index) for index in range(3)]
    group[1].status, group[1].reward = Status.TRUNCATED, 0.25
    group = await collect(collector(Only(fail, takes_groups=True)), group)
    assert [(sample.status, sample.reward, sample.failure_cause) for sample in group] == [
        (Status.FAILED, None, "engine_timeout"),
        (Status.TRUNCATED, 0.25, None),
        (Status.FAILED, None, "engine_timeout"),
    ]


@pytest.mark.parametrize("takes_groups", [False, True])
async def test_an_error_of_a_generate_function_is_the_plugins_and_one_of_slime_passes_as_it_is(
    takes_groups: bool,
) -> None:
    def raising(error: Exception) -> GroupGenerator:
        def fail(sample: Sample) -> Sample:
            raise error

        return collector(generating(fail, takes_groups=takes_groups))

    for error in (RequestRefused("too long"), RunError("no")):
        with pytest.raises(type(error), match=f"^{error}$"):
            await collect(raising(error))
    with pytest.raises(PluginError, match=r"'acme'.* 'mine' .*KeyError"):
        await collect(raising(KeyError("answer")))
    assert [sample.error for sample in await collect(raising(EngineError("gone")))] == ["gone"] * 3


@pytest.mark.parametrize(
    ("takes_groups", "returned"),
    [
        (True, None),
        (True, Sample()),
        (True, []),
        (True, [Sample(), "text"]),
        (False, None),
        (False, []),
        (False, [None]),
    ],
)
async def test_a_return_value_that_is_no_sample_is_refused(takes_groups: bool, returned: Any) -> None:
    async def generate(context: Any, given: Any, sampling: Any) -> Any:
        return returned

    with pytest.raises(PluginError, match=r"'acme'.* 'mine' "):
        await collect(collector(Only(generate, takes_groups=takes_groups)))


def test_a_pending_sample_keeps_what_its_source_gave_it_and_loses_its_reward() -> None:
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
    [("next_groups", [2]), ("put_back", [[[Sample()]]]), ("state", []), ("restore", [{}]), ("__len__", [])],
)
def test_a_data_source_that_fails_is_named_with_its_plugin(method: str, arguments: list[Any]) -> None:
    source: Any = Source()
    with pytest.raises(PluginError, match=rf"'acme'.* 'mine': {method} .*ZeroDivisionError"):
        getattr(RequeueBuffer(RoutedComponent("mine", source, plugin=ACME), Journal(None)), method)(*arguments)


@pytest.mark.parametrize("returned", [None, [], [[Sample()]], [[Sample()], []]])
def test_a_data_source_that_returns_no_groups_is_refused(returned: Any) -> None:
    source: Any = Source()
    source.next_groups = lambda n: returned
    with pytest.raises(PluginError, match=r"'acme'.* 'mine': next_groups\(2\)"):
        RequeueBuffer(RoutedComponent("mine", source, plugin=ACME), Journal(None)).next_groups(2)


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
        sample.response_length = 1
        return completed(sample)


def retrying(generate: Any, scores: Any = None, *, together: bool = False, retries: int = 2) -> GroupGenerator:
    rollout: dict[str, Any] = {"failed_samples": "retry", "failed_sample_retries": retries}
    return collector(Only(generate), scores, together=together, **rollout)


async def test_a_failed_sample_is_generated_again_and_its_siblings_are_not() -> None:
    generate = FailsFirst(0, 2, 1)
    made = retrying(generate)
    group = await collect(made)
    assert sorted(generate.requests) == [0, 1, 1, 1, 2, 2]
    expected = [(place, Status.COMPLETED, None) for place in range(3)]
    assert [(sample.index, sample.status, sample.error) for sample in group] == expected
    assert made.take_metrics() == {"rollout/retries/engine_timeout": 3.0}
    assert made.take_metrics() == {}


async def test_retries_are_bounded_and_the_cause_stays() -> None:
    group = await collect(retrying(FailsFirst(0, 9, 0), retries=1))
    assert [sample.status for sample in group] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    assert (group[1].failure_cause, group[1].error, group[1].reward) == ("engine_timeout", "no engine answered", None)


async def test_what_was_refused_is_not_generated_again() -> None:
    generate = FailsFirst(0, 1, 0, cause="engine_status_429")
    made = retrying(generate, Scores({2: RewardFailure("refused", "no")}))
    group = await collect(made)
    assert sorted(generate.requests) == [0, 1, 2]
    assert [sample.failure_cause for sample in group] == [None, "engine_status_429", "reward_refused"]
    assert made.take_metrics() == {"rollout/reward_failures/refused": 1.0}


async def test_an_evaluation_is_not_generated_again() -> None:
    generate = FailsFirst(1, 0, 0)
    await collect(retrying(generate), evaluation=True)
    assert sorted(generate.requests) == [0, 1, 2]


async def test_a_row_says_which_of_several_rewards_counts() -> None:
    def done(sample: Sample) -> Sample:
        sample.metadata = {"reward_key": [None, "acc", "other"][sample.index or 0]}
        return completed(sample)

    scores = Scores({index: {"score": 1.0, "acc": 0.5} for index in range(3)})
    made = collector(generating(done, takes_groups=False), scores, reward_key="score")
    group = await collect(made)
    assert [sample.reward_value("score") for sample in group[:2]] == [1.0, 0.5]
    assert (group[2].status, group[2].failure_cause) == (Status.FAILED, "reward_invalid")
    measured = await collect(made, evaluation=True)
    assert [sample.reward_value("score") for sample in measured] == [1.0, 0.5, 0.0]


async def test_a_reward_of_whole_groups_waits_for_the_second_try() -> None:
    scores = Scores()
    group = await collect(retrying(FailsFirst(0, 1, 0), scores, together=True))
    assert [sample.reward for sample in group] == [1.0, 1.0, 1.0]
    assert [len(call) for call in scores.calls] == [3]


async def test_nothing_is_generated_any_more_once_an_engine_has_refused_a_request() -> None:
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
        await collect(collector(Only(answer)))
    for _ in range(3):  # the cancelled ones take their turn
        await asyncio.sleep(0)
    assert ended == [0, 2]
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("takes_groups", [False, True])
async def test_an_aborted_turn_leaves_its_sample_aborted_and_finished_ones_as_they_are(takes_groups: bool) -> None:
    def answer(sample: Sample) -> Sample:
        sample.status = Status.ABORTED if sample.index == 1 else Status.COMPLETED
        sample.response = str(sample.index)
        if sample.index == 1:
            raise Interrupted("aborted", sample)
        return sample

    group = await collect(collector(generating(answer, takes_groups=takes_groups)))
    # A function of groups stops at the first abort: later samples have not started.
    last = (Status.ABORTED, "") if takes_groups else (Status.COMPLETED, "2")
    assert [(one.status, one.response) for one in group] == [(Status.COMPLETED, "0"), (Status.ABORTED, "1"), last]


def test_a_sample_that_was_not_returned_is_a_failed_one() -> None:
    group = [Sample(group_index=0, index=place) for place in range(3)]
    (lost,) = mark_missing_failed(group, [group[0], group[2]])
    assert (lost.index, lost.status, lost.failure_cause) == (1, Status.FAILED, "not_returned")
