"""Each wheel of ours alone: an environment with the core, slime-datasets and slime-cpu, which every run needs here, one
plugin, the distributions that these require, and nothing else.

    python -m campaigns.alone FOLDER [DISTRIBUTION ...]      about a minute a plugin on two cores; no network

The environments are made of what this one has installed: the distributions that ``slime-rl`` requires are hard-linked
once, the further ones of a plugin into its own environment, and our wheels are built and installed. Tools that
nothing requires, such as ruff, are in none of them. In each, the installed plugins are listed, a command line that
names what the plugin offers is checked, and one is run to its end on real engines; the core and slime-grpo with
slime-models train the demo. The table that is printed is Markdown; the exit status is the number of rows that failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parents[1]
CORE, EVERYWHERE = "slime-rl", ("slime-datasets", "slime-cpu")
LIMIT_S = 900
GENERATE = "--debug-rollout-only --num-rollout 1 --rollout-batch-size 2 --n-samples-per-prompt 2"
"""A run that generates and rewards and starts no learner, so that it needs no model spec."""

PLAIN = "--advantage-estimator sft"
"""The core's own estimator, for plugins that bring none."""


@dataclass(frozen=True, slots=True)
class Case:
    """One environment.

    Arguments:
        wheels: the requested distributions; those of ours that they require come with them.
        line: what ``slime check`` and ``slime run`` are given; None: they are not called.
        says: what ``slime run`` refuses, as a pattern; None: it succeeds.
        trains: steps that the run trains; 0: it generates only.
        more: other command lines that have to succeed.
    """

    wheels: tuple[str, ...]
    line: str | None
    says: str | None = None
    trains: int = 0
    more: tuple[str, ...] = ()


DEMO = "--plugin grpo --num-rollout 2"
CASES = (
    Case((CORE,), DEMO, says="--plugin grpo: "),
    Case(("slime-grpo",), DEMO, says="Qwen3ForCausalLM"),
    Case(("slime-grpo", "slime-models"), DEMO, trains=2),
    Case(
        ("slime-agents",),
        f"{PLAIN} --generate-function tool_agent --tools tools.py:add --apply-chat-template {GENERATE}",
    ),
    Case(("slime-compat",), f"{PLAIN} --custom-rm-path rewards.py:length {GENERATE}"),
    Case(("slime-datasets",), f"{PLAIN} --prompt-data prompts.parquet --rollout-max-response-len 8 {GENERATE}"),
    Case(("slime-convert",), None, more=("convert",)),
    Case(("slime-doctor", "slime-models"), None, more=("doctor",)),
    Case(("slime-grpo",), f"--advantage-estimator grpo {GENERATE}"),
    Case(("slime-lora",), f"{PLAIN} --lora-rank 4 {GENERATE}"),
    Case(("slime-models",), f"{PLAIN} {GENERATE} --plugin models"),
    Case(("slime-offpolicy",), f"{PLAIN} --corrections tis {GENERATE}"),
    Case(("slime-plots",), f"{PLAIN} --plugin plots {GENERATE}"),
    Case(("slime-ppo",), f"--advantage-estimator ppo {GENERATE}"),
    Case(("slime-rewards",), f"{PLAIN} --rm-type math {GENERATE}"),
    Case(("slime-searchr1",), f"--plugin searchr1 --no-eval {GENERATE}"),
    Case(("slime-searchr1", "slime-models"), "--plugin searchr1 --no-eval --num-rollout 1", trains=1),
    Case(("slime-trackers",), f"{PLAIN} --plugin prometheus --prometheus.port 0 {GENERATE}"),
    Case(("slime-transformers",), f"{PLAIN} {GENERATE} --plugin transformers"),
    Case(("slime-testing",), None, more=("plugins new reward-model mine", "plugins check ./exact.py")),
)
FILES = {
    "tools.py": "def add(a: int, b: int) -> int:\n    return a + b\n",
    "rewards.py": "async def length(args, sample, **kwargs):\n    return float(len(sample.response))\n",
    "exact.py": (
        "from slime_core import hookimpl\n\n"
        "class Exact:\n"
        "    def __init__(self, options, run):\n        pass\n"
        "    async def score(self, samples):\n"
        "        return [float(sample.response == sample.label) for sample in samples]\n\n"
        "@hookimpl\n"
        "def slime_register(add):\n    add.reward_model('exact', Exact)\n"
    ),
    "rows.py": (
        "import pyarrow, pyarrow.parquet\n"
        "table = pyarrow.table({'prompt': ['1+1', '2+2', '3+3'], 'label': ['2', '4', '6']})\n"
        "pyarrow.parquet.write_table(table, 'prompts.parquet')\n"
    ),
}


