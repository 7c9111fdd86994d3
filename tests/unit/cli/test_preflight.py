"""The preflight checks: memory, cores, GPUs and prompt files, against machines that are too small."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_core.cli import preflight as room
from slime_core.cli.memory import ENGINE_BYTES, RANK_BYTES, RUN_BYTES, SEMAPHORE_BYTES, Needs
from slime_core.cli.preflight import check_files, check_machine, machine_mistakes
from slime_core.components.selection import has_critic
from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.errors import ConfigError, DataError
from slime_core.modeling.memory import GIB
from slime_core.plugins.activation import activate
from slime_core.plugins.registry import Registry
from slime_core.runtime.machine import Machine, free_resources

LARGE = Machine(cores=64, memory=10**15, shared_memory=10**15, has_gpus=False, torch="2.13.0")
BILLION = Needs(parameters=10**9, item=4, ranks=1, copies=1, engines=1, roles=0, buffer=0)
ENOUGH = replace(LARGE, memory=BILLION.memory, shared_memory=SEMAPHORE_BYTES, cores=2)
GPUS = replace(LARGE, has_gpus=True)
NO_COMPILER = replace(LARGE, missing_build_tools=("a C++ compiler",))
FLASH = "--bf16 --flash-attention fa4"
CRITIC = 113_184 - 16 * 64
"""Parameters of the embedded model without its output layer."""


def config(line: str = "", *, estimator: str = "toy") -> RunConfig:
    return load(["--advantage-estimator", estimator, *line.split()], check_rules=False).config


def preflight(run: RunConfig, registry: Registry, *, trains: bool) -> None:
    """Both checks, as ``slime run`` and ``slime eval`` make them."""
    check_files(run, registry, trains=trains)
    check_machine(run, Needs.of(run, trains=trains, critic=trains and has_critic(run, registry)))


def test_the_embedded_run_needs_what_its_files_hold() -> None:
    needs = Needs.of(config("--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --colocate true"), trains=True)
    assert needs == Needs(parameters=113_184, item=4, ranks=4, copies=2, engines=4, roles=0, buffer=512 * 2**20)
    assert needs.shared_memory == SEMAPHORE_BYTES + 4 * 113_184
    assert replace(needs, buffer=20_000).shared_memory == SEMAPHORE_BYTES + 40_000  # one is filled, one is read
    assert Needs.of(config(), trains=False).memory == 4 * 113_184 + RUN_BYTES + ENGINE_BYTES


def test_a_critic_that_shares_the_ranks_is_a_model_and_an_optimizer_more() -> None:
    run = config("--actor-num-gpus-per-node 4 --tensor-model-parallel-size 2")
    needs = Needs.of(run, trains=True, critic=True)
    assert (needs.critic_parameters, needs.critic_ranks, needs.critic_copies) == (CRITIC, 0, 2)
    assert needs.memory == Needs.of(run, trains=True).memory + CRITIC * (2 * (4 + 4) + 8)


def test_a_separate_critic_has_processes_and_copies_of_its_own() -> None:
    line = "--critic-num-gpus 6 --critic-pipeline-model-parallel-size 2 --keep-old-actor"
    needs = Needs.of(config(line), trains=True, critic=True)
    assert (needs.critic_ranks, needs.critic_copies) == (6, 3)
    # The kept actor is no role of the critic.
    learner, critic, weights = 113_184 * (4 + 4 + 4 + 8), CRITIC * (3 * (4 + 4) + 8), 113_184 * 4
    assert needs.memory == learner + critic + weights + RUN_BYTES + 7 * RANK_BYTES + ENGINE_BYTES


@pytest.mark.parametrize(
    ("change", "bytes_"),
    [
        ({}, 4 + 4 + 8 + 4),  # weights + gradients + two moments, and the engine's weights
        ({"copies": 2}, 2 * (4 + 4) + 8 + 4),  # of weights and gradients; the moments are shared out over them
        ({"roles": 2}, 4 + 2 * 4 + 4 + 8 + 4),
        ({"item": 2}, 2 + 4 + 8 + 4 + 2),  # bfloat16 weights, float32 gradients, moments and master
        ({"copies": 0}, 4),
    ],
)
def test_the_bytes_of_a_parameter_are_counted_once_for_each_copy(change: dict[str, Any], bytes_: int) -> None:
    assert replace(BILLION, **change).memory == bytes_ * 10**9 + RUN_BYTES + RANK_BYTES + ENGINE_BYTES


@pytest.mark.parametrize(
    ("line", "machine", "names"),
    [
        ("--device cpu", replace(LARGE, memory=8 * GIB), ["20.4 GiB"]),
        ("--device cpu", replace(ENOUGH, memory=ENOUGH.memory - 1), ["memory"]),
        ("--device cpu", replace(LARGE, shared_memory=2**10), ["24.0 KiB of /dev/shm"]),
        ("--device cpu", replace(LARGE, shared_memory=None), ["/dev/shm"]),
        (
            "--device cpu --compile-pointwise",
            replace(LARGE, missing_build_tools=("a C++ compiler",)),
            ["compile_pointwise"],
        ),
        ("--device cuda", LARGE, ["no GPU driver under /dev"]),
        ("--device cuda", replace(GPUS, torch="2.13.0+cpu"), ["without CUDA"]),
        ("--device cuda", replace(GPUS, missing_build_tools=("nvcc", "ninja")), ["nvcc, ninja"]),
        (FLASH, GPUS, ["flash_attention", "flash-attn-4"]),
        (FLASH, LARGE, ["flash_attention = fa4 needs a GPU"]),
        ("--bf16 --transformer-impl transformer_engine", GPUS, ["transformer_impl", "transformer-engine"]),
    ],
)
def test_what_a_machine_lacks_is_one_mistake(line: str, machine: Machine, names: list[str]) -> None:
    (message,) = machine_mistakes(config(line), BILLION, machine)
    assert [name for name in names if name not in message] == []


@pytest.mark.parametrize(
    ("line", "machine"),
    [
        ("--device cpu", ENOUGH),
        ("--device cpu", NO_COMPILER),
        ("", replace(GPUS, memory=0)),
        (FLASH, replace(GPUS, kernel_packages=frozenset(["flash-attn-4"]))),
    ],
    ids=["just enough", "no compiler", "GPUs and little host memory", "with the package of the kernels"],
)
def test_a_machine_that_has_what_the_run_needs_is_let_pass(line: str, machine: Machine) -> None:
    assert list(machine_mistakes(config(line), BILLION, machine)) == []


def test_variables_with_which_engines_return_other_results_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    monkeypatch.setenv("SGLANG_SIMULATE_UNIFORM_EXPERTS", "false")
    with pytest.raises(ConfigError) as refused:
        check_machine(config("--device cpu"), replace(BILLION, parameters=0, buffer=0))
    named = re.findall(r"variable (\w+)", str(refused.value))
    assert named == ["SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_SIMULATE_ACC_LEN"]


def test_programs_that_compile_kernels_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
    programs = {"nvcc": "cuda/bin/nvcc", "a C++ compiler": "c++", "ninja": "environment/ninja"}
    expected = list(programs)
    for name, place in programs.items():
        assert list(free_resources().missing_build_tools) == expected
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch(mode=0o755)
        expected.remove(name)
    assert free_resources().missing_build_tools == ()


def test_the_machine_is_not_looked_at_where_another_cluster_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_resources", lambda: replace(LARGE, memory=0))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    registry = activate(["grpo", "datasets"]).registry
    with pytest.raises(ConfigError, match="- memory: "):
        preflight(config(estimator="grpo"), registry, trains=True)
    monkeypatch.setattr(room, "_gpus_at", lambda address: 0)
    preflight(config("--ray-address auto", estimator="grpo"), registry, trains=True)


def test_a_run_whose_estimator_reads_values_needs_room_for_a_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_resources", lambda: replace(LARGE, memory=0))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    registry = activate(["grpo", "ppo", "datasets"]).registry
    with pytest.raises(ConfigError, match=r"learner \+ 0\.0 critic \+"):
        preflight(config(estimator="ppo"), registry, trains=True)
    with pytest.raises(ConfigError, match="memory: ") as caught:
        preflight(config(estimator="grpo"), registry, trains=True)
    assert "critic" not in str(caught.value)


@pytest.mark.parametrize(("line", "count"), [("", 1), ("--eval-interval 2", 0)])
def test_sets_that_a_run_does_not_evaluate_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, count: int
) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text((ARITHMETIC / "data" / "held_out.jsonl").read_text())
    given = config(f"--prompt-data {mine} --eval-prompt-data mine {mine} {line}")
    check_files(given, activate(["grpo", "datasets"]).registry, trains=True)
    warnings = capsys.readouterr().err.splitlines()
    found = [one.startswith("warning: evaluation sets mine: ") for one in warnings]
    assert found == [True] * count


LONG = '{"prompt": "' + "1+" * 400 + '1=", "label": "401"}'
OTHER_WAYS = """
from slime_core import hookimpl
from slime_core.errors import DataError

