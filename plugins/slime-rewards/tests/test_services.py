"""Reward models that call a service: their requests, the rewards of the answers, and the cost of failures."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView, services
from slime_core.errors import ConfigError
from slime_core.types import RewardFailure, Sample
from slime_rewards import services as reward_services
from slime_rewards.options import RewardsOptions
from slime_rewards.services import JudgeReward, RemoteReward, ServedReward
from tests.http_service import HttpService, chat, embedding
from tests.simulated_clock import only_pauses_take_time

Model = type[ServedReward] | type[JudgeReward]


def samples(*responses: str) -> list[Sample]:
    return [Sample(index=place, prompt="1+1", response=text, label="2") for place, text in enumerate(responses)]


def remote(service: HttpService, path: str = "", *, timeout_s: float = 30.0, **options: Any) -> RemoteReward:
    run = RunView(settings={"reward_timeout_s": timeout_s})
    return RemoteReward(RewardsOptions(rm_url=service.url + path, **options), run)


def served(kind: Model, service: HttpService, **options: Any) -> ServedReward | JudgeReward:
    run = RunView(settings={"rm_model": "helper"}, models={"helper": service.url})
    return kind(RewardsOptions(**options), run)


@contextmanager
def answering(answer: Callable[[Any], Any] = lambda body: 1.0, *, fails: tuple[int, ...] = ()) -> Iterator[HttpService]:
    with HttpService(answer) as service:
        service.fail_with = list(fails)
        yield service


def check_failure(failure: object, cause: str, *parts: str) -> None:
    assert isinstance(failure, RewardFailure)
    assert failure.cause == cause
    assert [part for part in parts if part not in failure.error] == []


# --- A service --------------------------------------------------------------------------------------------------------


async def test_a_service_is_sent_prompt_response_and_label_and_answers_the_reward() -> None:
    with answering(lambda body: len(body["response"])) as service:
        assert await remote(service, "/score?key=1").score(samples("a", "bb")) == [1.0, 2.0]
    assert sorted(service.requests, key=str) == [
        ("/score?key=1", {"prompt": "1+1", "response": "a", "label": "2"}),
        ("/score?key=1", {"prompt": "1+1", "response": "bb", "label": "2"}),
    ]


async def test_several_samples_share_a_request_and_keep_their_order() -> None:
    with answering(lambda body: [len(row["response"]) for row in body]) as service:
        assert await remote(service, rm_batch_size=2).score(samples("a", "bb", "ccc")) == [1.0, 2.0, 3.0]
    assert sorted(len(body) for _, body in service.requests) == [1, 2]


async def test_named_numbers_stay_named() -> None:
    with answering(lambda body: {"score": 1, "format": 0.5, "pred": "34", "more": [1], "why": None}) as service:
        assert await remote(service).score(samples("a")) == [{"score": 1.0, "format": 0.5}]


async def test_a_token_is_sent_as_a_header_and_no_message_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_TOKEN", " s3cret-token \n")
    monkeypatch.setenv("RM_KEY", "s3cret-key")
    answers = [b"no table: s3cret-token s3cret-key", {"note": "s3cret-token"}, 1.0]
    with answering(lambda body: answers.pop(0)) as service:
        reward = remote(service, "/score?key=${RM_KEY}", rm_token_env="RM_TOKEN")
        first, second, third = [(await reward.score(samples("a")))[0] for _ in range(3)]
    assert service.authorized == ["Bearer s3cret-token"] * 3
    assert [path for path, _ in service.requests] == ["/score?key=s3cret-key"] * 3
    check_failure(first, "invalid", f"{service.url}/score", "${RM_TOKEN} ${RM_KEY}")
    check_failure(second, "invalid", f"{service.url}/score", "{'note': '${RM_TOKEN}'}")
    assert third == 1.0
    assert "s3cret" not in f"{first}{second}"


@pytest.mark.parametrize("value", [None, "two\nlines"])
def test_a_token_that_is_not_there_is_missed_at_once(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("RM_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("RM_TOKEN", value)
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:1.*RM_TOKEN"):
        RemoteReward(RewardsOptions(rm_url="http://127.0.0.1:1", rm_token_env="RM_TOKEN"), RunView())


async def test_rows_choose_among_the_services_that_the_run_allows_and_no_other_is_called() -> None:
    with answering(lambda body: [1.0] * len(body)) as first, answering(lambda body: [2.0] * len(body)) as second:
        reward = remote(first, "/a", rm_row_urls=(second.url + "/b",), rm_batch_size=2)
        urls = [None, second.url + "/b", second.url + "/c", first.url + "/a", "", ["x"], second.url + "/b"]
        rewards = await reward.score([Sample(metadata={} if url is None else {"rm_url": url}) for url in urls])
    for place, url in ((5, "['x']"), (2, repr(second.url + "/c"))):
        check_failure(rewards.pop(place), "refused", f"{first.url}/a, {second.url}/b", "--rm-row-urls", url)
    assert rewards == [1.0, 2.0, 1.0, 1.0, 2.0]
    assert sorted(len(body) for _, body in first.requests) == [1, 2]
    assert [(path, len(body)) for path, body in second.requests] == [("/b", 2)]


@pytest.mark.parametrize("status", [0, 500, 503])
async def test_temporary_failures_are_retried(status: int) -> None:
    with answering(fails=(status,)) as service:
        assert await remote(service).score(samples("a")) == [1.0]
    assert len(service.requests) == 2


@pytest.mark.parametrize("status", [302, 400, 401, 404, 408, 429])
async def test_a_refusal_is_final_and_costs_its_sample_alone(status: int) -> None:
    with answering(fails=(status,)) as service:
        failure, reward = [(await remote(service, "/a?key=hidden").score(samples("a")))[0] for _ in range(2)]
    check_failure(failure, "refused", f"{service.url}/a ", f"{status}: {service.refusal.decode()}")
    assert ("--rm-retry-statuses" in failure.error) is (status in (408, 429))
    assert reward == 1.0
    assert len(service.requests) == 2


@pytest.mark.parametrize("waits", [None, "7", "Thu, 01 Jan 1970 00:00:09 GMT", "soon"])
async def test_a_named_refusal_is_retried_no_earlier_than_retry_after(
    monkeypatch: pytest.MonkeyPatch, waits: str | None
) -> None:
    now = only_pauses_take_time(monkeypatch, services)
    with answering(fails=(429, 429)) as service:
        service.retry_after = waits
        assert await remote(service, rm_retry_statuses=(429,)).score(samples("a")) == [1.0]
        service.fail_with = [408]
        check_failure(*await remote(service, rm_retry_statuses=(429,)).score(samples("a")), "refused")
    assert len(service.requests) == 4
    assert now() >= (14 if waits == "7" else 0)


@pytest.mark.parametrize(
    ("header", "limits"),
    [
        *(("", (0, 0)), ("7", (7, 7)), ("-7", (0, 0)), ("9" * 5000, (math.inf, math.inf))),
        *(("Thu, 01 Jan 1970 00:00:09 -0000", (0, 0)), ("Fri, 31 Dec 9999 23:59:59 GMT", (10**9, 10**12))),
    ],
)
def test_retry_after_in_seconds_or_as_a_date(header: str, limits: tuple[float, float]) -> None:
    assert limits[0] <= services._wait_s(header) <= limits[1]


async def test_a_service_that_asks_for_more_time_than_there_is_costs_the_sample_at_once() -> None:
    with answering(fails=(503,)) as service:
        service.retry_after = "120"
        (failure,) = await remote(service, timeout_s=60).score(samples("a"))
    check_failure(failure, "unavailable", service.url, "60 s", "503", "120 s", "--reward-timeout-s")
    assert len(service.requests) == 1


async def test_a_service_that_stays_away_costs_the_sample_within_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_pauses_take_time(monkeypatch, services)
    with answering(fails=(503,) * 1000) as service:
        reward = remote(service, "?key=hidden", timeout_s=60)
        failures = await reward.score(samples("a"))
    failures += await reward.score(samples("a"))
    for failure, cause in zip(failures, ("unavailable", "unreachable"), strict=True):
        check_failure(failure, cause, service.url, "60 s", "--reward-timeout-s")
        assert "hidden" not in str(failure)


async def test_a_service_that_does_not_answer_is_too_slow() -> None:
    end = threading.Event()
    with answering(lambda body: end.wait(30)) as service:
        (failure,) = await remote(service, timeout_s=0.2).score(samples("a"))
        end.set()
    check_failure(failure, "timeout")


@pytest.mark.parametrize(
    "answer", [None, "good", math.nan, math.inf, True, {}, {"score": "good"}, [1.0], {"a": 1, "b": math.nan}]
)
async def test_an_answer_that_is_no_reward_costs_its_sample(answer: object) -> None:
    with answering(lambda body: 1.0 if body["response"] == "b" else answer) as service:
        failure, reward = await remote(service).score(samples("a", "b"))
    check_failure(failure, "invalid", service.url, repr(answer))
    assert reward == 1.0


@pytest.mark.parametrize(("answer", "options"), [([1.0], {"rm_batch_size": 2}), (b"<html>", {})])
async def test_an_answer_of_another_length_or_without_json_is_quoted(answer: Any, options: dict[str, int]) -> None:
    with answering(lambda body: answer) as service:
        failures = await remote(service, **options).score(samples("a", "b"))
    assert failures[0] == failures[1]
    check_failure(failures[0], "invalid", service.url, "<html>" if isinstance(answer, bytes) else "[1.0]")


# --- Models that the run serves ---------------------------------------------------------------------------------------


async def test_an_auxiliary_reward_model_is_called_for_its_output() -> None:
    outputs = [(-1.5,), (1.0, 2.0)]
    with answering(lambda body: embedding(*outputs.pop(0))) as service:
        reward, failure = [(await served(ServedReward, service).score(samples("=2")))[0] for _ in range(2)]
    assert reward == -1.5
    assert service.requests[0] == ("/v1/embeddings", {"model": "helper", "input": "1+1=2"})
    check_failure(failure, "invalid", "'helper'", "[1.0, 2.0]")


async def test_a_judge_is_sent_the_filled_prompt_and_its_last_score_counts() -> None:
    with answering(lambda body: chat("Score: 3? No.\n**Score:** 7.5")) as service:
        assert await served(JudgeReward, service).score(samples("{label}")) == [7.5]
    ((path, body),) = service.requests
    assert path == "/v1/chat/completions"
    assert "{label}" in body["messages"][0]["content"]
    assert (body["temperature"], body["max_tokens"]) == (0.0, 512)


async def test_prompt_pattern_and_length_of_a_judge_are_options(tmp_path: Path) -> None:
    (tmp_path / "judge.txt").write_text('{"a": "{response}"}')
    options = {"rm_judge_prompt": tmp_path / "judge.txt", "rm_judge_pattern": r"<([\d.]+)>"}
    with answering(lambda body: chat("<0.5>")) as service:
        assert await served(JudgeReward, service, rm_judge_max_tokens=2048, **options).score(samples("x")) == [0.5]
    ((_, body),) = service.requests
    assert (body["messages"][0]["content"], body["max_tokens"]) == ('{"a": "x"}', 2048)


@pytest.mark.parametrize(
    ("text", "pattern", "cause"),
    [("It is good.", None, "invalid"), ("Score: high", None, "invalid"), ("1" * 60 + "!", "(?:1|11)+$", "timeout")],
)
async def test_a_judge_that_gives_no_number_and_a_pattern_that_never_ends_cost_the_sample(
    monkeypatch: pytest.MonkeyPatch, text: str, pattern: str | None, cause: str
) -> None:
    monkeypatch.setattr(reward_services, "PATTERN_LIMIT_S", 0.05 if cause == "timeout" else 60.0)
    with answering(lambda body: chat(text)) as service:
        (failure,) = await served(JudgeReward, service, rm_judge_pattern=pattern).score(samples("x"))
    check_failure(failure, cause, "'helper'", repr(text), repr(pattern or reward_services.SCORE))


async def test_other_rewards_continue_while_a_pattern_is_matched() -> None:
    started, others = threading.Event(), threading.Event()

    class Slow:
        pattern = "slow"

        def finditer(self, text: str, **limits: object) -> Iterator[object]:
            started.set()
            assert others.wait(60)
            return iter(())

    with answering(lambda body: chat("Score: 1")) as service:
        judge: Any = served(JudgeReward, service)
        judge._pattern = Slow()
        scoring = asyncio.create_task(judge.score(samples("x")))
        while not started.is_set():
            await asyncio.sleep(0)
        others.set()
        check_failure(*await scoring, "invalid")


@pytest.mark.parametrize("kind", [ServedReward, JudgeReward])
async def test_a_refusal_of_a_model_is_final_and_a_question_that_does_not_fit_says_so(kind: Model) -> None:
    too_long = b'{"message":"The input (90 tokens) is longer than the model\'s context length (64 tokens)."}'
    for refusal, cause, status in ((too_long, "too_long", 400), (b"no such model", "refused", 429)):
        with answering(fails=(status,)) as service:
            service.refusal = refusal
            (failure,) = await served(kind, service, rm_retry_statuses=(429,)).score(samples("x"))
        check_failure(failure, cause, f"{service.url}/v1/", f"{status}: {refusal.decode()}")


@pytest.mark.parametrize(("settings", "named"), [({"rm_model": "helper"}, "'helper'"), ({}, "--rm-model NAME")])
@pytest.mark.parametrize("kind", [ServedReward, JudgeReward])
def test_a_model_that_the_run_does_not_serve_is_refused(kind: Model, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        kind(RewardsOptions(), RunView(models={"other": "http://x"}, settings=settings))
