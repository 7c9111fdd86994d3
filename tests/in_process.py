"""A plugin of pytest for ``make quick``: leaves out tests that start a process or load a heavy library.

Nobody marks tests. A file is left out if it mentions what it would start, or a conformance suite, which runs properties
on many examples; a test that tries to start or to load something through the code that it calls ends there as skipped.
Tests on examples of Hypothesis run a tenth of them. ``make test`` runs all of it.
"""

from __future__ import annotations

import multiprocessing.process
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest

from tests.more_examples import scale_examples

EXAMPLES = 0.1
"""Share of the examples of ``make test``."""

HEAVY = ("megatron", "mbridge", "sglang", "sglang_router", "math_verify", "openai", "pyarrow")
"""Engines, Megatron, and libraries of plugins that take seconds to import or to use."""

STARTS = (
    "subprocess",
    "Popen",
    "multiprocessing",
    "RewardPool",
    "LabelSamples",
    "psutil",
    "import megatron",
    "from megatron",
    "mbridge",
    "import sglang",
    "tests.fuzz",
    "Suite",
    "slime_rewards.mathematics",
)
"""Words of test files that start processes, load those packages, try many examples, or parse hundreds of formulas."""

LOOKUPS = ("ldconfig", "gcc", "ld", "objdump", "lscpu", "uname", "file")
"""Programs by which libraries look up what the machine has, such as ``ctypes.util.find_library``; they take
milliseconds."""


_left = ""
"""Why the test that runs now is left out, if it has tried to do what it must not."""


def leave(reason: str) -> NoReturn:
    global _left
    _left = f"not quick: {reason}"
    if threading.current_thread() is threading.main_thread():
        pytest.skip(_left, allow_module_level=True)
    raise OSError(_left)  # the test hears of it from the thread, and fails


def pytest_runtest_setup() -> None:
    global _left
    _left = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Whatever became of a test that tried to, it is left out."""
    report = yield
    if _left and report.failed:
        report.outcome, report.longrepr = "skipped", ("", 0, _left)
    return report


class _NothingHeavy:
    """Finds no heavy module: a test that imports one is left out."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in HEAVY:
            leave(f"imports {fullname}")
        return None


def _guarded(start: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*arguments: Any, **options: Any) -> Any:
        words = next((one for one in (*arguments[1:], options.get("args")) if one), "")
        program = words if isinstance(words, str) else os.fspath(words[0])
        if os.path.basename(program.split(" ")[0]) not in LOOKUPS:
            leave(f"starts {program}")
        return start(*arguments, **options)

    return guarded


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Whether to leave out a file; None: others decide."""
    if not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return True if any(word in text for word in STARTS) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    scale_examples(items, EXAMPLES)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        return  # the process that starts those of pytest-xdist runs no test
    # A test that is left out midway does not close its files and sockets; `make test` finds those that nobody closes.
    for category in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::{category}")
    sys.meta_path.insert(0, _NothingHeavy())
    subprocess.Popen.__init__ = _guarded(subprocess.Popen.__init__)  # type: ignore[method-assign]
    for owner, name in ((multiprocessing.process.BaseProcess, "start"), (os, "fork"), (os, "posix_spawn")):
        setattr(owner, name, lambda *_, **__: leave("starts a process"))