@hookimpl
def slime_register(add):
    add.data_source("tables", Tables)
    add.data_source("pairs", Pairs)
    add.generate_function("short", "a:B", sends_prompts_whole=True)
    add.generate_function("summary", "a:B")

class Tables:
    def __init__(self, options, run): raise AssertionError("nothing is made before a run")
    def next_groups(self, n): ...
    def put_back(self, groups): ...
    def state(self): ...
    def restore(self, state): ...

class Pairs(Tables):
    @classmethod
    def screen(cls, options, run, screen):
        if not run.prompts.skips_bad:
            raise DataError(f"{run.prompts.path}, line 1: wrong for {screen.setting}")
        return [f"{run.prompts.vocab_size} ids"]
"""


@pytest.mark.parametrize(
    ("row", "more", "says"),
    [
        ("nonsense", "--data-source tables", None),
        ("nonsense", "--data-source pairs", "line 1: wrong for prompt_data"),
        (LONG, "--generate-function summary", None),
        (LONG, "--generate-function short", "line 1"),
    ],
)
def test_data_source_and_generate_function_decide_how_prompts_are_checked(
    row: str, more: str, says: str | None, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(OTHER_WAYS)
    (tmp_path / "prompts.jsonl").write_text(f'{row}\n{{"prompt": "1+1=", "label": "2"}}\n')
    registry = activate(["grpo", "datasets", str(tmp_path / "mine.py")]).registry
    line = f"--prompt-data {tmp_path / 'prompts.jsonl'} --rollout-max-response-len 8 {more}"
    with pytest.raises(DataError, match=says) if says else nullcontext():
        check_files(config(line), registry, trains=True)
    if "pairs" in more:
        assert check_files(config(f"{line} --on-bad-data skip"), registry, trains=True) == ["16 ids"]


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "attention_bias": True}


def test_a_checkpoint_that_the_model_spec_does_not_build_is_refused_with_all_that_it_asks_for(tmp_path: Path) -> None:
    described = json.loads((ARITHMETIC / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**described, **YARN}))
    run = config(f"--hf-checkpoint {tmp_path}", estimator="grpo")
    registry = activate(["grpo", "models"]).registry
    with pytest.raises(ConfigError) as caught:
        check_files(run, registry, trains=True)
    for name in ("'yarn'", "attention_bias", "'qwen3'", "--plugin"):
        assert name in str(caught.value)
    assert f"hf_checkpoint: {tmp_path / 'config.json'}" in str(caught.value)


SEEING = """
from slime_core import hookimpl

