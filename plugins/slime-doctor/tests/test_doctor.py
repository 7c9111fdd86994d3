"""``slime doctor``: each check on machines that are right and wrong, with stand-ins for what this machine lacks."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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


class Usage(NamedTuple):
    total: int
    used: int
    free: int


class Available(NamedTuple):
    available: int


def levels(*findings: Finding) -> list[str]:
    return [one.level for one in findings]


# --- The machine ------------------------------------------------------------------------------------------------------


def test_every_check_of_the_machine_passes_or_says_what_to_do(tmp_path: Path) -> None:
    found = list(machine.findings(tmp_path / "outputs"))
    assert len({one.check for one in found}) == len(found) == 9
    assert all(bool(one.next_step) == (one.level != "ok") for one in found)
    assert list(tmp_path.iterdir()) == []


def test_python_is_one_of_those_that_wheels_exist_for() -> None:
    found = [machine.python(version, "Linux", "x86_64") for version in ((3, 10), (3, 11), (3, 12), (3, 13))]
    assert levels(*found) == ["fail", "ok", "ok", "fail"]
    assert machine.python((3, 12), "Linux", "aarch64").level == "warn"


def test_a_busy_machine_warns() -> None:
    assert levels(machine.cores(2, 6.0), machine.cores(2, 6.1)) == ["ok", "warn"]


def test_little_memory_fails() -> None:
    assert levels(machine.memory(3 * GIB, 64 * GIB), machine.memory(5 * GIB, 64 * GIB)) == ["fail", "ok"]


def test_the_limit_of_the_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"memory.max": str(5 * GIB), "memory.current": str(2 * GIB)}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[path.name])
    monkeypatch.setattr("psutil.virtual_memory", lambda: Available(60 * GIB))
    assert machine.available_memory() == 3 * GIB
    texts["memory.max"] = "max"
    assert machine.available_memory() == 60 * GIB


def test_shared_memory_of_a_container_s_default_size_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine.shared_memory(tmp_path / "none").level == "fail"
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage(64 * 2**20, 0, 64 * 2**20))
    found = machine.shared_memory(tmp_path)
    assert found.level == "warn"
    assert "--shm-size" in found.next_step


def test_limits_warn_where_they_are_low() -> None:
    found = [machine.limit("open files", count, 8192, "ulimit -n") for count in (1024, 8192, resource.RLIM_INFINITY)]
    assert levels(*found) == ["warn", "ok", "ok"]
    assert found[0].next_step == "ulimit -n 8192"


def test_the_disk_is_that_of_the_nearest_folder_that_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = {"value": 100 * GIB}
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage(0, 0, free["value"]))
    place = tmp_path / "a" / "b"
    assert machine.disk(place).level == "ok"
    free["value"] = 10 * GIB
    assert machine.disk(place).level == "warn"
    free["value"] = GIB // 2
    assert machine.disk(place).level == "fail"
    assert not (tmp_path / "a").exists()


def test_a_file_and_a_folder_without_rights_are_no_place_for_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert machine.disk(tmp_path / "file").level == "fail"
    assert machine.disk(Path("/proc/slime/outputs")).level == "fail"


def test_a_machine_without_free_ports_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert machine.ports().level == "fail"


def test_a_name_without_address_warns() -> None:
    found = machine.host_name("no-such-machine.invalid")
    assert (found.level, "/etc/hosts" in found.next_step) == ("warn", True)


# --- Packages and plugins ---------------------------------------------------------------------------------------------


def test_the_tested_versions_are_those_that_are_pinned() -> None:
    pinned = dict(line.split("==") for line in PINS.read_text().splitlines() if "==" in line)
    assert {name: pinned[name] for name in software.TESTED} == software.TESTED


def test_a_version_out_of_bounds_fails_and_one_that_was_not_tested_warns() -> None:
    wanted = [Requirement("torch>=2.13,<2.15")]
    installed = {"slime-rl": "0.1.0", **software.TESTED, "torch": "2.13.0+cpu"}
    assert software.versions(wanted, installed).level == "ok"
    other = software.versions(wanted, installed | {"torch": "2.14.0"})
    assert (other.level, other.text) == ("warn", "torch 2.14.0 (tested: 2.13.0)")
    old = software.versions(wanted, installed | {"torch": "2.12.0"})
    assert (old.level, old.text) == ("fail", "torch 2.12.0 (<2.15,>=2.13)")
    missing = software.versions([Requirement("ray[default]>=2.55")], {})
    assert (missing.level, missing.text) == ("fail", "ray is missing (>=2.55)")


def test_a_plugin_that_does_not_load_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "broken-1.0.dist-info"
    site.mkdir()
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (site / "entry_points.txt").write_text("[slime]\nbroken = broken_plugin\n")
    (tmp_path / "broken_plugin.py").write_text("import no_such_module_at_all\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    real = software.slime

    def few(*words: str) -> subprocess.CompletedProcess[str] | str:
        found = real(*words)
        if words[1] == "list" and not isinstance(found, str):
            found.stdout = json.dumps([row for row in json.loads(found.stdout) if row["name"] in {"broken", "grpo"}])
        return found

    monkeypatch.setattr(software, "slime", few)
    found = software.plugins()
    assert found.level == "fail"
    assert found.text.startswith("broken: ")
    assert "grpo" not in found.text
    assert "no_such_module_at_all" in found.text


# --- torch, GPUs ------------------------------------------------------------------------------------------------------


def test_the_probe_sees_the_torch_that_is_installed() -> None:
    import torch

    found = software.torch_facts()
    assert not isinstance(found, str)
    assert found["gloo"] is True
    assert found["cuda"] == (torch.version.cuda or "")


def test_a_torch_that_does_not_load_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = software.torch_facts()
    assert "1: ImportError: libcudart.so.13" in found
    monkeypatch.setattr(software, "plugins", lambda: Finding("plugins", "ok", ""))
    assert [one.level for one in software.findings(found) if one.check == "torch"] == ["fail"]


@pytest.mark.parametrize(
    ("torch", "gpus", "driver_cuda", "level", "says"),
    [
        (ON_CPU, [], "", "ok", "no GPU"),
        (ON_CPU, [H100], "13.0", "warn", "a torch without CUDA"),
        (ON_GPU, [H100], "13.1", "ok", "1 x NVIDIA H100, torch for CUDA 13.0, driver 580.82 for CUDA 13.1"),
        (ON_GPU, [H100], "12.8", "fail", "driver 580.82 for CUDA 12.8"),
        ({**ON_GPU, "devices": []}, [H100], "13.0", "fail", "torch sees no GPU"),
        (ON_GPU, [H100, {**H100, "used": 70000}], "13.0", "warn", "in use: [1]"),
    ],
)
def test_driver_and_torch_have_to_match(torch: Torch, gpus: list[Gpu], driver_cuda: str, level: str, says: str) -> None:
    found = software.devices(torch, gpus, driver_cuda)
    assert (found.level, says in found.text) == (level, True)


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in --query-gpu=*) echo "NVIDIA H100, 81559, 4, 580.82";; '
        '*) echo "| NVIDIA-SMI 580.82    Driver Version: 580.82    CUDA Version: 13.0 |";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert software.nvidia_gpus() == [H100]
    assert software.nvidia_cuda() == "13.0"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert software.nvidia_gpus() == []
    assert software.nvidia_cuda() == ""


def test_gpus_need_nccl() -> None:
    assert levels(*map(software.collectives, (ON_CPU, ON_GPU))) == ["ok", "ok"]
    assert software.collectives({**ON_GPU, "nccl": ""}).level == "fail"
    assert software.collectives({**ON_CPU, "gloo": False}).level == "fail"


def test_kernels_are_compiled_by_the_toolkit_of_torchs_cuda(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "cuda")}
    assert software.build_tools("13.0", environment).level == "fail"
    for place in ("cuda/bin/nvcc", "c++", "ninja"):
        program = tmp_path / place
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n")
        program.chmod(0o755)
    assert software.build_tools("13.0", environment).level == "ok"
    assert software.build_tools("12.9", environment).level == "fail"


# --- Environment variables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),
        ("NCCL_SOCKET_IFNAME", "=eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib0,eth0", "fail"),
    ],
)
def test_named_interfaces_have_to_be_there(variable: str, value: str, level: str) -> None:
    assert levels(*software.interfaces({variable: value}, {"lo", "eth0"})) == [level]


def test_without_such_variables_nothing_is_said() -> None:
    assert list(software.interfaces({}, {"lo"})) == []


def test_who_may_command_ray(tmp_path: Path) -> None:
    joined = {"RAY_ADDRESS": "10.0.0.1:6379"}
    assert software.ray_token({}, tmp_path).level == "ok"
    assert software.ray_token({"RAY_AUTH_MODE": "disabled"}, tmp_path).level == "warn"
    assert software.ray_token(joined, tmp_path).level == "warn"
    assert software.ray_token(joined | {"RAY_AUTH_TOKEN": "secret"}, tmp_path).text == "RAY_AUTH_TOKEN"
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("secret")
    token.chmod(0o644)
    assert software.ray_token(joined, tmp_path).next_step == f"chmod 600 {token}"
    token.chmod(0o600)
    assert software.ray_token(joined, tmp_path).level == "ok"


def test_servers_are_on_loopback_and_need_a_key_unless_the_user_says_otherwise() -> None:
    assert software.reachable({}).level == "ok"
    assert software.reachable({"SLIME_ENGINE_KEY": ""}).level == "warn"


def test_a_cluster_that_is_joined_has_to_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert software.reachable({"RAY_ADDRESS": address}).level == "warn"
    found = software.reachable({"RAY_ADDRESS": address})
    assert (found.level, address in found.text) == ("fail", True)


# --- The self-test ----------------------------------------------------------------------------------------------------


def test_two_real_processes_add_up_their_numbers() -> None:
    found = self_test.all_reduce("gloo")
    assert (found.check, found.level) == ("gloo all-reduce", "ok")


def test_ranks_that_do_not_meet_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    found = self_test.all_reduce("gloo")
    assert (found.level, "no-such-interface" in found.text) == ("fail", True)


def test_ranks_and_engine_share_gpus_where_there_are_few() -> None:
    assert self_test.placement(0) == ["--device", "cpu", "--actor-num-gpus-per-node", "2"]
    assert [self_test.placement(count)[:2][1] for count in (1, 2, 3)] == ["1", "2", "2"]
    assert ["--colocate" in self_test.placement(count) for count in (1, 2, 3)] == [True, True, False]


def test_a_run_that_is_refused_says_why(tmp_path: Path) -> None:
    found = self_test.two_rollouts(["--no-such-flag"], tmp_path / "run")
    assert found.level == "fail"
    assert "--no-such-flag: no such setting" in found.text


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "LIMIT_S", 1)
    found = self_test.two_rollouts([*self_test.DEMO, "--device", "cpu"], tmp_path / "run")
    assert (found.level, found.text.startswith("not ended after 1 s")) == ("fail", True)


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
    rows = [{"train/grad_norm": one, "train/train_rollout_logprob_abs_diff": 1e-7} for one in gradients]
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


def stand_in(monkeypatch: pytest.MonkeyPatch, *found: Finding) -> None:
    monkeypatch.setattr(machine, "findings", lambda output: iter(found))
    monkeypatch.setattr(software, "torch_facts", lambda: ON_CPU)
    monkeypatch.setattr(software, "findings", lambda torch: iter(()))


def test_a_check_that_fails_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, Finding("memory", "warn", "little", "buy more"))
    assert main(["--quick"]) == 0
    assert capsys.readouterr().out == "warn  memory           little. Next: buy more\n"
    stand_in(monkeypatch, Finding("memory", "fail", "none", "buy some"))
    assert main(["--quick", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [
        {"check": "memory", "level": "fail", "text": "none", "next_step": "buy some"}
    ]


def test_words_after_two_dashes_go_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    stand_in(monkeypatch)
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
