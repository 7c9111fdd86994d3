"""Reward models that call a service: their requests, the rewards of the answers, and the cost of failures."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Mapping

import pytest

from slime_core import RunView, services
from slime_core.config.secrets import shown
from slime_core.errors import ConfigError
from slime_core.services import with_secrets
from slime_core.types import JsonValue, RewardFailure, Sample
from slime_rewards import services as reward_services
from slime_rewards.options import RewardsOptions
from slime_rewards.services import JudgeReward, RemoteReward, ServedReward
from tests.http_service import HttpService, chat, embedding
from tests.simulated_clock import only_pauses_take_time


def samples(*responses: str) -> list[Sample]:
    return [Sample(index=place, prompt="1+1", response=one, label="2") for place, one in enumerate(responses)]


def seen(models: Mapping[str, str] | None = None, **settings: JsonValue) -> RunView:
    return RunView(models=models or {}, settings=settings)


def made(kind, given, **settings):
    """A reward model of options and of settings of the run."""
    options = {name: value for name, value in given.items() if name in RewardsOptions.model_fields}
    settings |= {name: value for name, value in given.items() if name not in options}
    models = settings.pop("models", None)
    return kind(RewardsOptions(**options), seen(models, **settings))


def remote(service, path="", **given):
    return made(RemoteReward, {"rm_url": service.url + path, **given})


def served(kind, service, **given):
    return made(kind, given, models={"helper": service.url}, rm_model="helper")


async def test_a_service_is_sent_prompt_response_and_label_and_answers_the_reward():
    with HttpService(lambda body: len(body["response"])) as service:
        assert await remote(service, "/score?key=1").score(samples("a", "bb")) == [1.0, 2.0]
    assert sorted(service.requests, key=str) == [
        ("/score?key=1", {"prompt": "1+1", "response": "a", "label": "2"}),
        ("/score?key=1", {"prompt": "1+1", "response": "bb", "label": "2"}),
    ]


async def test_a_token_is_sent_as_a_header_and_no_message_repeats_it(monkeypatch):
    monkeypatch.setenv("RM_TOKEN", " s3cret-token \n")
    monkeypatch.setenv("RM_KEY", "s3cret-key")
    repeats = [b"no table: s3cret-token s3cret-key", {"note": "s3cret-token"}, 1.0]
    with HttpService(lambda body: repeats.pop(0)) as service:
        reward = remote(service, "/score?key=${RM_KEY}", rm_token_env="RM_TOKEN")
        found = [(await reward.score(samples("a")))[0] for _ in range(3)]
    assert service.authorized == ["Bearer s3cret-token"] * 3
    assert [path for path, _ in service.requests] == ["/score?key=s3cret-key"] * 3
    assert found[2] == 1.0
    for failure, quoted in zip(found, ("${RM_TOKEN} ${RM_KEY}", "{'note': '${RM_TOKEN}'}"), strict=False):
        assert failure.cause == "invalid"
        assert f"{service.url}/score answered" in failure.error
        assert quoted in failure.error
        assert "s3cret" not in failure.error


@pytest.mark.parametrize(("value", "found"), [(None, "RM_TOKEN"), ("two\nlines", "RM_TOKEN")])
def test_a_token_that_is_not_there_is_missed_at_once(monkeypatch, value, found):
    monkeypatch.delenv("RM_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("RM_TOKEN", value)
    with pytest.raises(ConfigError, match=rf"http://127.0.0.1:1.*{found}"):
        RemoteReward(RewardsOptions(rm_url="http://127.0.0.1:1", rm_token_env="RM_TOKEN"), RunView())


async def test_rows_choose_among_the_services_that_the_run_allows_and_no_other_is_called():
    with HttpService(lambda body: [1.0] * len(body)) as first, HttpService(lambda body: [2.0] * len(body)) as second:
        reward = remote(first, "/a", rm_row_urls=(second.url + "/b",), rm_batch_size=2)
        urls = [None, second.url + "/b", second.url + "/c", first.url + "/a", "", ["x"], second.url + "/b"]
        rows = [
            Sample(index=place, metadata={"rm_url": url} if url is not None else {}) for place, url in enumerate(urls)
        ]
        found = await reward.score(rows)
    refused = [found.pop(place) for place in (5, 2)]
    assert found == [1.0, 2.0, 1.0, 1.0, 2.0]
    for failure, url in zip(refused, ("['x']", second.url + "/c"), strict=True):
        assert failure.cause == "refused"
        for name in (f"rm_url = {url!r}", f"{first.url}/a, {second.url}/b", "--rm-row-urls"):
            assert name in failure.error
    assert sorted(len(body) for _, body in first.requests) == [1, 2]
    assert [(path, len(body)) for path, body in second.requests] == [("/b", 2)]


async def test_several_samples_share_a_question_and_keep_their_order():
    with HttpService(lambda body: [len(one["response"]) for one in body]) as service:
        assert await remote(service, rm_batch_size=2).score(samples("a", "bb", "ccc")) == [1.0, 2.0, 3.0]
    assert sorted(len(body) for _, body in service.requests) == [1, 2]


async def test_named_numbers_stay_named():
    with HttpService(lambda body: {"score": 1, "format": 0.5, "pred": "34", "more": [1], "why": None}) as service:
        assert await remote(service).score(samples("a")) == [{"score": 1.0, "format": 0.5}]


@pytest.mark.parametrize("status", [0, 500, 503])
async def test_temporary_failures_are_retried(status):
    with HttpService(lambda body: 1.0) as service:
        service.fail_with = [status]
        assert await remote(service).score(samples("a")) == [1.0]
    assert len(service.requests) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 408, 422, 429, 302])
async def test_a_refusal_is_final_and_costs_its_sample_alone(status):
    with HttpService(lambda body: 1.0) as service:
        service.fail_with = [status]
        found = await remote(service, "/score?key=hidden").score(samples("a"))
        assert await remote(service).score(samples("a")) == [1.0]
    asks = f"; --rm-retry-statuses {status} asks again after it" if status in (408, 429) else ""
    message = f'{service.url}/score refused with status {status}: {{"error": "refused by the test"}}{asks}'
    assert found == [RewardFailure("refused", message)]
    assert len(service.requests) == 2


@pytest.mark.parametrize("waits", [None, "7", "Thu, 01 Jan 1970 00:00:09 GMT", "soon"])
async def test_a_named_refusal_is_retried_no_earlier_than_retry_after(monkeypatch, waits):
    now = only_pauses_take_time(monkeypatch, services)
    with HttpService(lambda body: 1.0) as service:
        service.fail_with, service.retry_after = [429, 429], waits
        assert await remote(service, rm_retry_statuses=(429,)).score(samples("a")) == [1.0]
        service.fail_with = [408]
        assert [one.cause for one in await remote(service, rm_retry_statuses=(429,)).score(samples("a"))] == ["refused"]
    assert len(service.requests) == 4
    assert now() >= (14 if waits == "7" else 0)


async def test_a_service_that_asks_for_more_time_than_there_is_costs_the_sample_at_once():
    with HttpService(lambda body: 1.0) as service:
        service.fail_with, service.retry_after = [503], "120"
        (found,) = await remote(service, reward_timeout_s=60).score(samples("a"))
    assert found.cause == "unavailable"
    for name in (service.url, "60 s", "status 503", "120 s", '{"error": "refused by the test"}', "--reward-timeout-s"):
        assert name in found.error
    assert len(service.requests) == 1


async def test_a_refusal_of_a_model_that_the_run_serves_is_not_retried():
    with HttpService(lambda body: chat("Score: 1")) as service:
        service.fail_with = [429]
        (found,) = await served(JudgeReward, service, rm_retry_statuses=(429,)).score(samples("a"))
    assert found.cause == "refused"
    assert f"{service.url}/v1/chat/completions" in found.error
    assert "status 429" in found.error


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("", 0), ("7", 7), ("-7", 0), ("Thu, 01 Jan 1970 00:00:09 -0000", 0), ("9" * 5000, math.inf)],
)
def test_retry_after_in_seconds(header, seconds):
    assert services._wait_s(header) == seconds


def test_retry_after_may_be_a_date():
    assert 10**9 < services._wait_s("Fri, 31 Dec 9999 23:59:59 GMT") < math.inf


async def test_a_service_that_stays_away_costs_the_sample_within_the_time_limit(monkeypatch):
    only_pauses_take_time(monkeypatch, services)
    with HttpService(lambda body: 1.0) as service:
        service.fail_with = [503] * 1000
        (found,) = await remote(service, reward_timeout_s=60).score(samples("a"))
    assert found.cause == "unavailable"
    assert re.search(rf"{service.url} .*60 s and \d\d attempts.*status 503.*--reward-timeout-s", found.error)


async def test_a_service_that_does_not_run_is_called_unreachable(monkeypatch):
    only_pauses_take_time(monkeypatch, services)
    with HttpService(lambda body: 1.0) as service:
        pass
    (found,) = await remote(service, "?key=hidden", reward_timeout_s=60).score(samples("a"))
    assert found.cause == "unreachable"
    assert "hidden" not in found.error


async def test_a_service_that_does_not_answer_is_called_too_slow(hanging):
    with HttpService(hanging) as service:
        (found,) = await remote(service, reward_timeout_s=0.2).score(samples("a"))
        hanging.go_on()
    assert (found.cause, "failed with no answer" in found.error) == ("timeout", True)


@pytest.fixture
def hanging():
    """An answer that waits for the test's end."""
    from threading import Event

    class Hanging:
        def __init__(self):
            self._end = Event()

        def __call__(self, body):
            self._end.wait(30)
            return 1.0

        def go_on(self):
            self._end.set()

    return Hanging()


