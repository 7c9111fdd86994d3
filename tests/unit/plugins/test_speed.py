"""Installed plugins cost little: commands that read no settings load nothing heavy, however many are installed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.plugin_files import write_distribution

HEAVY = {"torch", "ray", "megatron", "sglang", "transformers", "mbridge", "numpy", "pydantic", "aiohttp"}
NUM_PLUGINS = 200
PLUGIN = """
from slime_core import Registration, hookimpl

@hookimpl
def slime_register(add: Registration) -> None:
    add.reward_model("NAME", "NAME_p.code:Length")
    add.options("NAME_p.options:Options")
"""
OPTIONS = """
from pydantic import Field
from slime_core import PluginOptions

class Options(PluginOptions):
    strength: float = Field(1.0, description="How much.")
"""
REFERENCE = ["-c", "import pydantic, pluggy, importlib_metadata"]
COMMANDS = {"help": ["--help"], "list": ["plugins", "list"]}
RUNS = 5
"""Runs of each command; the fastest counts, in seconds of CPU time, which other processes disturb least."""


def cpu_s(words: Sequence[str], environment: Mapping[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ratio(command: str, environment: Mapping[str, str]) -> float:
    """Return the CPU time of the command over that of the imports that it cannot do without."""
    words = ["-m", "slime_core", *COMMANDS[command]]
    times = [(cpu_s(words, environment), cpu_s(REFERENCE, environment)) for _ in range(RUNS)]
    return min(slime for slime, _ in times) / min(reference for _, reference in times)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """That of a process which finds compiled modules, as a user's does."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> dict[str, str]:
    """That of a process that has many plugins more."""
    folder = tmp_path_factory.mktemp("site")
    for name in (f"p{number}" for number in range(NUM_PLUGINS)):
        texts = {"__init__": "", "plugin": PLUGIN.replace("NAME", name), "options": OPTIONS}
        files = {f"{name}_p/{stem}.py": text for stem, text in texts.items()}
        write_distribution(folder, f"{name}-dist", "1.0", files, {name: f"{name}_p.plugin"})
    return {**environment, "PYTHONPATH": str(folder)}


@pytest.mark.parametrize("command", COMMANDS)
def test_many_plugins_load_nothing_heavy(crowded: dict[str, str], command: str) -> None:
    program = f"import sys; from slime_core.cli.main import main; main({COMMANDS[command]}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=crowded, text=True, capture_output=True, check=True)
    *shown, modules = done.stdout.splitlines()
    assert {name.partition(".")[0] for name in modules.split()} & HEAVY == set()
    assert "p7_p.plugin" in modules.split()
    assert "p7_p.options" not in modules.split()
    assert any("p7 " in line for line in shown) is (command == "list")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_plugins_of_this_project_cost_a_small_multiple_of_three_imports(
    environment: dict[str, str], command: str
) -> None:
    assert ratio(command, environment) < 3  # measured: 1.9


@pytest.mark.parametrize("command", COMMANDS)
def test_many_plugins_cost_little_more(crowded: dict[str, str], command: str) -> None:
    assert ratio(command, crowded) < 8  # measured: 3.3
