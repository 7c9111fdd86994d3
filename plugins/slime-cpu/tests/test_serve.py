"""Environment and arguments of a server on a CPU, and the stand-ins for missing packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_cpu.serve import STAND_INS, command, server_environment


def run(source: str) -> str:
    """What ``source`` prints in a process that sees the stand-ins."""
    command = [sys.executable, "-W", "ignore", "-c", source]
    done = subprocess.run(
        command, env={**os.environ, **server_environment()}, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("before", [None, "/mine"])
def test_the_stand_ins_come_first_on_the_path_of_a_server_alone(monkeypatch, before):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before is not None:
        monkeypatch.setenv("PYTHONPATH", before)
    expected = os.pathsep.join(filter(None, [str(STAND_INS), before]))
    assert server_environment()["PYTHONPATH"] == expected
    assert str(STAND_INS) not in sys.path


def test_a_server_for_runs_to_find_takes_the_users_arguments_last():
    program, variables = command(["--model-path", "m", "--tp-size=2", "--max-total-tokens", "64"])
    assert program[1:3] == ["-m", "_slime_server"]
    assert program[-4:] == ["m", "--tp-size=2", "--max-total-tokens", "64"]
    assert {"--device=cpu", "--max-total-tokens=32768", "--max-running-requests=256"} < set(program[:-5])
    assert variables["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in command(["--model-path", "m"])[1]


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


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        (
            "from triton.language.extra.cuda import libdevice\nimport sgl_kernel.flash_attn as f\nprint(f.__name__)",
            "sgl_kernel.flash_attn",
        ),
        (
            "from torchvision.transforms import InterpolationMode\nfrom triton.runtime.jit import JITFunction\n"
            "class Mine(JITFunction): ...\nprint(InterpolationMode.BICUBIC, isinstance(3, JITFunction))",
            "BICUBIC False",
        ),
        ("from triton.compiler import CompileError\ntry: raise CompileError\nexcept CompileError: print(3)", "3"),
        ("import triton; print(*map(triton.next_power_of_2, (0, 1, 2, 3, 64, 65)))", "0 1 2 4 64 128"),
        ("import triton; print(triton.cdiv(7, 2), triton.cdiv(8, 2))", "4 4"),
    ],
    ids=["submodules", "classes", "errors", "powers of two", "division"],
)
def test_stand_ins_are_imported_and_used(source, printed):
    assert run(source) == printed


def test_a_kernel_function_that_is_called_says_what_it_stands_for():
    assert "sgl_kernel.fp8_gemm " in run("from sgl_kernel import fp8_gemm\nfp8_gemm(1, 2)")


# --- Batched attention, beside SGLang's loop --------------------------------------------------------------------------


def test_batched_attention_equals_the_loop_over_sequences_and_leaves_none_out():
    cases = Path(__file__).with_name("attention_cases.py")
    results = json.loads(run(cases.read_text(encoding="utf-8")))
    assert len(results["differences"]) == 10
    assert {name: value for name, value in results["differences"].items() if not value < 2e-6} == {}
    assert (results["calls"], results["every"]) == (1, True)
