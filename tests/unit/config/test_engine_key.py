"""The key of a run: made once, and sent only to the run's own servers."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from slime_core.config.secrets import (
    ENGINE_KEY,
    EngineAccess,
    add_key,
    engine_access,
    engine_headers,
    key_advice,
    key_of_run,
    send_key_to,
    set_engine_access,
)
from slime_core.errors import ConfigError

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


def test_the_advice_names_the_key_that_is_wrong() -> None:
    with key_of_run():
        send_key_to(ENGINE)
        assert "SLIME_ENGINE_KEY" in " ".join(key_advice(401, ENGINE))
        assert "model_key_env" in " ".join(key_advice(401, "http://127.0.0.1:4001"))
        assert not [*key_advice(400, ENGINE)]


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


def test_the_repr_does_not_show_the_key() -> None:
    assert "secret" not in repr(EngineAccess(SecretStr("secret")))