@hookimpl
def slime_register(add):
    add.model_spec("seeing", "a:B", architectures={"SeeingForCausalLM"}, inputs={"pixel_values"})
"""


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """A checkpoint with a processor, and prompts with an image."""
    shutil.copytree(ARITHMETIC / "model", tmp_path, dirs_exist_ok=True)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    (tmp_path / "seeing.py").write_text(SEEING)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2", "image": "cat.png"}')
    return tmp_path


def with_images(folder: Path, more: str = "") -> RunConfig:
    fields = """--multimodal-keys {"image":"image"} --apply-chat-template --rollout-max-response-len 8"""
    return config(
        f"--hf-checkpoint {folder} --prompt-data {folder / 'prompts.jsonl'} {fields} {more}", estimator="grpo"
    )


def test_images_that_a_model_is_not_handed_are_refused_before_anything_starts(photographs: Path) -> None:
    registry = activate(["grpo", "models", "datasets"]).registry
    with pytest.raises(ConfigError) as caught:
        check_files(with_images(photographs), registry, trains=True)
    found = str(caught.value)
    assert "multimodal_keys = " in found
    assert "spec 'qwen3' of plugin 'models'" in found
    (photographs / "preprocessor_config.json").unlink()  # nothing makes numbers of the images
    check_files(with_images(photographs), registry, trains=True)


def test_a_model_that_is_handed_images_takes_rows_whole(photographs: Path) -> None:
    described = json.loads((photographs / "config.json").read_text())
    (photographs / "config.json").write_text(json.dumps({**described, "architectures": ["SeeingForCausalLM"]}))
    registry = activate(["grpo", "datasets", str(photographs / "seeing.py")]).registry
    check_files(with_images(photographs), registry, trains=True)
    with pytest.raises(ConfigError) as caught:
        check_files(with_images(photographs, "--context-parallel-size 2"), registry, trains=True)
    assert "context_parallel_size = 2" in str(caught.value)


@pytest.mark.parametrize(("gpus", "found"), [(None, True), (0, False), (16, True)])
def test_auto_means_what_the_nodes_of_a_joined_cluster_have(
    monkeypatch: pytest.MonkeyPatch, gpus: int | None, found: bool
) -> None:
    monkeypatch.setattr(room, "_gpus_at", {"head:6379": gpus}.__getitem__)
    monkeypatch.setattr(room, "free_resources", lambda: LARGE)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert room.finds_gpus(None) is found
    assert room.computes_on_gpus(config()) is found
    assert room.computes_on_gpus(config("--device cuda"))
    assert room.finds_gpus("local") is LARGE.can_use_gpus