@pytest.mark.parametrize(
    "answer", [None, "good", math.nan, math.inf, True, {}, {"score": "good"}, [1.0], {"a": 1, "b": math.nan}]
)
async def test_an_answer_that_is_no_reward_costs_its_sample(answer):
    with HttpService(lambda body: 1.0 if body["response"] == "b" else answer) as service:
        found, other = await remote(service).score(samples("a", "b"))
    assert other == 1.0
    assert found.cause == "invalid"
    assert f"{service.url} answered {answer!r};" in found.error


async def test_an_answer_to_several_that_is_no_list_of_as_many_costs_those():
    with HttpService(lambda body: [1.0]) as service:
        first, second = await remote(service, rm_batch_size=2).score(samples("a", "b"))
    assert first == second
    assert first.cause == "invalid"
    assert f"{service.url} answered [1.0];" in first.error


async def test_an_answer_that_is_no_json_is_quoted():
    with HttpService(lambda body: b"<html>") as service:
        (found,) = await remote(service).score(samples("a"))
    assert found.cause == "invalid"
    assert found.error.endswith("<html>")


def test_an_address_is_shown_without_its_secrets():
    assert shown("https://me:secret@host:8/path?key=secret#x") == "https://host:8/path"


def test_secrets_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("RM_KEY", "abc")
    assert with_secrets("http://host/?key=${RM_KEY}") == "http://host/?key=abc"
    with pytest.raises(ConfigError) as failure:
        with_secrets("http://host/score?key=${RM_LOST}")
    assert "URL http://host/score" in str(failure.value)


