"""What the options may be, where they stand, what needs them, and what rows may say about them."""

from __future__ import annotations

import json
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

ADDRESS = "rm_url is not an address of a service; accepted: http://HOST:PORT/PATH, or the same with https"
SHOWN = (
    "{} holds {} for host written out, which the record of the run would show; export it and write ${{NAME}} in its "
    "place, or have it sent as a header with --rm-token-env NAME"
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rm_url": "localhost:8000"}, ADDRESS),
        ({"rm_url": "file:///etc/passwd"}, ADDRESS),
        (
            {"rm_url": "http://me:secret@host/score"},
            SHOWN.format("rm_url", "a password"),
        ),
        ({"rm_url": "http://token@host/score"}, SHOWN.format("rm_url", "a user")),
        ({"rm_url": "http://host/score?n=${HOME}&Api-Key=secret"}, SHOWN.format("rm_url", "Api-Key")),
        ({"rm_url": "http://host/score?code=abc"}, SHOWN.format("rm_url", "code")),
        ({"rm_url": "http://host/score?abc"}, SHOWN.format("rm_url", "a query")),
        ({"rm_url": "http://host/?access_token=secret&auth=${HOME}"}, SHOWN.format("rm_url", "access_token")),
        (
            {"rm_url": "http://host", "rm_row_urls": ("http://host?sig=secret",)},
            SHOWN.format("rm_row_urls", "sig"),
        ),
        ({"rm_url": "http://host:port/secret"}, ADDRESS),
        (
            {"rm_token_env": "Bearer secret"},
            "rm_token_env is not the name of a variable; accepted: the name, such as RM_TOKEN, and never the "
            "secret itself",
        ),
        (
            {"rm_judge_pattern": "(a"},
            "rm_judge_pattern = '(a' is not a regular expression: missing ) at position 2",
        ),
        (
            {"rm_judge_prompt": "lost.txt"},
            "rm_judge_prompt = lost.txt is not a file; give a text file with {prompt} and {response} in it",
        ),
        (
            {"rm_tokenizer": "lost"},
            "rm_tokenizer = lost is not a folder; give the Hugging Face folder of the reward model",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    assert list(mistakes(RunPlan(), RewardsOptions(**settings))) == [message]
    assert "secret" not in message.replace("the secret itself", "")


CONTEXT = (
    "rm_model = helper reads at most 128 tokens, question and answer together; a response may have "
    "rollout_max_response_len = {}, which leaves no room for the question. Lower {}, or name a model that reads more; "
    "with overrides = {{ allow_auto_truncate = true }} in its table [[engine.engine_models]] questions are truncated"
)


@pytest.mark.parametrize(
    ("model", "response", "answer", "message"),
    [
        ({}, 64, 64, CONTEXT.format("64 and its answer rm_judge_max_tokens = 64", "one of the two")),
        ({}, 64, 63, None),
        ({"is_embedding": True}, 128, 512, CONTEXT.format("128", "it")),
        ({"is_embedding": True}, 127, 512, None),
        ({"overrides": {"allow_auto_truncate": True}}, 64, 512, None),
        ({"name": "other"}, 1024, 512, None),
    ],
)
def test_a_judge_whose_context_holds_no_response_is_refused_before_the_run(tmp_path, model, response, answer, message):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 128}')
    engine = EngineConfig(engine_models=(EngineModel(**{"name": "helper", "model_path": tmp_path, **model}),))
    config = RunConfig(rollout=RolloutConfig(rm_model="helper", rollout_max_response_len=response), engine=engine)
    found = list(mistakes(run_view(config), RewardsOptions(rm_judge_max_tokens=answer)))
    assert found == ([] if message is None else [message])


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
    assert message == (
        f"{setting} names the environment variable NOT_SET, which holds a secret of the service and is not set. Export "
        "it before the run, on a cluster in the runtime environment of the job"
    )


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
        (
            f"--rm-url {URL}?token=secret",
            f"rm_url = {URL} has no effect: none of rm_type = exact_match reads it. Leave --rm-url out, or name a "
            "reward model that reads it: remote_rm",
        ),
        (
            "--rm-type math --rm-judge-max-tokens 9",
            "rm_judge_max_tokens = 9 has no effect: none of rm_type = math reads it. Leave --rm-judge-max-tokens out, "
            "or name a reward model that reads it: judge",
        ),
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
    assert str(caught.value).endswith("needs rm_url, which is not set. Add --rm-url, or choose another reward model.")


def test_an_evaluation_misses_a_secret_before_anything_starts(tmp_path: Path):
    data = tmp_path / "aime.jsonl"
    data.write_text('{"prompt": "1", "label": "1"}\n')
    with pytest.raises(ConfigError, match="rm_token_env names the environment variable NOT_SET"):
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
    message = (
        f"{tmp_path}/prompts.jsonl, line 2: metadata rm_url = {url!r}, which is none of the services that the run "
    )
    with pytest.raises(DataError) as caught:
        looked_at(tmp_path, f"--rm-url {URL} --rm-row-urls http://host/a?key=${{HOME}}", {}, row)
    assert str(caught.value) == (
        f"{message}may ask: {URL}, http://host/a. Correct the row, or allow the service with --rm-row-urls URL."
    )
    (left_out,) = looked_at(tmp_path, f"--rm-url {URL} --on-bad-data skip", {}, row)
    assert left_out.startswith(message)


def test_a_row_that_names_a_reward_model_without_its_service_is_refused(tmp_path: Path):
    with pytest.raises(DataError) as caught:
        looked_at(tmp_path, "", {}, {"rm_type": "0.5*math + 1*remote_rm"})
    assert str(caught.value).endswith(
        "line 2: metadata rm_type = '0.5*math + 1*remote_rm': reward model 'remote_rm' needs rm_url, which the run "
        "does not give. Add --rm-url, or correct the row."
    )
