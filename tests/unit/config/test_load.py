"""Which layer wins, where values come from, and what a file may say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved, load, peek
from slime_core.config.schema import ARITHMETIC, DEMO_DEFAULTS
from slime_core.errors import ConfigError
from tests.unit.config.broken import refused


class Options(BaseModel):
    """Options of a plugin called toy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    std_normalization: bool = Field(default=True, description="Divide by the standard deviation.")
    low: float = Field(default=0.0, ge=0, description="Lower bound.")
    high: float = Field(default=1.0, description="Upper bound.")

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Options:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} is above high = {self.high}")
        return self


TOY = {"toy": Options}


def resolve(line: str = "", *, file: Path | None = None, **layers: object) -> Resolved:
    argv = line.split() + (["--config", str(file)] if file else [])
    return load(argv, check_rules=False, **layers)  # type: ignore[arg-type]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_a_flag_beats_the_file_which_beats_a_preset_which_beats_the_default(tmp_path: Path) -> None:
    presets = {"eps_clip": (0.1, "toy"), "eps_clip_high": (0.3, "toy"), "entropy_coef": (0.5, "toy")}
    file = write(tmp_path, "[algorithm]\neps_clip = 0.4\neps_clip_high = 0.6\n")
    resolved = resolve("--eps-clip 0.7", file=file, presets=presets)
    found = resolved.config.algorithm
    assert (found.eps_clip, found.eps_clip_high, found.entropy_coef, found.kl_loss_coef) == (0.7, 0.6, 0.5, 0.0)


def test_every_value_knows_where_it_came_from(tmp_path: Path) -> None:
    file = write(tmp_path, "\n[algorithm]\neps_clip_high = 0.6\n")
    origin = resolve("--eps-clip 0.7", file=file, presets={"entropy_coef": (0.5, "toy")}).provenance
    keys = ("eps_clip", "eps_clip_high", "entropy_coef", "lr", "seed")
    expected = ["flag --eps-clip", "file run.toml:3", "preset of plugin toy", "built-in demo", "default"]
    assert [str(origin[key]) for key in keys] == expected


def test_embedded_defaults_apply_where_neither_model_nor_prompts_are_named() -> None:
    assert resolve().config.rollout.num_rollout == DEMO_DEFAULTS["num_rollout"]
    assert resolve("--prompt-data mine.jsonl").config.rollout.num_rollout == 200
    assert resolve("--hf-checkpoint model").config.eval.eval_prompt_data == ()


def test_settings_of_the_built_in_model_apply_to_other_prompts_too() -> None:
    config = resolve("--prompt-data mine.jsonl").config
    assert config.data.apply_chat_template
    assert config.optimizer.lr == DEMO_DEFAULTS["lr"]
    assert config.rollout.rollout_max_response_len == DEMO_DEFAULTS["rollout_max_response_len"]
    assert (config.eval.eval_interval, config.eval.eval_prompt_data) == (None, ())
    other = resolve("--prompt-data mine.jsonl --hf-checkpoint model").config
    assert (other.data.apply_chat_template, other.optimizer.lr) == (False, 1e-6)


def test_a_run_without_evaluations_has_a_flag_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path, '[eval]\neval_interval = 5\n[[eval.eval_datasets]]\nname = "a"\npath = "b"')
    for config in (resolve("--no-eval").config, resolve("--no-eval", file=file).config):
        assert (config.evaluates, config.eval.eval_interval, config.eval.skip_eval_before_train) == (False, None, True)
    with pytest.raises(ConfigError, match=r"--no-eval: .*--eval-interval"):
        resolve("--no-eval --eval-interval 3")
    with pytest.raises(ConfigError, match=r"--no-eval: .*'false'"):
        resolve("--no-eval false")