def main(folder: Path, only: Iterable[str]) -> int:
    """Print the table; the number of rows in which something failed."""
    for old in (folder / "dist", *folder.glob("environment-*")):
        shutil.rmtree(old, ignore_errors=True)
    wheels = build_wheels(folder / "dist")
    base = make_base(folder)
    count = len(required([CORE])) - 1
    print(f"The core is installed with the {count} distributions that it requires and that are installed here.\n")
    print("| installed | third-party distributions | `slime plugins list` | command | `slime check` | `slime run` |")
    print("|---|---|---|---|---|---|")
    cases = [case for case in CASES if not set(only) or set(only) & set(case.wheels)]
    return sum(not row(number, case, folder, base, wheels) for number, case in enumerate(cases))


def row(number: int, case: Case, folder: Path, base: Path, wheels: dict[str, Path]) -> bool:
    """Print one line of the table; whether everything came out as it should."""
    needed = required([CORE, *EVERYWHERE, *case.wheels])
    ours, others = sorted(needed & wheels.keys()), needed - wheels.keys() - required([CORE])
    environment = folder / f"environment-{number}"
    python = make_environment(environment, base, [wheels[name] for name in ours], others)
    shell = Shell(python, environment / "work")
    cells = [", ".join(ours), ", ".join(sorted(others)) or "–", listed(shell, ours)]
    if case.line is None:
        cells += ["`slime " + "`, `slime ".join(case.more) + "`", "–", all_of(shell, case.more)]
    else:
        cells += [f"`{case.line}`", checked(shell, case), ran(shell, case)]
    print("| " + " | ".join(cells) + " |", flush=True)
    return not any("FAILED" in cell for cell in cells)


