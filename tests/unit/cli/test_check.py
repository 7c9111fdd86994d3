"""``slime check``: the plan for machines that are here and that are not, and what it refuses; nothing is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.cli import preflight
from slime_core.cli.check import placement_plan
from slime_core.cli.main import main
from slime_core.cli.memory import Needs
from slime_core.config.load import load
from slime_core.errors import PlacementError
from slime_core.rollout.rollout_files import Recorded, write_rollout
from slime_core.runtime.machine import Machine
from slime_core.types import Sample, Status

CPU = Machine(cores=2, memory=10**15, shared_memory=10**15, has_gpus=False, torch="2.13.0+cpu")
GPUS = replace(CPU, cores=16, has_gpus=True, torch="2.13.0")
BILLIONS = Needs(parameters=8 * 10**9, item=2, ranks=8, copies=4, engines=4, roles=0, buffer=0)


def planned(line: str, machine: Machine = CPU, needs: Needs = BILLIONS) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return list(placement_plan(config, needs, machine))


@pytest.fixture(autouse=True)
def no_cluster_and_no_gpus_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(preflight, "_gpus_at", lambda address: None)  # none answers


def test_on_a_cpu_the_processes_share_this_machine() -> None:
    lines = planned("--actor-num-gpus-per-node 4 --pipeline-model-parallel-size 2 --rollout-num-gpus 1")
    assert "5 bundles of 0.4 CPU" in lines[0]
    assert "2 cores" in lines[1]
    assert lines[2:7] == [
        "  learner rank 0   this machine, bundle 0       tensor 0, context 0, data 0, pipeline 0",
        "  learner rank 1   this machine, bundle 1       tensor 0, context 0, data 1, pipeline 0",
        "  learner rank 2   this machine, bundle 2       tensor 0, context 0, data 0, pipeline 1",
        "  learner rank 3   this machine, bundle 3       tensor 0, context 0, data 1, pipeline 1",
        "  engine 0         this machine, bundle 4       whole",
    ]
    assert lines[-1].endswith(": distributed")


def test_check_reports_that_it_assumes_a_cluster_that_is_not_here() -> None:
    lines = planned(
        "--device cuda --actor-num-nodes 2 --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 "
        "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2"
    )
    assert "16 bundles of 1 GPU" in lines[0]
    assert "4 machines of 4 cores" in lines[1]
    assert lines[7] == "  learner rank 5   machine 1, GPU 1             tensor 1, context 0, data 2, pipeline 0"
    assert lines[13].startswith("  engine 3         machine 3, GPU 2, 3 ")


def test_colocated_engines_say_whose_gpu_they_share() -> None:
    lines = planned(
        "--ray-address auto --actor-num-nodes 2 --actor-num-gpus-per-node 2 --colocate --rollout-num-gpus 4 "
        "--rollout-num-gpus-per-engine 2"
    )
    assert [line.rpartition("learner ranks ")[2] for line in lines[6:8]] == ["0, 1", "2, 3"]
    assert lines[-1].endswith(": tensor")


def test_the_gpus_that_are_here_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert "2 GPUs" in planned("", GPUS)[1]
    with pytest.raises(PlacementError, match="has 2, 1 too few"):
        planned("--rollout-num-gpus 2", GPUS)


def test_the_environment_of_processes_on_gpus_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    found = [line for line in planned("--device cuda --sglang-enable-nccl-nvls") if line.startswith("environment")]
    variables = "NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=1"
    assert [line.partition(": ")[2] for line in found] == [f"{variables} CUDA_DEVICE_MAX_CONNECTIONS=1", variables]


def test_engines_that_only_evaluate_are_counted_and_placed() -> None:
    lines = planned("--device cuda --eval-num-gpus 2")
    assert " = 4 " in lines[0]
    placed = [line.split() for line in lines if "eval engine" in line]
    assert placed == [
        ["eval", "engine", "0", "machine", "0,", "GPU", "2", "whole,", "evaluations", "alone"],
        ["eval", "engine", "1", "machine", "0,", "GPU", "3", "whole,", "evaluations", "alone"],
    ]
    config = load(["--advantage-estimator", "toy", "--eval-num-gpus", "2"], check_rules=False).config
    assert Needs.of(config, trains=True).engines == 3


def test_check_of_a_good_run_prints_the_plan_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('[run]\nplugins = ["grpo"]\n')
    assert main(["check", "run.toml"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "plugins: core 0.1.0, datasets 0.1.0, models 0.1.0, grpo 0.1.0\n" in shown.out
    assert "estimator grpo of grpo" in shown.out
    assert "clipped of core" in shown.out
    assert "    learner rank 0 " in shown.out
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_check_prints_the_plan_before_it_says_that_this_machine_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("check", "preflight"):
        monkeypatch.setattr(f"slime_core.cli.{module}.free_resources", lambda: CPU)
    assert main(["check", "--plugin", "grpo", "--device", "cuda"]) == 2
    shown = capsys.readouterr()
    assert "1 machine of 2 cores" in shown.out
    assert "device = cuda" in shown.err
    assert "nothing was started" not in shown.out


# --- One half alone ---------------------------------------------------------------------------------------------------


TRAINED = Sample(
    group_index=0,
    index=0,
    tokens=[5, 6],
    response_length=1,
    rollout_log_probs=[-0.5],
    reward=1.0,
    status=Status.COMPLETED,
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)


def check(*words: str) -> int:
    return main(["check", "--plugin", "grpo", "--device", "cpu", *words])


def test_training_alone_is_planned_without_engines_router_and_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    for rollout in (0, 1):
        write_rollout(Path(f"{rollout}.jsonl"), Recorded(rollout, 1.0, [TRAINED]))
    assert check("--load-debug-rollout-data", "{rollout_id}.jsonl", "--num-rollout", "2") == 0
    printed = capsys.readouterr().out
    assert " = 1 bundles" in printed
    assert "learner rank 0" in printed
    assert "engine 0" not in printed
    assert "debug_train_only" in printed
    assert f"{Path.cwd()}/{{rollout_id}}.jsonl" in printed


def test_generating_alone_is_planned_without_a_learner_or_a_model_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--debug-rollout-only", "--no-plugin", "models") == 0
    printed = capsys.readouterr().out
    assert "engine 0" in printed
    assert "learner rank 0" not in printed
    assert "debug_rollout_only" in printed
    assert "plugins: core 0.1.0, cpu 0.1.0, datasets 0.1.0, grpo 0.1.0\n" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [((), "num_rollout = 80"), (("--num-rollout", "1", "--rollout-temperature", "0.5"), "rollout_temperature")],
)
def test_wrong_rollout_files_are_errors_of_the_user(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rollout(Path("0.jsonl"), Recorded(0, 1.0, [TRAINED]))
    assert check("--load-debug-rollout-data", "{rollout_id}.jsonl", *words) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors
