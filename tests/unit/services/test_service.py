"""Calls of services: answers, refusals, retries and connections."""

from __future__ import annotations

import asyncio

import pytest

from slime_core import services
from slime_core.errors import ConfigError, ServiceError
from slime_core.services import Service, model_url
from tests.http_service import HttpService
from tests.simulated_clock import only_pauses_take_time


def service(url: str, **settings) -> Service:
    return Service(url, **{"timeout_s": 60.0, "max_in_flight": 2, **settings})


async def test_a_request_and_its_answer_are_json():
    with HttpService(lambda body: {"sum": body["a"] + body["b"]}) as answering:
        assert await service(answering.url + "/add").ask({"a": 2, "b": 3}) == {"sum": 5}
    assert answering.requests == [("/add", {"a": 2, "b": 3})]


async def test_a_refusal_is_final_and_says_its_status():
    with HttpService(lambda body: 1) as answering:
        answering.fail_with = [404]
        with pytest.raises(ServiceError) as failure:
            await service(answering.url).ask({})
    error = failure.value
    assert (error.cause, error.status, error.gave_up, len(answering.requests)) == ("refused", 404, False, 1)
    assert str(error).startswith(f"{answering.url} ")
    assert "404: {" in str(error)


async def test_only_a_named_refusal_is_repeated():
    with HttpService(lambda body: "done") as answering:
        answering.fail_with = [429]
        assert await service(answering.url, retry_statuses=(429,)).ask({}) == "done"
    assert len(answering.requests) == 2


async def test_retries_end_at_the_time_limit(monkeypatch):
    now = only_pauses_take_time(monkeypatch, services)
    with HttpService(lambda body: 1) as answering:
        answering.fail_with = [503] * 100
        with pytest.raises(ServiceError) as failure:
            await service(answering.url).ask({})
    assert (failure.value.cause, failure.value.status, failure.value.gave_up) == ("unavailable", 503, True)
    # Pauses of 0.1, 0.2, 0.4 ... 5 s, each shortened by up to half: one more would have passed the limit.
    assert 55 <= now() < 60


async def test_without_retries_the_first_failure_is_final():
    with HttpService(lambda body: "done") as answering:
        answering.fail_with = [500]
        with pytest.raises(ServiceError, match=r"1 attempts; .* 500"):
            await service(answering.url, retries=False).ask({})
    assert len(answering.requests) == 1


async def test_an_answer_without_json_is_quoted():
    with HttpService(lambda body: b"<html>") as answering, pytest.raises(ServiceError, match="JSON: <h"):
        await service(answering.url).ask({})


async def test_overlapping_requests_share_connections_and_leave_none_open():
    with HttpService(lambda body: body) as answering:
        asking = service(answering.url)
        assert await asyncio.gather(*map(asking.ask, range(5))) == [0, 1, 2, 3, 4]
        assert asking._session is None
        assert await asking.ask(7) == 7


def test_a_variable_that_is_not_set_is_an_error_before_any_request(monkeypatch):
    monkeypatch.delenv("TOOL_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:1/tool .*TOOL_TOKEN") as refused:
        service("http://127.0.0.1:1/tool?key=hidden", token_env="TOOL_TOKEN")
    assert "hidden" not in str(refused.value)


def test_an_auxiliary_model_has_a_url():
    assert model_url({"judge": "http://127.0.0.1:4000/"}, "judge", "/generate") == "http://127.0.0.1:4000/generate"
