"""Memory and cores of a machine, and the environments of its processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.engines import EngineConfig, EngineGroup, MegatronConfig, SGLangConfig
from slime_core.config.learning import WeightsConfig
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import ClusterConfig, DebugConfig, RunConfig
from slime_core.runtime import machine
from slime_core.runtime.machine import Machine, allocator_environment, nccl_environment, rank_environment


def test_the_tightest_limit_is_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, limit, used, cache in (("user/job", "100", 10, 0), ("user", "80", 20, 5), (".", "max", 700, 50)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text(f"{used}\n")
        (tmp_path / folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    assert sorted(machine._left_in_groups(tmp_path, "0::/user/job\n")) == [65, 90]
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "user")
    assert machine.free_resources().memory == 65
    monkeypatch.setattr(machine, "SHARED", tmp_path / "nothing")
    assert machine.free_resources().shared_memory is None


@pytest.mark.parametrize(
    ("has_gpus", "torch", "can"), [(True, "2.13.0", True), (True, "2.13.0+cpu", False), (False, "2.13.0", False)]
)
def test_gpus_need_a_driver_and_a_build_for_them(has_gpus: bool, torch: str, can: bool) -> None:
    assert Machine(cores=1, memory=1, shared_memory=1, has_gpus=has_gpus, torch=torch).can_use_gpus is can


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    names = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_ALGO", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS")
    for name in (*names, "OMP_WAIT_POLICY", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def flags(*given: tuple[str, Any]) -> list[RunConfig]:
    """Flags of SGLang for all engines, and for those of one group."""
    group = EngineGroup(num_gpus=1, overrides=given)
    return [RunConfig(sglang=SGLangConfig(given=given)), RunConfig(engine=EngineConfig(engine_groups=(group,)))]


OFF = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
COLOCATED = RunConfig(cluster=ClusterConfig(colocate=True))
DISK = WeightsConfig(update_weight_transport="disk")
NO_ENGINES = RunConfig(debug=DebugConfig(debug_train_only=True))


@pytest.mark.parametrize(
    ("config", "exported", "expected"),
    [
        (RunConfig(), {}, OFF),
        (RunConfig(), {"NCCL_CUMEM_ENABLE": "1"}, {**OFF, "NCCL_CUMEM_ENABLE": "1"}),
        (COLOCATED, {}, {}),
        (COLOCATED, {"NCCL_NVLS_ENABLE": "1"}, {"NCCL_NVLS_ENABLE": "1"}),
        (RunConfig(weights=DISK), {}, {}),
        (NO_ENGINES, {}, {"NCCL_ALGO": "Ring"}),
        (NO_ENGINES, {"NCCL_ALGO": "Tree"}, {"NCCL_ALGO": "Tree"}),
        *((config, {}, dict.fromkeys(OFF, "1")) for config in flags(("enable_symm_mem", True))),
        *((config, {}, {**OFF, "NCCL_NVLS_ENABLE": "1"}) for config in flags(("enable_nccl_nvls", True))),
        *((config, {}, OFF) for config in flags(("log_level", "info"))),
    ],
)
def test_ranks_and_engines_of_one_group_have_the_same_variables_of_nccl(
    unset: pytest.MonkeyPatch, config: RunConfig, exported: dict[str, str], expected: dict[str, str]
) -> None:
    for name, value in exported.items():
        unset.setenv(name, value)
    assert nccl_environment(config) == expected
    assert rank_environment(config, on_gpu=True) == {**expected, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    unset.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert rank_environment(config, on_gpu=True)["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


@pytest.mark.parametrize(("ranks", "exported", "threads"), [(2, None, "8"), (32, None, "1"), (2, "3", "3")])
def test_an_optimizer_on_the_host_gets_the_cores_of_a_node_divided_among_its_ranks(
    unset: pytest.MonkeyPatch, ranks: int, exported: str | None, threads: str
) -> None:
    unset.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    if exported is not None:
        unset.setenv("OMP_NUM_THREADS", exported)
    cluster = ClusterConfig(actor_num_gpus_per_node=ranks)
    offloaded = RunConfig(cluster=cluster, megatron=MegatronConfig(given=(("optimizer_cpu_offload", True),)))
    assert rank_environment(offloaded, on_gpu=True)["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in rank_environment(RunConfig(cluster=cluster), on_gpu=True)


def test_sglang_sets_both_where_they_are_unset() -> None:
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).with_name("srt").joinpath("entrypoints", "engine.py").read_text()
    assert all(f'"{name}" not in os.environ' in source for name in OFF)


def test_on_a_cpu_ranks_see_no_gpu_and_threads_sleep_where_generation_shares_it(unset: pytest.MonkeyPatch) -> None:
    environment = rank_environment(RunConfig(), on_gpu=False)
    assert environment == {"OMP_NUM_THREADS": environment["OMP_NUM_THREADS"], "CUDA_VISIBLE_DEVICES": ""}
    ahead = RunConfig(rollout=RolloutConfig(async_buffer_size=1))
    assert rank_environment(ahead, on_gpu=False)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in rank_environment(ahead, on_gpu=True)
    unset.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert rank_environment(ahead, on_gpu=False)["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("expandable_segments:True", "expandable_segments:False"),
        ("max_split_size_mb:64,expandable_segments: true", "max_split_size_mb:64,expandable_segments: False"),
        ("expandable_segments:False", None),
        ("max_split_size_mb:64", None),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_processes_that_share_gpus_get_no_expandable_segments(
    unset: pytest.MonkeyPatch, name: str, value: str, expected: str | None
) -> None:
    unset.setenv(name, value)
    assert allocator_environment(COLOCATED) == ({name: expected} if expected else {})
    assert rank_environment(COLOCATED, on_gpu=True).get(name) == expected
    assert name not in rank_environment(RunConfig(), on_gpu=True)
    assert allocator_environment(RunConfig()) == {}
    # A learner that writes files keeps its allocator.
    files = RunConfig(cluster=ClusterConfig(colocate=True), weights=DISK)
    assert name not in rank_environment(files, on_gpu=True)
    assert allocator_environment(files).get(name) == expected
