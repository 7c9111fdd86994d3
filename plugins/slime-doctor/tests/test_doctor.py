"""``slime doctor``: each check on good and bad machines, with stand-ins for what this machine lacks."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from slime_doctor import machine, self_test, software
from slime_doctor.command import main
from slime_doctor.finding import Finding
from slime_doctor.machine import GIB
from slime_doctor.software import Gpu, Torch

PINS = Path(__file__).resolve().parents[3] / "requirements/cpu.txt"
ON_CPU = Torch(cuda="", devices=[], nccl="", gloo=True)
ON_GPU = Torch(cuda="13.0", devices=["NVIDIA H100"], nccl="2.28.9", gloo=True)
H100 = Gpu(name="NVIDIA H100", total=81559, used=4, driver="580.82")


def levels(*findings: Finding) -> list[str]:
    return [finding.level for finding in findings]


# --- The machine ------------------------------------------------------------------------------------------------------


def test_every_check_of_the_machine_passes_or_has_a_next_step(tmp_path: Path) -> None:
    findings = list(machine.findings(tmp_path / "outputs"))
    assert len({finding.check for finding in findings}) == len(findings) == 9
    assert all(bool(finding.next_step) == (finding.level != "ok") for finding in findings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("check", "arguments", "expected"),
    [
        *((machine.python, ((3, minor), "Linux", "x86_64"), "ok") for minor in (11, 12)),
        *((machine.python, ((3, minor), "Linux", "x86_64"), "fail") for minor in (10, 13)),
        (machine.python, ((3, 12), "Linux", "aarch64"), "warn"),
        *((machine.cores, (2, load), level) for load, level in ((6.0, "ok"), (6.1, "warn"))),
        *((machine.memory, (size * GIB, 64 * GIB), level) for size, level in ((3, "fail"), (5, "ok"))),
        (machine.limit, ("open files", 1024, 8192, "ulimit -n"), "warn"),
        *((machine.limit, ("open files", limit, 8192, "ulimit -n"), "ok") for limit in (8192, resource.RLIM_INFINITY)),
        *((machine.disk, (Path(place),), "fail") for place in (__file__, "/proc/slime/outputs")),
        (machine.host_name, ("no-such-machine.invalid",), "warn"),
        *((software.collectives, (torch,), "ok") for torch in (ON_CPU, ON_GPU)),
        *((software.collectives, (torch,), "fail") for torch in ({**ON_GPU, "nccl": ""}, {**ON_CPU, "gloo": False})),
        (software.reachable, ({},), "ok"),
        (software.reachable, ({"SLIME_ENGINE_KEY": ""},), "warn"),
    ],
)
def test_values_that_are_too_small_or_missing_warn_or_fail(
    check: Callable[..., Finding], arguments: tuple[Any, ...], expected: str
) -> None:
    finding = check(*arguments)
    assert (finding.level, bool(finding.next_step)) == (expected, expected != "ok")


def test_the_limit_of_the_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"memory.max": str(5 * GIB), "memory.current": str(2 * GIB)}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[path.name])
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=60 * GIB))
    assert machine.available_memory() == 3 * GIB
    texts["memory.max"] = "max"
    assert machine.available_memory() == 60 * GIB


def test_shared_memory_of_a_container_s_default_size_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine.shared_memory(tmp_path / "none").level == "fail"
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(total=64 * 2**20, free=64 * 2**20))
    finding = machine.shared_memory(tmp_path)
    assert (finding.level, "--shm-size" in finding.next_step) == ("warn", True)


@pytest.mark.parametrize(("free", "level"), [(100 * GIB, "ok"), (10 * GIB, "warn"), (GIB // 2, "fail")])
def test_the_disk_is_that_of_the_nearest_folder_that_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, level: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    assert machine.disk(tmp_path / "a" / "b").level == level
    assert not (tmp_path / "a").exists()


def test_a_machine_without_free_ports_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert machine.ports().level == "fail"


# --- Packages and plugins ---------------------------------------------------------------------------------------------


def test_the_tested_versions_are_those_that_are_pinned() -> None:
    pinned = dict(line.split("==") for line in PINS.read_text().splitlines() if "==" in line)
    assert {name: pinned[name] for name in software.TESTED} == software.TESTED


@pytest.mark.parametrize(
    ("requirement", "changes", "level", "text"),
    [
        ("torch>=2.13,<2.15", {"torch": "2.13.0+cpu"}, "ok", "torch 2.13.0+cpu"),
        ("torch>=2.13,<2.15", {"torch": "2.14.0"}, "warn", "torch 2.14.0 (tested: 2.13.0)"),
        ("torch>=2.13,<2.15", {"torch": "2.12.0"}, "fail", "torch 2.12.0 (<2.15,>=2.13)"),
        ("nonesuch[default]>=2.55", {}, "fail", "nonesuch is missing (>=2.55)"),
    ],
)
def test_a_version_out_of_bounds_fails_and_one_that_was_not_tested_warns(
    requirement: str, changes: dict[str, str], level: str, text: str
) -> None:
    finding = software.versions([Requirement(requirement)], {"slime-rl": "0.1.0", **software.TESTED, **changes})
    assert (finding.level, text in finding.text) == (level, True)


def test_plugins_that_do_not_load_or_need_another_core_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert software.plugins().level == "ok"
    hook = "from slime_core import hookimpl\n@hookimpl\ndef slime_register(add): ..."
    for name, code in {"broken": "import no_such_module_at_all", "older": hook}.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: slime-rl<0.1\n"
        (folder / "METADATA").write_text(metadata)
        (folder / "entry_points.txt").write_text(f"[slime]\n{name} = {name}_plugin\n")
        (tmp_path / f"{name}_plugin.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = software.plugins()
    assert finding.level == "fail"
    assert "broken: " in finding.text
    assert "no_such_module_at_all" in finding.text
    assert "older: slime-rl 0.1.0 (<0.1)" in finding.text
    assert "grpo" not in finding.text


# --- torch, GPUs ------------------------------------------------------------------------------------------------------


def test_the_probe_sees_the_torch_that_is_installed() -> None:
    import torch

    facts = software.torch_facts()
    assert not isinstance(facts, str)
    assert (facts["gloo"], facts["cuda"]) == (True, torch.version.cuda or "")


def test_a_torch_that_does_not_load_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = software.torch_facts()
    assert "1: ImportError: libcudart.so.13" in facts
    monkeypatch.setattr(software, "plugins", lambda: Finding("plugins", "ok", ""))
    assert [finding.level for finding in software.findings(facts) if finding.check == "torch"] == ["fail"]


@pytest.mark.parametrize(
    ("torch", "gpus", "driver_cuda", "level", "text"),
    [
        (ON_CPU, [], "", "ok", "no GPU"),
        (ON_CPU, [H100], "13.0", "warn", "a torch without CUDA"),
        (ON_GPU, [H100], "13.1", "ok", "1 x NVIDIA H100, torch for CUDA 13.0, driver 580.82 for CUDA 13.1"),
        (ON_GPU, [H100], "12.8", "fail", "driver 580.82 for CUDA 12.8"),
        ({**ON_GPU, "devices": []}, [H100], "13.0", "fail", "torch sees no GPU"),
        (ON_GPU, [H100, {**H100, "used": 70000}], "13.0", "warn", "in use: [1]"),
    ],
)
def test_driver_and_torch_have_to_match(torch: Torch, gpus: list[Gpu], driver_cuda: str, level: str, text: str) -> None:
    finding = software.devices(torch, gpus, driver_cuda)
    assert (finding.level, text in finding.text) == (level, True)


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, table = "NVIDIA H100, 81559, 4, 580.82", "| NVIDIA-SMI 580.82    CUDA Version: 13.0 |"
    program = f'case "$1" in --query-gpu=*) echo "{gpu}";; *) echo "{table}";; esac'
    write_program(tmp_path / "nvidia-smi", program)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert (software.nvidia_gpus(), software.nvidia_cuda()) == ([H100], "13.0")
    write_program(tmp_path / "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    assert (software.nvidia_gpus(), software.nvidia_cuda()) == ([], "")


def test_kernels_are_compiled_by_the_toolkit_of_torchs_cuda(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "cuda")}
    assert software.build_tools("13.0", environment).level == "fail"
    for place in ("cuda/bin/nvcc", "c++", "ninja"):
        write_program(tmp_path / place, "echo 'Cuda compilation tools, release 13.0, V13.0.48'")
    assert levels(*(software.build_tools(cuda, environment) for cuda in ("13.0", "12.9"))) == ["ok", "fail"]


# --- Environment variables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, []),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, ["ok"]),
        ({"GLOO_SOCKET_IFNAME": "eth"}, ["fail"]),
        ({"NCCL_SOCKET_IFNAME": "eth"}, ["ok"]),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, ["fail"]),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, ["ok"]),
        ({"NCCL_SOCKET_IFNAME": "ib0,eth0"}, ["fail"]),
    ],
)
def test_named_interfaces_have_to_be_there(environment: dict[str, str], expected: list[str]) -> None:
    assert levels(*software.interfaces(environment, {"lo", "eth0"})) == expected


def test_who_may_command_ray(tmp_path: Path) -> None:
    joined, token = {"RAY_ADDRESS": "10.0.0.1:6379"}, tmp_path / ".ray" / "auth_token"
    environments = [{}, {"RAY_AUTH_MODE": "disabled"}, joined, joined | {"RAY_AUTH_TOKEN": "secret"}]
    assert levels(*(software.ray_token(one, tmp_path) for one in environments)) == ["ok", "warn", "warn", "ok"]
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    assert software.ray_token(joined, tmp_path).next_step == f"chmod 600 {token}"
    token.chmod(0o600)
    assert software.ray_token(joined, tmp_path).level == "ok"


def test_a_cluster_that_is_joined_has_to_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert software.reachable({"RAY_ADDRESS": address}).level == "warn"
    finding = software.reachable({"RAY_ADDRESS": address})
    assert (finding.level, address in finding.text) == ("fail", True)


# --- The self-test ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interface", "level"), [(None, "ok"), ("no-such-interface", "fail")])
def test_two_real_processes_add_up_their_numbers(
    monkeypatch: pytest.MonkeyPatch, interface: str | None, level: str
) -> None:
    if interface is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    finding = self_test.all_reduce("gloo")
    assert (finding.check, finding.level) == ("gloo all-reduce", level)
    assert (interface or "") in finding.text


def test_ranks_and_engine_share_gpus_if_there_are_few() -> None:
    assert self_test.placement(0) == ["--device", "cpu", "--actor-num-gpus-per-node", "2"]
    assert [self_test.placement(count)[:2][1] for count in (1, 2, 3)] == ["1", "2", "2"]
    assert ["--colocate" in self_test.placement(count) for count in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize(
    ("words", "text"), [(["--no-such-flag"], "--no-such-flag"), ([*self_test.DEMO, "--device", "cpu"], " 1 s")]
)
def test_a_run_that_is_refused_or_takes_too_long_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str
) -> None:
    monkeypatch.setattr(self_test, "LIMIT_S", 1 if "cpu" in words else 900)
    finding = self_test.two_rollouts(words, tmp_path / "run")
    assert (finding.level, text in finding.text) == ("fail", True)


@pytest.mark.parametrize(
    ("gradients", "addresses", "level"),
    [
        ([1.5, 2.5], {"127.0.0.1", "::"}, "ok"),
        ([1.5, 2.5], {"0.0.0.0"}, "warn"),
        ([1.5, 0], set(), "fail"),
        ([1], set(), "fail"),
    ],
)
def test_the_run_has_to_train_on_loopback(gradients: list[float], addresses: set[str], level: str) -> None:
    rows = [{"train/grad_norm": norm, "train/train_rollout_logprob_abs_diff": 1e-7} for norm in gradients]
    assert self_test.judge(rows, addresses, 40.0).level == level


@pytest.mark.long
def test_the_whole_examination_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["--json"])
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert code == int(any(row["level"] == "fail" for row in rows.values()))
    assert rows["self-test"]["level"] == "ok", rows["self-test"]
    assert "processes listened at 127.0.0.1" in rows["self-test"]["text"]
    assert list(tmp_path.iterdir()) == []


# --- The command ------------------------------------------------------------------------------------------------------


def replace_checks(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    monkeypatch.setattr(machine, "findings", lambda output: iter(findings))
    monkeypatch.setattr(software, "torch_facts", lambda: ON_CPU)
    monkeypatch.setattr(software, "findings", lambda torch: iter(()))


def test_a_check_that_fails_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_checks(monkeypatch, Finding("memory", "warn", "little", "buy more"))
    assert main(["--quick"]) == 0
    assert capsys.readouterr().out == "warn  memory           little. Next: buy more\n"
    replace_checks(monkeypatch, Finding("memory", "fail", "none", "buy some"))
    assert main(["--quick", "--json"]) == 1
    expected = {"check": "memory", "level": "fail", "text": "none", "next_step": "buy some"}
    assert json.loads(capsys.readouterr().out) == [expected]


def test_words_after_two_dashes_go_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    replace_checks(monkeypatch)
    monkeypatch.setattr(self_test, "findings", lambda gpus, words: iter(seen.extend((gpus, words)) or ()))
    assert main(["--", "--bf16", "--hf-checkpoint", "Qwen3-0.6B"]) == 0
    assert seen == [0, ["--bf16", "--hf-checkpoint", "Qwen3-0.6B"]]


def test_help_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from slime_doctor.command import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'ray', 'psutil'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
