"""The arguments with which servers are started, and the checkpoints that they serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slime_core.rollout.engines.engine import EngineSettings, SGLangServer, start_limit_s
from slime_core.rollout.engines.fleet import with_head_bias
from slime_cpu import serve as cpu

FOLDER = Path("model")
LOG = Path("engine.log")


def test_a_cpu_server_gets_the_stand_ins_and_a_bounded_cache() -> None:
    settings = EngineSettings(FOLDER, LOG, device="cpu", threads=2)
    assert set(cpu.server_arguments()) < set(settings.arguments())
    assert "--max-total-tokens=32768" in settings.arguments()
    assert settings.environment()["PYTHONPATH"].startswith(str(cpu.STAND_INS))
    assert settings.environment()["OMP_NUM_THREADS"] == "2"


def test_a_gpu_server_gets_nothing_of_that() -> None:
    settings = EngineSettings(FOLDER, LOG, device="cuda", tensor_parallel=4, mem_fraction=0.7)
    arguments = settings.arguments()
    assert {"--tensor-parallel-size=4", "--mem-fraction-static=0.7"} < set(arguments)
    assert not set(cpu.server_arguments()) & set(arguments)
    assert "sglang.launch_server" in SGLangServer(settings).command(1, 2)
    assert str(cpu.STAND_INS) not in settings.environment().get("PYTHONPATH", "")


def test_a_start_takes_as_long_as_the_weights_are_large(tmp_path: Path) -> None:
    assert start_limit_s(None, tmp_path) == 600
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as weights:
            weights.truncate(5 * 10**9)
    assert start_limit_s(None, tmp_path) == 620
    assert start_limit_s(30.0, tmp_path) == 30


def test_a_server_that_releases_memory_keeps_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
    settings = EngineSettings(FOLDER, LOG, device="cuda", releases_memory=True)
    assert "--enable-memory-saver" in settings.arguments()
    assert settings.environment()["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "0"


def test_remote_code_runs_only_when_requested() -> None:
    assert "--trust-remote-code" not in EngineSettings(FOLDER, LOG).arguments()
    assert "--trust-remote-code" in EngineSettings(FOLDER, LOG, trust_remote_code=True).arguments()


def served_dtype(folder: Path, device: str = "cpu", **settings: str) -> str:
    arguments = EngineSettings(folder, LOG, device=device, **settings).arguments()
    return next(argument for argument in arguments if argument.startswith("--dtype=")).partition("=")[2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": None, "text_config": {"dtype": "float32"}}, "float32"),
        ({"dtype": "float64"}, "auto"),
        ({}, "auto"),
    ],
)
def test_auto_is_the_dtype_of_the_checkpoint(tmp_path: Path, device: str, config: object, dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert served_dtype(tmp_path, device) == dtype
    assert served_dtype(tmp_path, device, dtype="bfloat16") == "bfloat16"


def test_where_the_config_states_no_dtype_auto_is_that_of_the_largest_weight(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": np.zeros((2, 2), np.float32), "b": np.zeros(5, np.int8)}, tmp_path / "model.safetensors")
    assert served_dtype(tmp_path) == "float32"


QWEN = "Qwen3ForSequenceClassification"
HEAD = {"score.weight": np.ones((1, 4), np.float32)}


def checkpoint(folder: Path, weights: dict[str, Any], architecture: str = QWEN) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    save_file({"model.norm.weight": np.ones(4, np.float32), **weights}, folder / "model.safetensors")
    return folder


def test_a_head_without_a_bias_is_served_with_one_of_zero(tmp_path):
    model = checkpoint(tmp_path / "model", HEAD)
    served = with_head_bias(model, tmp_path / "served")
    assert served == tmp_path / "served"
    found = {name: weight for file in served.glob("*.safetensors") for name, weight in load_file(file).items()}
    assert sorted(found) == ["model.norm.weight", "score.bias", "score.weight"]
    assert found["score.bias"].tolist() == [0.0]
    assert (served / "config.json").read_text() == (model / "config.json").read_text()
    assert sorted(file.name for file in model.iterdir()) == ["config.json", "model.safetensors"]


def test_a_list_of_files_names_the_added_one_and_the_checkpoint_keeps_its_own(tmp_path):
    model = checkpoint(tmp_path / "model", HEAD)
    listed = {"weight_map": {"score.weight": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(listed))
    for _ in range(2):  # a resumed run finds the folder already there
        served = with_head_bias(model, tmp_path / "served")
    content = json.loads((served / "model.safetensors.index.json").read_text())
    assert content["weight_map"] == {"score.weight": "model.safetensors", "score.bias": "model-score-bias.safetensors"}
    assert json.loads((model / "model.safetensors.index.json").read_text()) == listed


@pytest.mark.parametrize(
    ("weights", "architecture"),
    [({**HEAD, "score.bias": np.ones(1, np.float32)}, QWEN), (HEAD, "LlamaForSequenceClassification"), ({}, QWEN)],
)
def test_any_other_checkpoint_is_served_as_it_is(tmp_path, weights, architecture):
    model = checkpoint(tmp_path / "model", weights, architecture)
    assert with_head_bias(model, tmp_path / "served") == model
    assert not (tmp_path / "served").exists()
