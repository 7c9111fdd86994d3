"""The rules of engines: what groups and models come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.engines import EngineGroup
from slime_core.config.explain import to_toml
from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.errors import ConfigError, Mistake
from tests.unit.config.broken import blames
from tests.unit.config.broken import broken as broken_flags

MODEL = ARITHMETIC / "model"
TOY = ("--advantage-estimator", "toy")

GROUP = "[[engine.engine_groups]]\nnum_gpus = "
ENGINE_MODEL = "[[engine.engine_models]]\n"
GROUPS = """
[cluster]
rollout_num_gpus = 5
rollout_num_gpus_per_engine = 1
[[engine.engine_groups]]
num_gpus = 1
[[engine.engine_groups]]
num_gpus = 4
num_gpus_per_engine = 2
overrides = { chunked_prefill_size = 512, disable_radix_cache = true }
[[engine.engine_models]]
name = "judge"
model_path = "models/judge"
num_gpus = 2
overrides = { chunked_prefill_size = 64 }
[[engine.engine_models]]
name = "score"
model_path = "models/score"
is_embedding = true
engine_groups = [{ num_gpus = 1 }, { num_gpus = 2, num_gpus_per_engine = 2 }]
"""


def settings(folder: Path, text: str) -> RunConfig:
    (folder / "run.toml").write_text(text)
    return load(["--config", str(folder / "run.toml"), *TOY], check_rules=False).config


def broken(config: RunConfig) -> list[Mistake]:
    return mistakes(config, purpose="run")


def test_groups_and_models_say_how_many_engines_there_are(tmp_path):
    config = settings(tmp_path, GROUPS)
    assert [(group.num_engines, group.size) for group in config.engine_groups] == [(1, 1), (2, 2)]
    assert (config.num_engines, config.num_rollout_gpus) == (3, 5)
    assert [(group.num_engines, group.size) for group in config.auxiliary_groups] == [(2, 1), (1, 1), (1, 2)]
    judge, score = config.engine.engine_models
    assert (judge.model_path, score.is_embedding) == (tmp_path / "models" / "judge", True)
    assert dict(judge.groups[0].overrides) == {"chunked_prefill_size": 64}


def test_the_written_settings_give_the_same_engine_groups(tmp_path):
    (tmp_path / "groups.toml").write_text(GROUPS)
    first = load(["--config", str(tmp_path / "groups.toml"), *TOY], check_rules=False)
    again = settings(tmp_path, to_toml(first))
    assert again == first.config
    assert hash(again) == hash(first.config)


def test_a_group_as_a_flag_is_a_json_object_or_in_toml():
    found = load([*TOY, "--engine-groups", '{"num_gpus": 2}', "num_gpus = 1"], check_rules=False).config
    assert [group.num_gpus for group in found.engine.engine_groups] == [2, 1]
    with pytest.raises(ConfigError, match=r"--engine-groups: table 1: found 'two'"):
        load([*TOY, "--engine-groups", "two"])


@pytest.mark.parametrize(
    ("table", "fields"),
    [
        ('{"name": "judge"}', ["model_path: "]),
        ('{"name": "judge", "model_pth": "m"}', ["model_path: ", "model_pth: found 'm'"]),
        (
            '{"name": "judge", "model_path": "m", "engine_groups": [{"num_gpu": 1}]}',
            ["engine_groups.0.num_gpus: ", "engine_groups.0.num_gpu: found 1"],
        ),
        ('{"name": "judge", "model_path": "m", "num_gpus": 0}', ["num_gpus: found 0"]),
    ],
)
def test_all_that_is_wrong_with_a_table_is_reported(table, fields):
    with pytest.raises(ConfigError) as failure:
        load([*TOY, "--engine-models", table])
    blames(failure.value.mistakes, "engine_models", *(f"table 1 {field}" for field in fields))


def test_engines_that_only_evaluate_are_a_group_of_their_own():
    config = load([*TOY, "--eval-num-gpus", "4", "--rollout-num-gpus-per-engine", "2"], check_rules=False).config
    assert config.eval_groups == config.auxiliary_groups == (EngineGroup(num_gpus=4, num_gpus_per_engine=2),)
    assert load([*TOY, "--debug-train-only", "--eval-num-gpus", "1"], check_rules=False).config.eval_groups == ()


def test_prefill_servers_come_first_and_the_others_decode():
    config = load([*TOY, "--prefill-num-servers", "1", "--rollout-num-gpus", "3"], check_rules=False).config
    assert [(group.worker_type, group.num_engines) for group in config.engine_groups] == [("prefill", 1), ("decode", 2)]
    assert config.splits_prefill


OVERRIDES = GROUP + "8\noverrides = { "
JUDGE = f'name = "a"\nmodel_path = "{MODEL}"'


@pytest.mark.parametrize(
    ("tables", "key", "names"),
    [
        ([GROUP + "3", GROUP + "3"], "rollout_num_gpus", ["= 8, ", "engine_groups have 6"]),
        (
            [GROUP + "7\nnum_gpus_per_engine = 2", GROUP + "1"],
            "engine_groups",
            ["group 0: 7 ", "(num_gpus_per_engine)"],
        ),
        ([OVERRIDES + "tp_size = 2 }"], "engine_groups", ["overrides tp_size: ", "--rollout-num-gpus-per-engine"]),
        ([GROUP + '8\nworker_type = "prefill"'], "engine_groups", ["worker_type is prefill"]),
        ([ENGINE_MODEL + JUDGE] * 2, "engine_models", ["2 ", "'a'"]),
        (
            [ENGINE_MODEL + f"{JUDGE}\nnum_gpus = 3\nengine_groups = [{{ num_gpus = 1 }}]"],
            "engine_models",
            [" a: num_gpus = 3", " 1 "],
        ),
        ([ENGINE_MODEL + 'name = "a"\nmodel_path = "/no/model"'], "engine_models", [" a: /no/model "]),
    ],
)
def test_wrong_engine_tables_are_named(tmp_path: Path, tables: list[str], key: str, names: list[str]) -> None:
    text = "\n".join(["[cluster]\nrollout_num_gpus = 8", *tables])
    blames(broken(settings(tmp_path, text)), key, *names)


EXTERNAL = "--rollout-external-engine-addrs 127.0.0.1:30000"


def test_external_engines_take_no_gpus_of_the_run():
    config = load([*TOY, *EXTERNAL.split(), "127.0.0.1:30001", "--rollout-num-gpus-per-engine", "2"], check_rules=False)
    assert (config.config.num_engines, config.config.num_rollout_gpus, config.config.engine_groups) == (2, 4, ())
    assert broken(config.config) == []
    blames(broken_flags(EXTERNAL, purpose="eval"), "rollout_external_engine_addrs", "")


@pytest.mark.parametrize("name", ["engine", "eval", "../judge", "a/b", ".hidden", "my judge"])
def test_a_model_s_name_is_usable_in_names_of_log_files(tmp_path: Path, name: str) -> None:
    model = f'[[engine.engine_models]]\nname = "{name}"\nmodel_path = "{MODEL}"'
    with pytest.raises(ConfigError, match="table 1 name"):
        settings(tmp_path, model)


def test_auxiliary_models_share_their_heads_evenly(tmp_path):
    judge = f'[[engine.engine_models]]\nname = "judge"\nmodel_path = "{MODEL}"\nnum_gpus_per_engine = 3'
    sizes = "num_attention_heads = 4, num_key_value_heads = 2, intermediate_size = 128"
    blames(broken(settings(tmp_path, judge)), "engine_models", "judge: num_gpus_per_engine = 3 ", sizes)
    assert broken(settings(tmp_path, f"{judge}\n[sglang]\nenable_dp_attention = true")) == []


OFFLOADED = "--bf16 --optimizer-cpu-offload --use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("line", "key", "needs"),
    [
        ("--use-precision-aware-optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload"),
        ("--bf16 --optimizer-cpu-offload", "optimizer_cpu_offload", "use_precision_aware_optimizer"),
        ("--optimizer-cpu-offload --use-precision-aware-optimizer", "optimizer_cpu_offload", "bf16"),
        ("--optimizer-offload-fraction 0.5", "optimizer_offload_fraction", "optimizer_cpu_offload"),
        ("--overlap-cpu-optimizer-d2h-h2d", "overlap_cpu_optimizer_d2h_h2d", "optimizer_cpu_offload"),
        (f"{OFFLOADED} --optimizer-offload-fraction 1.5", "optimizer_offload_fraction", "1.5"),
    ],
)
def test_half_an_offloaded_optimizer_is_one_mistake(line: str, key: str, needs: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*TOY, *line.split()])
    blames(caught.value.mistakes, f"megatron.{key}", needs)
