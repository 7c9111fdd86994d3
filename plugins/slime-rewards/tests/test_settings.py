"""The options: their values, the reward models that read them, and the services that rows may name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunPlan
from slime_core.cli.activation import resolve
from slime_core.cli.preflight import check_files
from slime_core.components.construction import run_view
from slime_core.config.engines import EngineConfig, EngineModel
from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, DataError, PluginError
from slime_rewards.checks import mistakes
from slime_rewards.options import RewardsOptions

URL = "http://127.0.0.1:9/score"


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"rm_url": "localhost:8000"}, "rm_url is"),
        ({"rm_url": "file:///etc/passwd"}, "rm_url is"),
        ({"rm_url": "http://host:port/secret"}, "rm_url is"),
        ({"rm_url": "http://me:secret@host/score"}, "rm_url holds a password"),
        ({"rm_url": "http://token@host/score"}, "rm_url holds a user"),
        ({"rm_url": "http://host/score?n=${HOME}&Api-Key=secret"}, "rm_url holds Api-Key"),
        ({"rm_url": "http://host/score?abc"}, "rm_url holds a query"),
        ({"rm_url": "http://host", "rm_row_urls": ("http://host?sig=secret",)}, "rm_row_urls holds sig"),
        ({"rm_url": "http://host?key=${NOT_SET}"}, "rm_url names the environment variable NOT_SET"),
        ({"rm_token_env": "NOT_SET"}, "rm_token_env names the environment variable NOT_SET"),
        ({"rm_token_env": "Bearer secret"}, "rm_token_env is not"),
        ({"rm_judge_pattern": "(a"}, "rm_judge_pattern = '(a'"),
        ({"rm_judge_prompt": "lost.txt"}, "rm_judge_prompt = lost.txt"),
        ({"rm_tokenizer": "lost"}, "rm_tokenizer = lost"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], start: str) -> None:
    (mistake,) = mistakes(RunPlan(), RewardsOptions(**settings))
    assert mistake.startswith(start)
    assert not re.search(r"//me:|token@|=secret|Bearer", mistake)


@pytest.mark.parametrize("url", ["http://me:${HOME}@host/score", "http://host/?token=${HOME}&tokens="])
def test_a_password_may_come_from_the_environment(url: str) -> None:
    assert list(mistakes(RunPlan(), RewardsOptions(rm_url=url))) == []


@pytest.mark.parametrize(
    ("model", "response", "answer", "named"),
    [
        ({}, 64, 64, ["128", "= 64", "rm_judge_max_tokens = 64"]),
        ({}, 64, 63, []),
        ({"is_embedding": True}, 128, 512, ["rollout_max_response_len = 128"]),
        ({"is_embedding": True}, 127, 512, []),
        ({"overrides": {"allow_auto_truncate": True}}, 64, 512, []),
        ({"name": "other"}, 1024, 512, []),
    ],
)
def test_a_judge_whose_context_holds_no_response_is_refused_before_the_run(
    tmp_path: Path, model: dict[str, Any], response: int, answer: int, named: list[str]
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128}')
    engine = EngineConfig(engine_models=(EngineModel(**{"name": "helper", "model_path": tmp_path, **model}),))
    config = RunConfig(rollout=RolloutConfig(rm_model="helper", rollout_max_response_len=response), engine=engine)
    text = " ".join(mistakes(run_view(config), RewardsOptions(rm_judge_max_tokens=answer)))
    assert bool(text) is bool(named)
    assert [name for name in named if name not in text] == []


# --- The settings of a run --------------------------------------------------------------------------------------------


def resolved(line: str, *, purpose: Any = "run") -> Resolved:
    return resolve(["--plugin", "grpo", *line.split()], purpose=purpose)[0]


@pytest.mark.parametrize(
    "line",
    [
        f"--rm-type remote_rm --rm-url {URL} --rm-batch-size 4 --rm-concurrency 8 --rm-retry-statuses 429",
        f"--rm-type 0.5*remote_rm+0.5*exact_match --rm-url {URL} --rm-row-urls {URL}/other",
        # Rows may name reward models of a plugin that the run names.
        f"--plugin rewards --rm-url {URL} --rm-judge-max-tokens 100",
        # A function that is named by path may read them.
        f"--custom-rm-path {{folder}}/mine.py:reward --rm-url {URL}",
    ],
)
def test_options_that_reach_a_reward_model_are_accepted(tmp_path: Path, line: str) -> None:
    (tmp_path / "mine.py").write_text("def reward(args, sample):\n    return 0.0\n")
    assert resolved(line.format(folder=tmp_path)).plugin_options["rewards"].rm_url == URL


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (f"--rm-url {URL}?token=secret", "rm_type = exact_match"),
        ("--rm-type math --rm-judge-max-tokens 9", "rm_judge_max_tokens = 9"),
        ("--plugin rewards --rm-retry-statuses 429", "rm_retry_statuses = 429 needs rm_url"),
        (f"--plugin rewards --rm-row-urls {URL}", f"rm_row_urls = {URL} needs rm_url"),
    ],
)
def test_options_that_do_nothing_are_refused(line: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(line)
    assert named in str(caught.value)
    assert "secret" not in str(caught.value).replace("as secret", "")


@pytest.mark.parametrize(
    ("words", "purpose", "error", "named"),
    [
        ("", "run", PluginError, "--rm-url"),
        ("", "eval", PluginError, "--rm-url"),
        (f"--rm-url {URL} --rm-token-env NOT_SET", "eval", ConfigError, "rm_token_env"),
    ],
)
def test_a_service_without_address_or_secret_is_refused_before_anything_starts(
    tmp_path: Path, words: str, purpose: str, error: type[Exception], named: str
) -> None:
    (tmp_path / "aime.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
    interval = "--eval-interval 1" if purpose == "run" else ""
    line = f"--eval-prompt-data aime {tmp_path}/aime.jsonl {interval} --rm-type remote_rm {words}"
    with pytest.raises(error, match=named):
        resolved(line, purpose=purpose)


def test_the_section_of_older_files_is_read(tmp_path: Path) -> None:
    file, written = tmp_path / "run.toml", tmp_path / "config.toml"
    file.write_text(f'[rollout]\nrm_type = "remote_rm"\nrm_url = "{URL}"\nrm_tokenizer = "none"\n')
    settings = resolved(f"--config {file}")
    written.write_text(to_toml(settings))
    assert "[rewards]" in written.read_text()
    for options in (settings.plugin_options, resolved(f"--config {written}").plugin_options):
        assert options["rewards"] == RewardsOptions(rm_url=URL)


# --- Rows -------------------------------------------------------------------------------------------------------------


def checked(folder: Path, line: str, *rows: object) -> list[str]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1", "label": "1", "metadata": row}) + "\n" for row in rows))
    words = ["--plugin", "grpo", "--plugin", "rewards", "--rollout-max-response-len", "8", "--prompt-data", str(path)]
    settings, active = resolve([*words, *line.split()])
    return check_files(settings.config, active.registry, trains=True, options=settings.plugin_options)


def test_rows_may_name_the_services_that_the_run_allows(tmp_path: Path) -> None:
    other = "https://other/b?key=${HOME}"
    rows = [{"rm_type": "remote_rm", "rm_url": url} for url in (URL, other, None)]
    assert checked(tmp_path, f"--rm-url {URL} --rm-row-urls {other}", {}, *rows) == []
    assert checked(tmp_path, "", {"rm_url": "http://unused"}) == []


@pytest.mark.parametrize("url", ["http://169.254.169.254/", {"a": 1}])
def test_a_row_that_names_another_service_is_refused_with_file_and_line(tmp_path: Path, url: object) -> None:
    row = {"rm_type": "remote_rm", "rm_url": url}
    message = f"{tmp_path}/prompts.jsonl, line 2: metadata rm_url = {url!r}"
    with pytest.raises(DataError) as caught:
        checked(tmp_path, f"--rm-url {URL} --rm-row-urls http://host/a?key=${{HOME}}", {}, row)
    assert message in str(caught.value)
    assert f"{URL}, http://host/a" in str(caught.value)
    (warning,) = checked(tmp_path, f"--rm-url {URL} --on-bad-data skip", {}, row)
    assert warning.startswith(message)


def test_a_row_that_names_a_reward_model_without_its_service_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape("'0.5*math + 1*remote_rm'")):
        checked(tmp_path, "", {}, {"rm_type": "0.5*math + 1*remote_rm"})
