"""``slime check``: the plan for machines that are here and that are not, and what it refuses; nothing is started."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.cli import preflight
from slime_core.cli.activation import with_leading_config
from slime_core.cli.check import expected_machines, layout_of, placement_plan
from slime_core.cli.main import main
from slime_core.cli.memory import Needs
from slime_core.config.load import load
from slime_core.config.settings import as_toml
from slime_core.errors import PlacementError
from slime_core.runtime.machine import Machine

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


def test_check_run_and_eval_warn_of_prompts_that_the_tokenizer_does_not_know(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "What is 2 + 2?", "label": "4"}\n' * 40)
    mine = str(tmp_path / "mine.jsonl")
    monkeypatch.setattr(preflight, "free_resources", lambda: replace(CPU, memory=0))
    blocked = ["--device", "cpu"]  # refused after the prompts were looked at
    own = ["--eval-prompt-data", "own", mine]
    assert main(["check", "--plugin", "grpo", "--prompt-data", mine, *own, "--eval-interval", "5"]) == 2
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert all(f"{mine}: 69%" in warning for warning in warnings)
    assert main(["run", "--plugin", "grpo", "--prompt-data", mine, *blocked]) == 2
    assert "69%" in capsys.readouterr().err
    assert main(["eval", *own, "--rollout-max-response-len", "8", *blocked]) != 0
    assert "69%" in capsys.readouterr().err


def test_check_reports_that_it_assumes_a_cluster_that_is_not_here() -> None:
    lines = planned(
        "--device cuda --actor-num-nodes 2 --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 "
        "--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2"
    )
    assert "16 bundles of 1 GPU" in lines[0]
    assert "4 machines of 4 cores" in lines[1]
    assert lines[7] == "  learner rank 5   machine 1, GPU 1             tensor 1, context 0, data 2, pipeline 0"
    assert lines[13].startswith("  engine 3         machine 3, GPU 2, 3 ")


def test_ten_machines_are_listed_in_order() -> None:
    lines = planned("--device cuda --actor-num-nodes 11 --actor-num-gpus-per-node 1 --rollout-num-gpus 1")
    assert lines[4].startswith("  learner rank 2   machine 2, GPU 0")
    assert lines[13].startswith("  engine 0         machine 11, GPU 0")


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


def test_a_small_run_of_one_node_is_taken_to_fit_one_machine() -> None:
    config = load(["--device", "cuda", "--rollout-num-gpus", "3"], check_rules=False).config
    assert "1 machine of 4 cores" in str(expected_machines(config, layout_of(config, CPU), CPU))


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


def test_a_run_without_a_learner_starts_no_critic() -> None:
    lines = planned("--debug-rollout-only --critic-num-gpus 2")
    assert " = 1 bundles" in lines[0]


def test_a_leading_file_is_the_config() -> None:
    assert with_leading_config(["run.toml", "--lr", "1"]) == ["--config", "run.toml", "--lr", "1"]
    assert with_leading_config(["--lr", "1"]) == ["--lr", "1"]


def test_check_of_a_good_run_prints_the_plan_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('[run]\nplugins = ["grpo"]\n')
    assert main(["check", "run.toml"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "plugins: core 0.1.0, grpo " in shown.out
    assert "estimator grpo of grpo" in shown.out
    assert "clipped of core" in shown.out
    assert "    learner rank 0 " in shown.out
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_check_says_all_mistakes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--plugin", "grpo", "--lr", "fast", "--tensor-model-parallel-size", "3"]) == 2
    message = capsys.readouterr().err
    assert "--lr: found 'fast'" in message
    assert "tensor_model_parallel_size = 3" in message


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


@pytest.mark.parametrize(
    ("flags", "says"), [(["--allow-plugin-change"], "allow_plugin_change"), (["--load", "nowhere"], "nowhere")]
)
def test_check_refuses_what_a_run_could_not_continue(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--plugin", "grpo", *flags]) == 2
    assert says in capsys.readouterr().err


def test_a_layout_that_no_machine_holds_is_a_user_s_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slime_core.cli.check.free_resources", lambda: GPUS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert main(["check", "--plugin", "grpo"]) == 2
    assert "2 GPUs" in (capsys.readouterr().err)


@pytest.mark.parametrize("command", ["check", "run"])
def test_an_option_that_config_toml_cannot_hold_is_refused_before_there_is_a_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Judged after registration has accepted the options.
    monkeypatch.setattr(f"slime_core.cli.{command}.to_toml", lambda resolved: as_toml(object()))
    assert main([command, "--plugin", "grpo"]) == 2
    assert "config.toml" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_check_imports_the_heavy_targets_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from slime_core import *\n"
        "@hookimpl\ndef slime_register_advantage_estimators():\n"
        "    yield Component('flat', target=f'{__name__}:Flat', traits=AdvantageTraits(policy_loss='steep'))\n"
        "@hookimpl\ndef slime_register_policy_losses():\n"
        "    yield Component('steep', target=f'{__name__}:Steep')\n"
        "class Flat:\n    def __init__(self, options, run): ...\n    def estimate(self, batch): ...\n"
        "class Steep:\n    def __init__(self, options, run): ...\n"
    )
    assert main(["check", "--plugin", str(mine), "--advantage-estimator", "flat"]) == 2
    assert "PolicyLoss" in capsys.readouterr().err


def test_check_loads_no_ray_and_no_engine() -> None:
    code = """
import sys
from slime_core.cli.main import main
assert main(["check", "--plugin", "grpo"]) == 0
print([name for name in ("ray", "sglang") if name in sys.modules])"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"
