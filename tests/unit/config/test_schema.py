"""The sections are frozen, complete and unambiguous, and sizes are bounded before anything is built from them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from slime_core.cli.main import main
from slime_core.config.learning import AlgorithmConfig, LearnerConfig
from slime_core.config.load import load
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.config.section import EngineSection
from slime_core.config.settings import core_settings
from slime_core.errors import ConfigError


def test_no_two_sections_share_a_name() -> None:
    sections = [section for _, section in RunConfig() if not isinstance(section, EngineSection)]
    names = [name for section in sections for name, _ in section]
    assert len(names) == len(set(names)) == len(core_settings())


def test_every_setting_has_a_default_and_says_what_it_does_and_accepts() -> None:
    for setting in core_settings().values():
        description = str(setting.info.description)
        assert not setting.info.is_required()
        assert description.endswith(".")
        assert not setting.optional or "None:" in description, setting.name
        assert setting.accepts, setting.name


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().rollout.num_rollout = 3  # type: ignore[misc]


def test_a_config_refuses_names_it_does_not_know() -> None:
    with pytest.raises(ValidationError, match="eps_clop"):
        AlgorithmConfig.model_validate({"eps_clop": 0.1})


@pytest.mark.parametrize("k", [0, -2])
def test_no_token_is_no_top_k(k: int) -> None:
    with pytest.raises(ValidationError, match="rollout_top_k"):
        RolloutConfig(rollout_top_k=k)


def test_a_ratio_cannot_be_clipped_below_zero_but_far_above_one() -> None:
    with pytest.raises(ValidationError, match="eps_clip"):
        AlgorithmConfig(eps_clip=1.5)
    assert AlgorithmConfig(eps_clip=1, eps_clip_high=4).eps_clip_high == 4


@pytest.mark.parametrize(
    ("learner", "samples", "steps"),
    [
        (LearnerConfig(), 12, 1),
        (LearnerConfig(num_steps_per_rollout=3), 4, 3),
        (LearnerConfig(global_batch_size=6), 6, 2),
        (LearnerConfig(global_batch_size=4, num_steps_per_rollout=3), 4, 3),
    ],
)
def test_samples_and_steps_follow_from_each_other(learner: LearnerConfig, samples: int, steps: int) -> None:
    config = RunConfig(rollout=RolloutConfig(rollout_batch_size=4, n_samples_per_prompt=3), learner=learner)
    assert (config.samples_per_rollout, config.samples_per_step, config.steps_per_rollout) == (12, samples, steps)


# --- Sizes ------------------------------------------------------------------------------------------------------------


PATHS = [setting for setting in core_settings().values() if setting.placeholder == "PATH"]
COUNTS = ["rollout-num-gpus", "eval-num-gpus", "actor-num-nodes", "actor-num-gpus-per-node", "critic-num-gpus"]


def refusal(argv: list[str]) -> str:
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load(["--advantage-estimator", "toy", *argv])
    assert time.process_time() - started < 2
    return str(caught.value)


@pytest.mark.parametrize("count", COUNTS)
def test_more_processes_than_any_cluster_has_are_refused_at_once(count: str) -> None:
    assert re.search(r" 1,000,000,00[12] .*65,536", refusal([f"--{count}", "1000000000"]))


def test_devices_of_groups_and_models_count_too() -> None:
    group = '{"num_gpus": 1000000000}'
    assert " 1,000,000,001 " in refusal(["--engine-groups", group, "--rollout-num-gpus", "1000000000"])
    model = '{"name": "judge", "model_path": "/nowhere", "num_gpus": 1000000000}'
    assert " 1,000,000,002 " in refusal(["--engine-models", model])


@pytest.mark.parametrize("digits", [17, 4000, 4400])
def test_a_number_that_is_no_size_is_refused(digits: int) -> None:
    assert "accepted: " in refusal(["--seed", "9" * digits])


TOML: dict[str, Callable[[], str]] = {
    "nested": lambda: "[run]\nseed = " + 5000 * "[" + 5000 * "]",
    "digits (at line 3)": lambda: "[run]\n\nseed = " + "9" * 4400,
    "digits (at line 2)": lambda: "[run]\nseed = 0x" + "f" * 4400,
    "32 parts (at line 3)": lambda: "[run]\nseed = 1\n" + ".".join(["a"] * 20_000) + " = 1",
    "32 parts (at line 1)": lambda: "[" + " . ".join(['"a b"', "b", "'c'"] * 7000) + "]",
    "1,048,576 bytes": lambda: "#" * 2**21,
}


@pytest.mark.parametrize("message", TOML)
def test_a_settings_file_without_bounds_is_refused_at_once(message: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML[message]())
    assert message in refusal(["--config", str(tmp_path / "run.toml")])


@pytest.mark.parametrize("setting", PATHS, ids=lambda setting: setting.name)
@pytest.mark.parametrize("path", ["x" * 5000, "x/" * 2500])
def test_no_path_of_5000_characters_reaches_the_file_system(setting: object, path: str) -> None:
    assert "accepted: " in refusal([setting.flag, path])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["x" * 300, "../../x", "a/b", "..", ".hidden", "a\nb", "a\0b"])
def test_a_job_name_is_the_name_of_a_folder(name: str) -> None:
    assert "--job-name: " in refusal(["--job-name", name])


COMMANDS = ["eval", "ledger", "check", "plugins show", "run --config", "run --load", "run --custom-rm-path"]


@pytest.mark.parametrize("line", COMMANDS)
def test_no_command_fails_on_a_path_of_5000_characters(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line.split(), "x" * 5000 + ".py"]) == 2
    assert "slime: " in capsys.readouterr().err


def test_names_with_dots_in_texts_are_no_keys(tmp_path: Path) -> None:
    names = ", ".join('"model.layers.0.mlp"' for _ in range(100))
    (tmp_path / "run.toml").write_text(f"[optimizer]\nfreeze_params_name_list = [{names}]\n")
    load(["--config", str(tmp_path / "run.toml")], check_rules=False)
