"""Which layer wins, where values come from, and what a file may say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from slime_core.config.load import Resolved, load, peek
from slime_core.config.options import DerivedSetting
from slime_core.config.schema import ARITHMETIC, DEMO_DEFAULTS
from slime_core.errors import ConfigError
from tests.unit.config.broken import blames, refused


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
    presets = {"eps_clip": [(0.1, "toy")], "eps_clip_high": [(0.3, "toy")], "entropy_coef": [(0.5, "toy")]}
    file = write(tmp_path, "[algorithm]\neps_clip = 0.4\neps_clip_high = 0.6\n")
    resolved = resolve("--eps-clip 0.7", file=file, presets=presets)
    found = resolved.config.algorithm
    assert (found.eps_clip, found.eps_clip_high, found.entropy_coef, found.kl_loss_coef) == (0.7, 0.6, 0.5, 0.0)


def test_every_value_knows_where_it_came_from(tmp_path: Path) -> None:
    file = write(tmp_path, "\n[algorithm]\neps_clip_high = 0.6\n")
    origin = resolve("--eps-clip 0.7", file=file, presets={"entropy_coef": [(0.5, "toy")]}).provenance
    keys = ("eps_clip", "eps_clip_high", "entropy_coef", "lr", "seed")
    expected = ["flag --eps-clip", "file run.toml:3", "preset of plugin toy", "built-in demo", "default"]
    assert [str(origin[key]) for key in keys] == expected


def test_a_run_without_evaluations_has_a_flag_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path, '[eval]\neval_interval = 5\n[[eval.eval_datasets]]\nname = "a"\npath = "b"')
    for config in (resolve("--no-eval").config, resolve("--no-eval", file=file).config):
        assert (config.evaluates, config.eval.eval_interval, config.eval.skip_eval_before_train) == (False, None, True)
    with pytest.raises(ConfigError, match="--eval-interval"):
        resolve("--no-eval --eval-interval 3")
    with pytest.raises(ConfigError, match=r"--no-eval: .*'false'"):
        resolve("--no-eval false")


def test_paths_of_a_file_are_relative_to_its_folder_and_flags_replace_its_plugins(tmp_path: Path) -> None:
    file = write(tmp_path, '[data]\nprompt_data = "train.jsonl"\n[run]\nplugins = ["./mine.py", "grpo"]\n')
    assert resolve(file=file).config.data.prompt_data == tmp_path / "train.jsonl"
    argv = ["--config", str(file)]
    assert peek(argv).plugins == (str(tmp_path / "mine.py"), "grpo")
    assert peek([*argv, "--plugin", "ppo", "--grpo.x=1", "--lr", "fast"]).plugins == ("ppo",)
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
        resolve(presets={"eps_clop": [(1, "toy")]})


def test_a_setting_that_two_plugins_preset_differently_has_to_be_given() -> None:
    presets = {"eps_clip": [(0.1, "toy"), (0.2, "other")]}
    blames(refused(presets=presets), "eps_clip", "toy", "other", "--eps-clip")
    assert resolve("--eps-clip 0.3", presets=presets).config.algorithm.eps_clip == 0.3
    equal = {"eps_clip": [(0.1, "toy"), (0.1, "other")]}
    assert resolve(presets=equal).config.algorithm.eps_clip == 0.1


def test_only_plugins_that_take_part_have_options_in_the_result(tmp_path: Path) -> None:
    file = write(tmp_path, "[gone]\nx = 1\n")
    resolved = resolve(file=file, plugin_options=TOY, takes_part=(), without=("gone",))
    assert resolved.plugin_options == {}
    assert "toy.low" not in resolved.provenance
    with pytest.raises(ConfigError, match=r"run\.toml:1 \[gone\]"):
        resolve(file=file, plugin_options=TOY)
    assert peek(["--config", str(file)]).in_file == ("gone",)


def test_a_peek_says_what_flags_file_and_presets_use_of_plugins(tmp_path: Path) -> None:
    file = write(tmp_path, '[rollout]\nrm_type = "math"\n[toy]\nlow = 0.5\n')
    seen = peek(["--config", str(file), "--corrections", "tis", "--eval-prompt-data", "a", "a.parquet"])
    uses = seen.uses(
        takes_part=("toy",),
        presets={"advantage_estimator": [("flat", "toy")]},
        plugin_options=TOY,
        without=(),
        derive=lambda options, settings: [],
    )
    assert uses.plugins == {"toy"}
    chosen = {(choice.kind, choice.name, choice.where) for choice in uses.components}
    assert chosen >= {
        ("correction", "tis", "--corrections"),
        ("reward_model", "math", "rm_type (file run.toml:2)"),
        ("advantage_estimator", "flat", "advantage_estimator (preset of plugin toy)"),
        ("data_source", "prompts", "--eval-prompt-data"),
    }


@pytest.mark.parametrize(
    ("line", "given", "rate"),
    [
        ("--toy.high 2", "keep", 2.0),
        ("--toy.high 2 --lr 0.5", "keep", 0.5),
        ("--toy.high 2 --lr 0.5", "refuse", None),
        ("--toy.high 2 --lr 0.5", "later", None),
        ("--toy.high 2 --lr 2", "refuse", 2.0),
        ("--toy.high 2", "replace", 2.0),
    ],
)
def test_an_option_stands_in_for_a_setting_of_the_core(line: str, given: str, rate: float | None) -> None:
    def derive(options: dict[str, Options], settings: object) -> list[tuple[str, DerivedSetting]]:
        return [("toy", DerivedSetting("lr", options["toy"].high, option="high", given=given))]  # type: ignore[arg-type]

    if rate is None:
        blames(refused(*line.split(), plugin_options=TOY, derive=derive), "lr", "--toy.high", "lr", "0.5")
    else:
        assert resolve(line, plugin_options=TOY, derive=derive).config.optimizer.lr == rate


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


# --- What follows from the model --------------------------------------------------------------------------------------


def test_a_length_that_nothing_gives_and_the_model_cannot_read_is_half_of_what_it_reads(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "label": "2"}')
    argv = ["--prompt-data", str(tmp_path / "train.jsonl"), "--hf-checkpoint", str(ARITHMETIC / "model")]
    found = load(argv, check_rules=False)
    assert found.config.rollout.rollout_max_response_len == 64
    assert str(found.provenance["rollout_max_response_len"]) == "model max_position_embeddings = 128"
    assert (
        load([*argv, "--rollout-max-response-len", "9"], check_rules=False).config.rollout.rollout_max_response_len == 9
    )


# --- What follows from the device -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "fields", "gpus", "bf16"),
    [
        ("", {"dtype": "bfloat16"}, True, True),
        ("", {"torch_dtype": "bfloat16"}, True, True),
        ("--device cuda", {"dtype": "bfloat16"}, False, True),
        ("--no-bf16", {"dtype": "bfloat16"}, True, False),
        ("--device cpu", {"dtype": "bfloat16"}, True, False),
        ("--true-on-policy-mode", {"dtype": "bfloat16"}, True, False),
        ("", {"dtype": "bfloat16"}, False, False),
        ("", {"dtype": "float32"}, True, False),
        ("", {"dtype": 7}, True, False),
    ],
)
def test_a_bfloat16_checkpoint_is_computed_in_bfloat16_on_gpus(
    line: str, fields: dict[str, object], gpus: bool, bf16: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    resolved = resolve(f"--hf-checkpoint {tmp_path} {line}", finds_gpus=lambda _: gpus)
    assert resolved.config.model.bf16 is bf16
    assert (str(resolved.provenance["bf16"]) == "model dtype = bfloat16, on GPUs") is bf16


# --- Flags ------------------------------------------------------------------------------------------------------------


HERE = Path.cwd()
MINE = "--prompt-data mine.jsonl"
OTHER = "--hf-checkpoint model"
DEVICES = "--actor-num-gpus-per-node"


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("--use-kl-loss", "use_kl_loss", True),
        ("--use-kl-loss true", "use_kl_loss", True),
        ("--use-kl-loss=false", "use_kl_loss", False),
        ("--no-use-kl-loss", "use_kl_loss", False),
        ("--rollout-top-k -1", "rollout_top_k", -1),
        ("--label-key none", "label_key", None),
        ("--progress none", "progress", "none"),
        ("--rollout-stop-token-ids 1 2 --rollout-stop-token-ids 3", "rollout_stop_token_ids", (1, 2, 3)),
        ("--rollout-stop=--end", "rollout_stop", ("--end",)),
        ("--eval-prompt-data a x b y", "eval_prompt_data", (("a", HERE / "x"), ("b", HERE / "y"))),
        ("--eval-prompt-data a x --eval-prompt-data b y", "eval_prompt_data", (("a", HERE / "x"), ("b", HERE / "y"))),
        ("--plugin grpo --plugin ./mine.py", "plugins", ("grpo", str(HERE / "mine.py"))),
        # Defaults of the built-in demo: those of its model, and those of its task.
        ("", "num_rollout", DEMO_DEFAULTS["num_rollout"]),
        (MINE, "num_rollout", 200),
        (MINE, "apply_chat_template", True),
        (MINE, "lr", DEMO_DEFAULTS["lr"]),
        (MINE, "rollout_max_response_len", DEMO_DEFAULTS["rollout_max_response_len"]),
        (MINE, "eval_prompt_data", ()),
        (f"{MINE} --eval-interval 50", "eval_prompt_data", DEMO_DEFAULTS["eval_prompt_data"]),
        (OTHER, "eval_prompt_data", ()),
        (f"{MINE} {OTHER}", "apply_chat_template", False),
        (f"{MINE} {OTHER}", "lr", 1e-6),
        (f"{MINE} {OTHER} --eval-interval 50", "eval_prompt_data", ()),
        # Engines that nothing counts follow the devices.
        (f"{DEVICES} 4", "rollout_num_gpus", 1),
        ("--rollout-num-gpus-per-engine 2", "rollout_num_gpus", 2),
        (f"--colocate {DEVICES} 4", "rollout_num_gpus", 4),
        (f"--colocate {DEVICES} 4 --actor-num-nodes 2", "rollout_num_gpus", 8),
        (f"--colocate {DEVICES} 5 --rollout-num-gpus-per-engine 2", "rollout_num_gpus", 4),
        (f"--colocate {DEVICES} 4 --rollout-num-gpus 2", "rollout_num_gpus", 2),
        ("--rollout-external-engine-addrs host:1 --rollout-num-gpus-per-engine 2", "rollout_num_gpus", 1),
    ],
)
def test_a_command_line_decides_a_value(line: str, key: str, value: object) -> None:
    assert load(line.split(), check_rules=False).values()[key][1] == value


def test_all_mistakes_are_reported_at_once() -> None:
    mistakes = refused(*["--lr", "fast", "--seed", "--zzz", "--device", "gpu", "--num-rollou", "3"])
    assert len(mistakes) == 5
    assert {mistake.key for mistake in mistakes} == {"lr", "seed", "device", ""}
    assert sum("--num-rollout" in str(mistake) for mistake in mistakes) == 1  # a prefix of a flag is not the flag
