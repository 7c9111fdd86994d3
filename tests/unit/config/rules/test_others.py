"""The rules of batches, routing replay, other roles, rewards and of one half alone: each broken once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slime_core.components.selection import check_selection
from slime_core.config.engines import EngineConfig, EngineModel
from slime_core.config.load import load
from slime_core.config.sampling import EvalConfig, EvalDataset, RolloutConfig
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.rollout.rollout_files import Recorded, write_rollout
from tests.unit.config.broken import blames, broken

MODEL = ARITHMETIC / "model"


@pytest.mark.parametrize("line", ["--use-opd --opd-teacher-load", "--use-kl-loss --ref-load"])
def test_a_model_of_another_size_cannot_take_turns_with_the_actor(line: str, tmp_path: Path) -> None:
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    # Neither the dtype nor the ids of special tokens make another model.
    other = config | {"hidden_size": 12345, "torch_dtype": "bfloat16", "bos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(other), encoding="utf-8")
    key, size = line.split("--")[-1].replace("-", "_"), config["hidden_size"]
    blames(broken(f"{line} {tmp_path}"), key, f"= {tmp_path}: ", f"{MODEL}: hidden_size = 12345 instead of {size};")


# --- Routing replay ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["use_routing_replay", "use_rollout_routing_replay"])
def test_a_model_without_experts_has_no_routes(name: str) -> None:
    blames(broken(f"--{name.replace('_', '-')}")[:1], name, f"{MODEL}/config.json", "hf_checkpoint")


# --- One half alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "counts"),
    [("--load-debug-rollout-data r-{rollout_id}.jsonl", (0, 1, 1)), ("--debug-rollout-only", (1, 0, 1))],
)
def test_one_half_alone_has_only_its_processes(line: str, counts: tuple[int, int, int]) -> None:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    assert (config.num_engines, config.num_started_ranks, config.num_data_ranks) == counts
    assert config.evaluates is bool(counts[0])  # nothing could be evaluated without engines


def test_saved_rollouts_replace_no_file_that_the_run_reads(tmp_path: Path) -> None:
    (tmp_path / "my-3.jsonl").write_text("{}\n")
    line = f"--num-rollout 1 --rollout-max-response-len 8 --prompt-data {tmp_path}/my-3.jsonl"
    mistakes = broken(f"{line} --save-debug-rollout-data {tmp_path}/my-{{rollout_id}}.jsonl")
    blames(mistakes, "save_debug_rollout_data", f"{tmp_path}/my-3.jsonl ")


def test_only_what_slime_saved_is_replaced(tmp_path: Path) -> None:
    line = f"--save-debug-rollout-data {tmp_path}/r-{{rollout_id}}.jsonl"
    write_rollout(tmp_path / "r-0.jsonl", Recorded(0, 1.0, []))
    (tmp_path / "r-.jsonl").write_text("notes of mine, not in the way")
    assert broken(line) == []
    (tmp_path / "r-1.jsonl").write_text("notes of mine")
    blames(broken(line), "save_debug_rollout_data", f"{tmp_path}/r-1.jsonl ")


def test_train_data_of_a_rank_is_distinguished_from_other_tensors(tmp_path: Path) -> None:
    path, line = tmp_path / "t.safetensors", f"--num-rollout 1 --save-debug-train-data {tmp_path}/t.safetensors"
    tensors = {"lengths_B": np.zeros(2, np.int64)}
    save_file(tensors, path, metadata={"steps": "[]" * 900, "format": "slime train data", "version": "1"})
    assert broken(line) == []
    save_file(tensors, path)
    blames(broken(line), "save_debug_train_data", f": {path} ")


# --- Rewards ----------------------------------------------------------------------------------------------------------

SUM = "1*judge+1*math"
SERVED = (
    EngineModel(name="scorer", model_path=Path("m"), is_embedding=True),
    EngineModel(name="helper", model_path=Path("m")),
)


def asking(name: str, model: str) -> RunConfig:
    return RunConfig(rollout=RolloutConfig(rm_type=name, rm_model=model), engine=EngineConfig(engine_models=SERVED))


@pytest.mark.parametrize(
    ("config", "by", "name", "setting"),
    [
        (RunConfig(rollout=RolloutConfig(rm_type="remote_rm")), "rm_type = remote_rm", "remote_rm", "rm_url"),
        (RunConfig(rollout=RolloutConfig(rm_type=SUM)), f"rm_type = {SUM}", "judge", "rm_model"),
        (
            RunConfig(eval=EvalConfig(eval_datasets=(EvalDataset(name="aime", path=Path("a.jsonl"), rm_type=SUM),))),
            *("evaluation set aime", "judge", "rm_model"),
        ),
    ],
    ids=["a url", "a model", "a model of an evaluation set"],
)
def test_a_reward_model_that_calls_nothing_is_refused(config: RunConfig, by: str, name: str, setting: str) -> None:
    says = rf"^{re.escape(by)}: .*'{name}' .* {setting}[, ].*--{setting.replace('_', '-')}"
    with pytest.raises(PluginError, match=says):
        check_selection(config, activate(["rewards"]).registry, trains=False)


@pytest.mark.parametrize(
    ("name", "model", "kind"),
    [("judge", "helpr", "not served"), ("judge", "scorer", "scores"), ("served_rm", "helper", "texts")],
)
def test_an_auxiliary_model_of_the_wrong_kind_is_refused(name: str, model: str, kind: str) -> None:
    says = rf"rm_type = {name}: .*'{name}' .*rm_model = {model}: {kind}\. .*helper \(texts\), scorer \(scores\)"
    with pytest.raises(PluginError, match=says):
        check_selection(asking(name, model), activate(["rewards"]).registry, trains=False)


@pytest.mark.parametrize(("name", "model"), [("judge", "helper"), ("served_rm", "scorer")])
def test_an_auxiliary_model_of_the_right_kind_is_accepted(name: str, model: str) -> None:
    check_selection(asking(name, model), activate(["rewards"]).registry, trains=False)