@pytest.mark.parametrize(
    ("line", "devices"),
    [
        ("--actor-num-gpus-per-node 4", 1),
        ("--rollout-num-gpus-per-engine 2", 2),
        ("--colocate --actor-num-gpus-per-node 4", 4),
        ("--colocate --actor-num-gpus-per-node 4 --actor-num-nodes 2", 8),
        ("--colocate --actor-num-gpus-per-node 5 --rollout-num-gpus-per-engine 2", 4),
        ("--colocate --actor-num-gpus-per-node 4 --rollout-num-gpus 2", 2),
        ("--rollout-external-engine-addrs host:1 --rollout-num-gpus-per-engine 2", 1),
    ],
)
def test_engines_that_nothing_counts_follow_the_devices(line: str, devices: int) -> None:
    assert resolve(line).config.cluster.rollout_num_gpus == devices


def test_everything_else_beats_an_embedded_default() -> None:
    resolved = resolve("--eval-interval none", presets={"lr": (0.25, "toy")})
    assert (resolved.config.eval.eval_interval, resolved.config.optimizer.lr) == (None, 0.25)


def test_paths_of_a_file_are_relative_to_its_folder(tmp_path: Path) -> None:
    file = write(tmp_path, '[data]\nprompt_data = "train.jsonl"\n[run]\nplugins = ["./mine.py", "grpo"]\n')
    config = resolve(file=file).config
    assert config.data.prompt_data == tmp_path / "train.jsonl"
    assert config.run.plugins == (str(tmp_path / "mine.py"), "grpo")


def test_plugins_named_by_flag_replace_those_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, '[run]\nplugins = ["grpo"]\n[grpo]\nx = 1\n')
    assert peek(["--config", str(file)]).plugins == ("grpo",)
    assert peek(["--config", str(file), "--plugin", "ppo", "--grpo.x=1", "--lr", "fast"]).plugins == ("ppo",)


def test_a_peek_sees_the_model_and_ignores_an_unreadable_file(tmp_path: Path) -> None:
    assert peek(["--hf-checkpoint", str(tmp_path), "--config", "missing.toml"]).hf_checkpoint == tmp_path


def test_plugin_options_come_from_flags_and_from_a_table(tmp_path: Path) -> None:
    file = write(tmp_path, "[toy]\nlow = 0.5\nhigh = 3\n")
    resolved = resolve("--toy.std-normalization false --toy.high 2", file=file, plugin_options=TOY)
    assert resolved.plugin_options == {"toy": Options(std_normalization=False, low=0.5, high=2.0)}
    assert str(resolved.provenance["toy.low"]) == "file run.toml:2"


def test_a_rule_between_plugin_options_is_reported_with_the_rest() -> None:
    with pytest.raises(ConfigError, match=r"(?s)--zzz.*\[toy\]: .*low = 2.0 .*high = 1.0"):
        resolve("--toy.low 2 --zzz", plugin_options=TOY)


def test_a_preset_that_is_no_setting_blames_the_plugin() -> None:
    with pytest.raises(ConfigError, match=r"eps_clop .* toy: .* eps_clip\b"):
        resolve(presets={"eps_clop": (1, "toy")})


@pytest.mark.parametrize(
    ("text", "place", "names"),
    [
        ("[optimizer]\nlr = '1'", "run.toml:2 [optimizer] lr: ", '"1"'),
        ("[run]\nseed = true", "run.toml:2 [run] seed: ", "true"),
        ("[model]\nbf16 = 1", "run.toml:2 [model] bf16: ", "1"),
        ("[run]\njob_name = 2024-01-01", "run.toml:2 [run] job_name: ", "2024-01-01"),
        ("[optimizer]\nlearning = 1", "run.toml:2 [optimizer] learning: ", ""),
        ("[optimizer]\nmin_lrr = 1", "run.toml:2 [optimizer] min_lrr: ", " min_lr?"),
        ("[model]\nlr = 1", "run.toml:2 [model] lr: ", "[optimizer]"),
        ("plugins = []", "run.toml:1 plugins: ", "[run]"),
        ("[eva]", "run.toml:1 [eva]: ", " eval?"),
    ],
)
def test_a_mistake_in_a_file_says_line_and_section(tmp_path: Path, text: str, place: str, names: str) -> None:
    (mistake,) = refused("--config", str(write(tmp_path, text)))
    assert str(mistake).startswith(place)
    assert names in str(mistake).removeprefix(place)