async def test_an_auxiliary_reward_model_is_called_for_its_output():
    with HttpService(lambda body: embedding(-1.5)) as service:
        assert await served(ServedReward, service).score(samples("=2")) == [-1.5]
    assert service.requests == [("/v1/embeddings", {"model": "helper", "input": "1+1=2"})]


async def test_a_model_with_more_than_one_output_is_no_reward_model():
    with HttpService(lambda body: embedding(1.0, 2.0)) as service:
        (found,) = await served(ServedReward, service).score(samples("=2"))
    assert found.cause == "invalid"
    assert found.error.startswith("model 'helper' answered {'object': 'list', ")
    assert found.error.endswith("; accepted: one finite number")


async def test_a_judge_is_sent_the_filled_prompt_and_its_last_score_counts():
    with HttpService(lambda body: chat("Score: 3? No.\n**Score:** 7.5")) as service:
        assert await served(JudgeReward, service).score(samples("{label}")) == [7.5]
    ((path, body),) = service.requests
    assert path == "/v1/chat/completions"
    assert "{label}" in body["messages"][0]["content"]
    assert (body["temperature"], body["max_tokens"]) == (0.0, 512)


async def test_a_judges_prompt_pattern_and_length_may_be_ones_own(tmp_path):
    (tmp_path / "judge.txt").write_text('{"a": "{response}"}')
    own = {"rm_judge_prompt": tmp_path / "judge.txt", "rm_judge_pattern": r"<([\d.]+)>"}
    own["rm_judge_max_tokens"] = 2048
    with HttpService(lambda body: chat("<0.5>")) as service:
        assert await served(JudgeReward, service, **own).score(samples("x")) == [0.5]
    ((_, body),) = service.requests
    assert (body["messages"][0]["content"], body["max_tokens"]) == ('{"a": "x"}', 2048)