# --- What is called in an environment ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shell:
    """Calls ``slime`` of an environment in a folder of its own."""

    python: Path
    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        for name, text in FILES.items():
            (self.folder / name).write_text(text)
        self.call("rows.py")

    def slime(self, *words: str) -> subprocess.CompletedProcess[str]:
        """``slime WORDS``, to its end."""
        return self.call(str(self.python.with_name("slime")), *words)

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, to its end or for ``LIMIT_S``; it then counts as failed."""
        around = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        command = [str(self.python), *words]
        try:
            return subprocess.run(
                command,
                cwd=self.folder,
                env=around | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"not ended after {LIMIT_S} s")


def listed(shell: Shell, ours: list[str]) -> str:
    """The plugins that ``slime plugins list`` shows; they have to be those of ``ours``."""
    ended = shell.slime("plugins", "list", "--json")
    if ended.returncode:
        return failed(ended)
    found = json.loads(ended.stdout)
    names = sorted({one["distribution"] for one in found})
    right = set(names) == set(ours) - {"slime-convert", "slime-doctor", "slime-testing"}
    return ", ".join(sorted(one["name"] for one in found)) if right else f"FAILED: {names}"


def checked(shell: Shell, case: Case) -> str:
    """What ``slime check`` says."""
    return outcome(shell.slime("check", *shlex.split(case.line or "")), case)


def ran(shell: Shell, case: Case) -> str:
    """What came of ``slime run``."""
    started_s = time.monotonic()
    ended = shell.slime("run", *shlex.split(case.line or ""), "--output-dir", "run", "--progress", "lines")
    found = outcome(ended, case)
    if case.says is not None or found != "ok":
        return found
    rows = [json.loads(line) for line in (shell.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = sum("train/loss" in one for one in rows)
    generated = sum("rollout/raw_reward" in one for one in rows)
    if trained != case.trains or not generated:
        return f"FAILED: {trained} steps, {generated} rollouts"
    return f"{generated} rollouts, {trained} steps, {time.monotonic() - started_s:.0f} s"


def all_of(shell: Shell, lines: Iterable[str]) -> str:
    """Whether every command succeeded."""
    for line in lines:
        ended = shell.slime(*shlex.split(line))
        if ended.returncode:
            return failed(ended)
    return "ok"


def outcome(ended: subprocess.CompletedProcess[str], case: Case) -> str:
    """``ok``; of a command that has to be refused, what it says."""
    if case.says is None:
        return "ok" if ended.returncode == 0 else failed(ended)
    message = " ".join(ended.stderr.split())
    is_right = ended.returncode == 2 and re.search(case.says, message) and "Traceback" not in message
    return f"refused: {message.removeprefix('slime: ')}" if is_right else failed(ended)


def failed(ended: subprocess.CompletedProcess[str]) -> str:
    """The last lines that the program printed."""
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    return f"FAILED ({ended.returncode}): {' / '.join(lines[-6:])}"


# --- Environments -----------------------------------------------------------------------------------------------------


def build_wheels(folder: Path) -> dict[str, Path]:
    """The wheels of the repository, by the names of their distributions."""
    for project in (REPO, *sorted(path.parent for path in REPO.glob("plugins/*/pyproject.toml"))):
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
        subprocess.run(build, cwd=project, check=True, capture_output=True)
    return {canonicalize_name(path.name.split("-")[0]): path for path in sorted(folder.glob("*.whl"))}


def make_base(folder: Path) -> Path:
    """What the core requires, in one folder that every environment shares; made once for one set of versions."""
    names = sorted(required([CORE]))
    versions = "".join(f"{name}=={installed()[name].version}\n" for name in names)
    base = folder / f"base-{hashlib.sha256(versions.encode()).hexdigest()[:12]}"
    if not base.exists():
        shutil.rmtree(unfinished := folder / "base-unfinished", ignore_errors=True)
        link(unfinished, names)
        unfinished.rename(base)
    return base


def make_environment(folder: Path, base: Path, wheels: list[Path], others: Iterable[str]) -> Path:
    """An environment with ``base``, with ``others`` of the distributions that are installed here, and with ``wheels``;
    returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    link(site, others)
    (site / "base.pth").write_text(f"{base}\n")
    python = folder / "bin" / "python"
    install = ["install", "--quiet", "--offline", "--no-deps", "--no-index", "--python", str(python)]
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "pip", *install, *map(str, wheels)], check=True)
    return python


def link(site: Path, names: Iterable[str]) -> None:
    """Hard-link the files of installed distributions, byte code included, into ``site``; ours come as wheels."""
    for name in names:
        if name in installed() and not is_ours(name):
            for source, place in files_of(installed()[name]):
                target = site / place
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    os.link(source, target)


def files_of(distribution: Distribution) -> Iterator[tuple[Path, str]]:
    """Every file of a distribution below site-packages: where it is, and its path there."""
    for file in distribution.files or ():
        source = Path(str(distribution.locate_file(file)))
        if ".." in file.parts or not source.is_file():
            continue
        yield source, str(file)
        if source.suffix == ".py":
            for compiled in source.parent.glob(f"__pycache__/{source.stem}.*.pyc"):
                yield compiled, str(Path(str(file)).parent / "__pycache__" / compiled.name)


@cache
def installed() -> dict[str, Distribution]:
    """The distributions of this environment, by their names."""
    return {canonicalize_name(one.metadata["Name"]): one for one in distributions()}


def is_ours(name: str) -> bool:
    """Whether the repository makes the distribution."""
    return name == CORE or (REPO / "plugins" / name / "pyproject.toml").is_file()


def required(names: Iterable[str]) -> set[str]:
    """``names`` and what they require, as far as it is installed here: on a CPU, sglang's kernels are not."""
    found: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(name), "") for name in names]
    while waiting:
        name, extra = one = waiting.pop()
        if one in found or name not in installed():
            continue
        found.add(one)
        for text in installed()[name].requires or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(wanted.name), more) for more in ("", *wanted.extras)]
    return {name for name, _ in found}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
