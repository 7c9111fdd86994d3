"""The arguments with which servers are started."""

from __future__ import annotations

from pathlib import Path

from slime_core.cpu import serve as cpu
from slime_core.rollout.engines.engine import EngineSettings, RouterSettings, SGLangServer

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


def test_remote_code_runs_only_when_requested() -> None:
    assert "--trust-remote-code" not in EngineSettings(FOLDER, LOG).arguments()
    assert "--trust-remote-code" in EngineSettings(FOLDER, LOG, trust_remote_code=True).arguments()


def test_servers_listen_on_loopback_by_default() -> None:
    assert "--host=127.0.0.1" in EngineSettings(FOLDER, LOG).arguments()
    arguments = RouterSettings(LOG).arguments(port=1, metrics_port=2)
    assert {"--host=127.0.0.1", "--prometheus-host=127.0.0.1"} < set(arguments)


def test_extra_arguments_come_last_and_so_win() -> None:
    assert EngineSettings(FOLDER, LOG, extra=("--dtype=bfloat16",)).arguments()[-1] == "--dtype=bfloat16"
