"""What the options may be, where they stand, what needs them, and what rows may say about them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slime_core import RunPlan
from slime_core.cli.activation import resolve
from slime_core.cli.preflight import check_files
from slime_core.config.engines import EngineConfig, EngineModel
from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, DataError, PluginError
from slime_core.plugins.construction import run_view
from slime_rewards.checks import mistakes
from slime_rewards.options import RewardsOptions

ADDRESS = "rm_url is not an address"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rm_url": "localhost:8000"}, ADDRESS),
        ({"rm_url": "file:///etc/passwd"}, ADDRESS),
        ({"rm_url": "http://me:secret@host/score"}, "rm_url holds a password"),
        ({"rm_url": "http://token@host/score"}, "rm_url holds a user"),
        ({"rm_url": "http://host/score?n=${HOME}&Api-Key=secret"}, "rm_url holds Api-Key"),
        ({"rm_url": "http://host/score?code=abc"}, "rm_url holds code"),
        ({"rm_url": "http://host/score?abc"}, "rm_url holds a query"),
        ({"rm_url": "http://host/?access_token=secret&auth=${HOME}"}, "rm_url holds access_token"),
        ({"rm_url": "http://host", "rm_row_urls": ("http://host?sig=secret",)}, "rm_row_urls holds sig"),
        ({"rm_url": "http://host:port/secret"}, ADDRESS),
        ({"rm_token_env": "Bearer secret"}, "rm_token_env is not"),
        ({"rm_judge_pattern": "(a"}, "rm_judge_pattern = '(a'"),
        ({"rm_judge_prompt": "lost.txt"}, "rm_judge_prompt = lost.txt"),
        ({"rm_tokenizer": "lost"}, "rm_tokenizer = lost"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    (mistake,) = mistakes(RunPlan(), RewardsOptions(**settings))
    assert mistake.startswith(message)
    assert not re.search(r"//me:|token@|=secret|Bearer", mistake)


@pytest.mark.parametrize(
    ("model", "response", "answer", "named"),
    [
        ({}, 64, 64, ["128", "= 64", "rm_judge_max_tokens = 64"]),
        ({}, 64, 63, None),
        ({"is_embedding": True}, 128, 512, ["rollout_max_response_len = 128"]),
        ({"is_embedding": True}, 127, 512, None),
        ({"overrides": {"allow_auto_truncate": True}}, 64, 512, None),
        ({"name": "other"}, 1024, 512, None),
    ],
)
def test_a_judge_whose_context_holds_no_response_is_refused_before_the_run(tmp_path, model, response, answer, named):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128}')
    engine = EngineConfig(engine_models=(EngineModel(**{"name": "helper", "model_path": tmp_path, **model}),))
    config = RunConfig(rollout=RolloutConfig(rm_model="helper", rollout_max_response_len=response), engine=engine)
    found = list(mistakes(run_view(config), RewardsOptions(rm_judge_max_tokens=answer)))
    assert len(found) == (named is not None)
    assert [name for name in named or () if name not in found[0]] == []


@pytest.mark.parametrize("url", ["http://me:${KEY}@host/score", "http://host/?token=${KEY}&tokens="])
def test_a_password_may_come_from_the_environment(monkeypatch, url):
    monkeypatch.setenv("KEY", "secret")
    assert list(mistakes(RunPlan(), RewardsOptions(rm_url=url))) == []


@pytest.mark.parametrize(
    ("settings", "setting"),
    [({"rm_url": "http://host?key=${NOT_SET}"}, "rm_url"), ({"rm_token_env": "NOT_SET"}, "rm_token_env")],
)
def test_a_secret_that_is_not_there_is_missed_before_the_run(settings, setting):
    (message,) = mistakes(RunPlan(), RewardsOptions(**settings))
    assert "variable NOT_SET" in message


# --- The settings of a run --------------------------------------------------------------------------------------------

URL = "http://127.0.0.1:9/score"


def resolved(line: str, *, purpose="run") -> Resolved:
    return resolve(["--plugin", "grpo", *line.split()], purpose=purpose)[0]


@pytest.mark.parametrize(
    "line",
    [
        f"--rm-type remote_rm --rm-url {URL} --rm-batch-size 4 --rm-concurrency 8 --rm-retry-statuses 429",
        f"--rm-type 0.5*remote_rm+0.5*exact_match --rm-url {URL} --rm-row-urls {URL}/other",
        # Rows may name reward models of a plugin that the run names.
        f"--plugin rewards --rm-url {URL} --rm-judge-max-tokens 100",
    ],
)
def test_options_that_reach_a_reward_model_are_accepted(line):
    resolved(line)


def test_a_function_that_is_named_by_path_may_read_them(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def reward(args, sample):\n    return 0.0\n")
    found = resolved(f"--custom-rm-path {tmp_path}/mine.py:reward --rm-url {URL}")
    assert found.plugin_options["rewards"] == RewardsOptions(rm_url=URL)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"--rm-url {URL}?token=secret", "rm_type = exact_match"),
        ("--rm-type math --rm-judge-max-tokens 9", "rm_judge_max_tokens = 9"),
        (
            "--plugin rewards --rm-retry-statuses 429",
            "rm_retry_statuses = 429 needs rm_url. Add --rm-url, or leave --rm-retry-statuses out",
        ),
        (
            f"--plugin rewards --rm-row-urls {URL}",
            f"rm_row_urls = {URL} needs rm_url. Add --rm-url, or leave --rm-row-urls out",
        ),
    ],
)
def test_options_that_do_nothing_are_refused(line, message):
    with pytest.raises(ConfigError) as caught:
        resolved(line)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value).replace("as secret", "")


@pytest.mark.parametrize("purpose", ["run", "eval"])
def test_a_service_without_an_address_is_refused_before_anything_starts(tmp_path: Path, purpose):
    data = tmp_path / "aime.jsonl"
    data.write_text('{"prompt": "1", "label": "1"}\n')
    where = f"--eval-prompt-data aime {data} --eval-interval 1 "
    with pytest.raises(PluginError) as caught:
        resolved(f"{where} --rm-type remote_rm", purpose=purpose)
    assert "reward model 'remote_rm' of plugin 'rewards' (slime-rewards " in str(caught.value)
    assert "Add --rm-url" in str(caught.value)


def test_an_evaluation_misses_a_secret_before_anything_starts(tmp_path: Path):
    data = tmp_path / "aime.jsonl"
    data.write_text('{"prompt": "1", "label": "1"}\n')
    with pytest.raises(ConfigError, match="rm_token_env"):
        resolved(
            f"--eval-prompt-data aime {data} --rm-type remote_rm --rm-url {URL} --rm-token-env NOT_SET", purpose="eval"
        )


def test_the_section_of_files_in_which_they_stood_before_is_read(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(f'[rollout]\nrm_type = "remote_rm"\nrm_url = "{URL}"\nrm_tokenizer = "none"\n')
    found = resolved(f"--config {file}")
    assert found.plugin_options["rewards"] == RewardsOptions(rm_url=URL)
    written = tmp_path / "config.toml"
    written.write_text(to_toml(found))
    assert "[rewards]" in written.read_text()
    assert resolved(f"--config {written}").plugin_options["rewards"] == RewardsOptions(rm_url=URL)


# --- Rows -------------------------------------------------------------------------------------------------------------


def looked_at(folder: Path, line: str, *rows: object) -> list[str]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1", "label": "1", "metadata": row}) + "\n" for row in rows))
    words = ["--plugin", "grpo", "--plugin", "rewards", "--rollout-max-response-len", "8", "--prompt-data", str(path)]
    found, active = resolve([*words, *line.split()])
    return check_files(found.config, active.registry, trains=True, options=found.plugin_options)


def test_rows_may_name_the_services_that_the_run_allows(tmp_path: Path):
    other = "https://other/b?key=${HOME}"
    rows = [{"rm_type": "remote_rm", "rm_url": url} for url in (URL, other, None)]
    assert looked_at(tmp_path, f"--rm-url {URL} --rm-row-urls {other}", {}, *rows) == []
    assert looked_at(tmp_path, "", {"rm_url": "http://unused"}) == []


@pytest.mark.parametrize("url", ["http://169.254.169.254/", {"a": 1}])
def test_a_row_that_names_another_service_is_refused_with_file_and_line(tmp_path: Path, url):
    row = {"rm_type": "remote_rm", "rm_url": url}
    message = f"{tmp_path}/prompts.jsonl, line 2: metadata rm_url = {url!r}"
    with pytest.raises(DataError) as caught:
        looked_at(tmp_path, f"--rm-url {URL} --rm-row-urls http://host/a?key=${{HOME}}", {}, row)
    assert message in str(caught.value)
    assert f"{URL}, http://host/a" in str(caught.value)
    (left_out,) = looked_at(tmp_path, f"--rm-url {URL} --on-bad-data skip", {}, row)
    assert left_out.startswith(message)


def test_a_row_that_names_a_reward_model_without_its_service_is_refused(tmp_path: Path):
    with pytest.raises(DataError) as caught:
        looked_at(tmp_path, "", {}, {"rm_type": "0.5*math + 1*remote_rm"})
    assert "'0.5*math + 1*remote_rm'" in str(caught.value)
