"""Environment and arguments of a server on a CPU, and the stand-ins for missing packages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slime_core.cpu.serve import STAND_INS, command, server_arguments, server_environment


def run(source: str) -> str:
    """What ``source`` prints in a process that sees the stand-ins."""
    command = [sys.executable, "-c", source]
    done = subprocess.run(
        command, env={**os.environ, **server_environment()}, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_the_stand_ins_come_first_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert server_environment()["PYTHONPATH"] == f"{STAND_INS}{os.pathsep}/mine"


def test_the_path_ends_with_the_stand_ins_where_nothing_was_set(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert server_environment()["PYTHONPATH"] == str(STAND_INS)


def test_the_server_is_started_on_the_cpu():
    assert "--device=cpu" in server_arguments()


def test_a_server_for_runs_to_find_takes_the_users_arguments_last():
    program, variables = command(["--model-path", "m", "--tp-size=2", "--max-total-tokens", "64"])
    assert program[1:3] == ["-m", "_slime_server"]
    assert program[-4:] == ["m", "--tp-size=2", "--max-total-tokens", "64"]
    assert {"--device=cpu", "--max-total-tokens=32768", "--max-running-requests=256"} < set(program[:-5])
    assert variables["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in command(["--model-path", "m"])[1]


def test_this_process_does_not_see_the_stand_ins():
    assert str(STAND_INS) not in sys.path


@pytest.mark.parametrize(
    "decoration",
    [
        "@triton.jit",
        "@triton.jit(do_not_specialize=['n'])",
        "@triton.autotune(configs=[triton.Config({}, num_warps=4)], key=['n'])",
        "@triton.heuristics({'n': lambda _: 1})",
        "@triton.experimental.gluon.jit",
        "@tl.core.builtin",
    ],
)
def test_kernels_can_be_defined(decoration):
    source = (
        f"import triton, triton.language as tl\n{decoration}\ndef kernel(n: tl.constexpr): return n\nprint(kernel(3))"
    )
    assert run(source) == "3"


def test_a_kernel_function_that_is_called_says_what_it_stands_for():
    out = run("from sgl_kernel import fp8_gemm\nfp8_gemm(1, 2)")
    assert "sgl_kernel.fp8_gemm " in out


def test_every_submodule_can_be_imported():
    source = "from triton.language.extra.cuda import libdevice\nimport sgl_kernel.flash_attn as f\nprint(f.__name__)"
    assert run(source) == "sgl_kernel.flash_attn"


def test_classes_can_be_subclassed_and_their_members_read():
    source = (
        "from torchvision.transforms import InterpolationMode\nfrom triton.runtime.jit import JITFunction\n"
        "class Mine(JITFunction): ...\nprint(InterpolationMode.BICUBIC, isinstance(3, JITFunction))"
    )
    assert run(source) == "BICUBIC False"


def test_error_classes_can_be_caught():
    source = "from triton.compiler import CompileError\ntry: raise CompileError\nexcept CompileError: print('caught')"
    assert run(source) == "caught"


@pytest.mark.parametrize(("number", "power"), [(0, 0), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_the_next_power_of_two(number, power):
    assert run(f"import triton; print(triton.next_power_of_2({number}))") == str(power)


def test_division_rounds_up():
    assert run("import triton; print(triton.cdiv(7, 2), triton.cdiv(8, 2))") == "4 4"
