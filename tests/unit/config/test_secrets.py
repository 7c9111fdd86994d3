"""The key of a run, the environment of servers, and addresses in messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slime_core.config.secrets import (
    ENGINE_KEY,
    PASS_ENV,
    EngineAccess,
    add_key,
    engine_access,
    engine_headers,
    key_advice,
    key_of_run,
    named_variables,
    needed_environment,
    send_key_to,
    set_engine_access,
    without_queries,
)
from slime_core.errors import ConfigError
from slime_core.rollout.engines.engine import EngineSettings, Router, RouterSettings

ENGINE = "http://127.0.0.1:4000"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ENGINE_KEY, raising=False)
    before = engine_access()
    set_engine_access(EngineAccess())
    yield
    set_engine_access(before)


def test_each_run_has_a_key_of_its_own_and_afterwards_there_is_none() -> None:
    with key_of_run():
        first = engine_access().key_text
    with key_of_run():
        assert len(engine_access().key_text) >= 40
        assert engine_access().key_text != first
    assert engine_access() == EngineAccess()


def test_only_the_servers_of_the_run_get_it() -> None:
    with key_of_run():
        send_key_to(ENGINE, "")
        assert engine_headers(ENGINE + "/generate") == {"Authorization": f"Bearer {engine_access().key_text}"}
        assert engine_headers("http://127.0.0.1:4001/generate") == {}
        assert engine_headers("https://judge.example/score") == {}


def test_a_server_of_others_gets_its_own_key_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "of-theirs")
    with key_of_run():
        add_key("https://judge.example/v1", "THEIR_KEY")
        assert engine_headers("https://judge.example/generate") == {"Authorization": "Bearer of-theirs"}
        assert engine_headers(ENGINE) == {}
        send_key_to(ENGINE)
        assert engine_headers(ENGINE) == {"Authorization": f"Bearer {engine_access().key_text}"}
        monkeypatch.delenv("THEIR_KEY")
        with pytest.raises(ConfigError, match=r"THEIR_KEY .*https://judge\.example"):
            add_key("https://judge.example/v1", "THEIR_KEY")
    assert engine_headers("https://judge.example/generate") == {}


def test_the_user_chooses_it_or_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENGINE_KEY, "of-my-engines")
    with key_of_run():
        assert engine_access().key_text == "of-my-engines"
    monkeypatch.setenv(ENGINE_KEY, "")
    with key_of_run():
        send_key_to(ENGINE)
        assert engine_headers(ENGINE) == {}


@pytest.mark.parametrize("text", ["two words", "line\nend", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(ENGINE_KEY, text)
    with pytest.raises(ConfigError, match=ENGINE_KEY) as caught, key_of_run():
        pass
    assert text not in str(caught.value)


# --- Environment ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_DEBUG", "SGLANG_X", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "value")
    monkeypatch.delenv(PASS_ENV, raising=False)
    monkeypatch.delenv(ENGINE_KEY, raising=False)


def test_servers_get_what_they_need_and_no_secret(tmp_path: Path) -> None:
    engine = EngineSettings(tmp_path, tmp_path / "log", device="cuda").environment()
    router = Router(RouterSettings(tmp_path / "log")).env
    for found in (engine, router):
        assert found["PATH"].endswith(os.environ["PATH"])
        assert {"SGLANG_X", "CUDA_VISIBLE_DEVICES"} <= set(found)
        assert set(found).isdisjoint({"WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_DEBUG"})


def test_the_user_passes_more_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASS_ENV, "HF_TOKEN, MY_*")
    assert {"HF_TOKEN", "MY_DEBUG"} <= set(needed_environment())
    assert "WANDB_API_KEY" not in needed_environment()


def test_variables_that_settings_name_are_passed_on() -> None:
    settings = {"rm_url": "https://host/?code=${RM_CODE}", "rm_token_env": "RM_TOKEN", "seed": 1}
    assert named_variables(settings) == ["RM_CODE", "RM_TOKEN"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("401, message='X', url='https://h/score?code=abc'", "401, message='X', url='https://h/score?***'"),
        ("exceeded with url: /score?code=abc&n=1 (Caused by X)", "exceeded with url: /score?*** (Caused by X)"),
        ("is it http://h/score or not? see", "is it http://h/score or not? see"),
    ],
)
def test_errors_show_no_query_of_an_address(text: str, shown: str) -> None:
    assert without_queries(text) == shown


def test_the_advice_names_the_key_that_is_wrong() -> None:
    with key_of_run():
        send_key_to(ENGINE)
        assert "SLIME_ENGINE_KEY" in " ".join(key_advice(401, ENGINE))
        assert "model_key_env" in " ".join(key_advice(401, "http://127.0.0.1:4001"))
        assert not [*key_advice(400, ENGINE)]