@pytest.mark.parametrize("text", ["It is good.", "Score: high"])
async def test_a_judge_that_gives_no_number_costs_the_sample(text):
    with HttpService(lambda body: chat(text)) as service:
        found = await served(JudgeReward, service).score(samples("x"))
    pattern = r"(?i:score)\W*(-?\d+(?:\.\d+)?)"
    message = f"judge 'helper' wrote {text!r}; accepted: a number where {pattern!r} finds it"
    assert found == [RewardFailure("invalid", message)]


async def test_a_pattern_that_never_ends_costs_its_sample(monkeypatch):
    monkeypatch.setattr(reward_services, "PATTERN_LIMIT_S", 0.05)
    text = "1" * 60 + "!"
    with HttpService(lambda body: chat(text)) as service:
        found = await served(JudgeReward, service, rm_judge_pattern=r"(?:1|11)+$").score(samples("x"))
    assert [failure.cause for failure in found] == ["timeout"]
    for name in ("'helper'", repr(text), "rm_judge_pattern = '(?:1|11)+$'", "0.05 s"):
        assert name in found[0].error


async def test_other_rewards_continue_while_a_pattern_is_matched():
    started, others = threading.Event(), threading.Event()

    class Slow:
        pattern = "slow"

        def finditer(self, text, **limits):
            started.set()
            assert others.wait(60)
            return iter(())

    with HttpService(lambda body: chat("Score: 1")) as service:
        judge = served(JudgeReward, service)
        judge._pattern = Slow()
        scoring = asyncio.create_task(judge.score(samples("x")))
        while not started.is_set():
            await asyncio.sleep(0)
        others.set()
        assert [one.cause for one in await scoring] == ["invalid"]


@pytest.mark.parametrize("kind", [ServedReward, JudgeReward])
async def test_a_question_that_does_not_fit_the_model_costs_its_sample_and_says_so(kind):
    refusal = b'{"message":"The input (90 tokens) is longer than the model\'s context length (64 tokens)."}'
    with HttpService(lambda body: chat("Score: 1")) as service:
        service.fail_with, service.refusal = [400, 400], refusal
        (found,) = await served(kind, service).score(samples("x"))
        service.refusal = b"no such model"
        (other,) = await served(kind, service).score(samples("x"))
    assert (found.cause, other.cause) == ("too_long", "refused")
    assert found.error.endswith(f" refused with status 400: {refusal.decode()}")


@pytest.mark.parametrize("kind", [ServedReward, JudgeReward])
def test_a_model_that_the_run_does_not_serve_is_refused(kind):
    with pytest.raises(ConfigError, match="called 'helper'"):
        kind(RewardsOptions(), seen({"other": "http://x"}, rm_model="helper"))
    with pytest.raises(ConfigError) as failure:
        kind(RewardsOptions(), RunView())
    assert "--rm-model NAME" in str(failure.value)
