"""Memory and cores of a machine, read from /proc and cgroup files that the tests write."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import psutil
import pytest

from slime_core.config.engines import EngineConfig, EngineGroup, MegatronConfig, SGLangConfig
from slime_core.config.learning import WeightsConfig
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import ClusterConfig, DebugConfig, RunConfig
from slime_core.runtime import machine
from slime_core.runtime.machine import (
    Machine,
    allocator_environment,
    free_resources,
    nccl_environment,
    rank_environment,
)


def group(folder: Path, *, limit: str, used: int, cache: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    return folder


def test_a_limit_leaves_what_is_below_it_and_the_cache_of_files(tmp_path: Path) -> None:
    group(tmp_path, limit="1000", used=700, cache=50)
    assert machine._left_in_groups(tmp_path, "0::/\n") == [350]


def test_every_group_around_the_process_counts(tmp_path: Path) -> None:
    group(tmp_path / "user" / "job", limit="100", used=10, cache=0)
    group(tmp_path / "user", limit="80", used=20, cache=0)
    assert sorted(machine._left_in_groups(tmp_path, "0::/user/job\n")) == [60, 90]


def test_no_limit_is_no_number(tmp_path: Path) -> None:
    group(tmp_path, limit="max", used=700, cache=50)
    assert machine._left_in_groups(tmp_path, "0::/\n") == []
    assert machine._left_in_groups(tmp_path / "nothing", "") == []


def test_a_machine_without_limits_has_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "nothing")
    assert 0 < machine.free_resources().memory <= psutil.virtual_memory().total


def test_the_tightest_limit_is_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", group(tmp_path, limit="1000", used=700, cache=50))
    assert free_resources().memory == 350


def test_shared_memory_that_is_not_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._free(tmp_path) > 0  # type: ignore[operator]
    monkeypatch.setattr(machine, "SHARED", tmp_path / "nothing")
    assert free_resources().shared_memory is None


@pytest.mark.parametrize(
    ("has_gpus", "torch", "can"), [(True, "2.13.0", True), (True, "2.13.0+cpu", False), (False, "2.13.0", False)]
)
def test_gpus_need_a_driver_and_a_build_for_them(has_gpus: bool, torch: str, can: bool) -> None:
    found = Machine(cores=1, memory=1, shared_memory=1, has_gpus=has_gpus, torch=torch)
    assert found.can_use_gpus is can


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (
        "NCCL_CUMEM_ENABLE",
        "NCCL_NVLS_ENABLE",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "NCCL_ALGO",
        "OMP_NUM_THREADS",
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_ranks_and_engines_have_the_values_that_sglang_sets_where_nothing_is_exported(unset) -> None:
    assert nccl_environment(RunConfig()) == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    found = rank_environment(RunConfig(), on_gpu=True)
    assert found == {**nccl_environment(RunConfig()), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_what_the_user_exports_counts_for_both(unset) -> None:
    unset.setenv("NCCL_CUMEM_ENABLE", "1")
    unset.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert nccl_environment(RunConfig())["NCCL_CUMEM_ENABLE"] == "1"
    assert rank_environment(RunConfig(), on_gpu=True)["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(cluster=ClusterConfig(colocate=True)),
        RunConfig(weights=WeightsConfig(update_weight_transport="disk")),
        RunConfig(debug=DebugConfig(debug_train_only=True)),
    ],
    ids=["tensor", "disk", "no engines"],
)
def test_ranks_that_share_no_group_with_engines_keep_the_defaults_of_nccl(unset, config: RunConfig) -> None:
    ring = {"NCCL_ALGO": "Ring"} if config.is_deterministic else {}
    assert nccl_environment(config) == ring
    unset.setenv("NCCL_NVLS_ENABLE", "1")
    assert nccl_environment(config) == {"NCCL_NVLS_ENABLE": "1"} | ring


@pytest.mark.parametrize(
    ("flag", "expected"), [("enable_symm_mem", ("1", "1")), ("enable_nccl_nvls", ("0", "1")), ("log_level", ("0", "0"))]
)
def test_flags_of_any_engine_that_make_sglang_set_them_count_for_both(unset, flag: str, expected) -> None:
    value = "info" if flag == "log_level" else True
    group = EngineGroup(num_gpus=1, overrides=((flag, value),))
    for config in (
        RunConfig(sglang=SGLangConfig(given=((flag, value),))),
        RunConfig(engine=EngineConfig(engine_groups=(group,))),
    ):
        assert tuple(nccl_environment(config).values()) == expected


def test_ranks_of_a_deterministic_run_sum_along_a_ring(unset) -> None:
    config = RunConfig(debug=DebugConfig(debug_train_only=True))
    assert rank_environment(config, on_gpu=True)["NCCL_ALGO"] == "Ring"
    unset.setenv("NCCL_ALGO", "Tree")
    assert rank_environment(config, on_gpu=True)["NCCL_ALGO"] == "Tree"


@pytest.mark.parametrize(("ranks", "exported", "threads"), [(2, None, "8"), (32, None, "1"), (2, "3", "3")])
def test_an_optimizer_on_the_host_gets_the_cores_of_a_node_divided_among_its_ranks(
    unset, ranks: int, exported: str | None, threads: str
) -> None:
    unset.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    if exported is not None:
        unset.setenv("OMP_NUM_THREADS", exported)
    cluster = ClusterConfig(actor_num_gpus_per_node=ranks)
    offloaded = RunConfig(cluster=cluster, megatron=MegatronConfig(given=(("optimizer_cpu_offload", True),)))
    assert rank_environment(offloaded, on_gpu=True)["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in rank_environment(RunConfig(cluster=cluster), on_gpu=True)


def test_a_run_on_the_cpu_sees_no_gpu() -> None:
    found = rank_environment(RunConfig(), on_gpu=False)
    assert found.keys() == {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"}
    assert found["CUDA_VISIBLE_DEVICES"] == ""


def test_sglang_sets_both_where_they_are_unset() -> None:
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).with_name("srt").joinpath("entrypoints", "engine.py").read_text()
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        assert f'"{name}" not in os.environ' in source


def test_threads_sleep_where_generation_and_training_share_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    ahead = RunConfig(rollout=RolloutConfig(async_buffer_size=1))
    assert rank_environment(ahead, on_gpu=False)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in rank_environment(ahead, on_gpu=True)
    assert "OMP_WAIT_POLICY" not in rank_environment(RunConfig(), on_gpu=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert rank_environment(ahead, on_gpu=False)["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize(
    ("value", "changed"),
    [
        ("expandable_segments:True", "expandable_segments:False"),
        ("max_split_size_mb:64,expandable_segments: true", "max_split_size_mb:64,expandable_segments: False"),
        ("expandable_segments:True,garbage_collection_threshold:0.8", None),
        ("expandable_segments:False", ""),
        ("max_split_size_mb:64", ""),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_processes_that_share_gpus_get_no_expandable_segments(
    name: str, value: str, changed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    colocated = RunConfig(cluster=ClusterConfig(colocate=True))
    expected = value.replace("True", "False") if changed is None else changed
    assert allocator_environment(colocated) == ({name: expected} if expected else {})
    assert rank_environment(colocated, on_gpu=True).get(name) == (expected or None)
    assert name not in rank_environment(RunConfig(), on_gpu=True)
    assert allocator_environment(RunConfig()) == {}


def test_a_colocated_learner_that_writes_files_keeps_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    weights = WeightsConfig(update_weight_transport="disk")
    config = RunConfig(cluster=ClusterConfig(colocate=True), weights=weights)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in rank_environment(config, on_gpu=True)
    assert allocator_environment(config) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}
