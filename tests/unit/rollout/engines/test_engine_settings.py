"""The arguments with which servers are started."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from slime_core.cpu import serve as cpu
from slime_core.rollout.engines.engine import EngineSettings, RouterSettings, SGLangServer, start_limit_s
from slime_core.rollout.engines.server import READY

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


def test_only_a_server_on_a_cpu_skips_the_warm_up_which_compiles_kernels() -> None:
    assert "--skip-server-warmup" in EngineSettings(FOLDER, LOG).arguments()
    on_gpu = EngineSettings(FOLDER, LOG, device="cuda")
    assert "--skip-server-warmup" not in on_gpu.arguments()
    assert SGLangServer(on_gpu).probe == READY  # 503 until the warm-up is answered


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


def test_servers_listen_on_loopback_by_default() -> None:
    assert "--host=127.0.0.1" in EngineSettings(FOLDER, LOG).arguments()
    arguments = RouterSettings(LOG).arguments(port=1, metrics_port=2)
    assert {"--host=127.0.0.1", "--prometheus-host=127.0.0.1"} < set(arguments)


def test_extra_arguments_come_last_and_so_win() -> None:
    assert EngineSettings(FOLDER, LOG, extra=("--dtype=bfloat16",)).arguments()[-1] == "--dtype=bfloat16"


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
