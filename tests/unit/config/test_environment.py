"""The environment variables of servers and reward processes, and addresses in messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slime_core.config.secrets import ENGINE_KEY, PASS_ENV, named_variables, needed_environment, without_queries
from slime_core.rollout.engines.engine import EngineSettings, Router, RouterSettings


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
        (
            "401, message='Unauthorized', url='https://h/score?code=abc'",
            "401, message='Unauthorized', url='https://h/score?***'",
        ),
        (
            "Max retries exceeded with url: /score?code=abc&n=1 (Caused by X)",
            "Max retries exceeded with url: /score?*** (Caused by X)",
        ),
        ("is it http://h/score or not? see", "is it http://h/score or not? see"),
    ],
)
def test_errors_show_no_query_of_an_address(text: str, shown: str) -> None:
    assert without_queries(text) == shown