def test_a_syntax_error_in_a_file_names_its_line_and_hides_no_other_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml: .*line 2.*\n.*--lr: .*'fast'"):
        load(["--config", str(write(tmp_path, "[run]\nseed = = 1")), "--lr", "fast"])


def test_a_missing_file_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"--config missing\.toml: "):
        load(["--config", "missing.toml"])


# --- What follows from the model --------------------------------------------------------------------------------------


def test_a_length_that_nothing_gives_and_the_model_cannot_read_is_half_of_what_it_reads(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "label": "2"}')
    argv = ["--prompt-data", str(tmp_path / "train.jsonl"), "--hf-checkpoint", str(ARITHMETIC / "model")]
    found = load(argv, check_rules=False)
    assert found.config.rollout.rollout_max_response_len == 64
    assert str(found.provenance["rollout_max_response_len"]) == "model max_position_embeddings = 128"
    assert (
        load([*argv, "--rollout-max-response-len", "9"], check_rules=False).config.rollout.rollout_max_response_len == 9
    )


def test_workers_that_count_tokens_count_against_what_the_model_reads():
    found = load(["--num-data-workers", "4"], check_rules=False)
    assert found.config.data.rollout_max_prompt_len == 128 - 8


def test_the_built_in_model_is_evaluated_on_its_own_set_where_none_is_named(tmp_path):
    argv = ["--prompt-data", str(tmp_path / "train.jsonl"), "--eval-interval", "50"]
    assert [name for name, _ in load(argv, check_rules=False).config.eval.eval_prompt_data] == ["arithmetic"]
    other = [*argv, "--hf-checkpoint", str(tmp_path)]
    assert load(other, check_rules=False).config.eval.eval_prompt_data == ()


# --- What follows from the device -------------------------------------------------------------------------------------


def checkpoint(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_on_gpus_a_bfloat16_checkpoint_is_computed_in_bfloat16(tmp_path, name):
    line = f"--hf-checkpoint {checkpoint(tmp_path, **{name: 'bfloat16'})}"
    found = resolve(line, finds_gpus=lambda _: True)
    assert (found.config.model.bf16, str(found.provenance["bf16"])) == (True, "model dtype = bfloat16, on GPUs")
    assert resolve(f"{line} --device cuda").config.model.bf16


@pytest.mark.parametrize("given", ["--no-bf16", "--device cpu", "--true-on-policy-mode"])
def test_a_flag_or_a_cpu_keeps_float32(tmp_path, given):
    line = f"--hf-checkpoint {checkpoint(tmp_path, dtype='bfloat16')} {given}"
    assert not resolve(line, finds_gpus=lambda _: True).config.model.bf16


@pytest.mark.parametrize(("dtype", "gpus"), [("float32", True), (None, True), (7, True), ("bfloat16", False)])
def test_without_gpus_or_a_bfloat16_checkpoint_float32_stays(tmp_path, dtype, gpus):
    found = resolve(f"--hf-checkpoint {checkpoint(tmp_path, dtype=dtype)}", finds_gpus=lambda _: gpus)
    assert not found.config.model.bf16
    assert str(found.provenance["bf16"]) == "default"


def test_auto_asks_about_the_cluster_that_is_joined(tmp_path):
    asked: list[str | None] = []
    line = f"--hf-checkpoint {checkpoint(tmp_path, dtype='bfloat16')} --ray-address head:6379"
    resolve(line, finds_gpus=lambda address: asked.append(address) is None)
    assert asked == ["head:6379"]


def test_the_run_file_records_what_the_default_became(tmp_path):
    found = resolve(f"--hf-checkpoint {checkpoint(tmp_path, dtype='bfloat16')} --device cuda")
    assert "bf16 = true  # model dtype = bfloat16, on GPUs" in to_toml(found)
