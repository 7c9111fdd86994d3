"""Mistakes, each made with the real command in a new folder: its message, its exit code, the files it leaves."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime_core.config.schema import ARITHMETIC
from slime_core.runtime.machine import free_resources
from tests.e2e.conftest import LIMIT_S, command
from tests.processes import left_of

LIMIT_CORE_S = 10.0
"""Seconds of a core, not of a clock: the tests of a busy machine must not fail."""

MARK = "SLIME_TEST_BAD_INPUT"
"""In the environment of the command, and so in that of every process it starts."""

Prepare = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One mistake.

    Arguments:
        words: after ``slime run --plugin grpo``; ``{port}`` is one at which another program listens.
        named: texts of standard error, in this order.
        prepare: makes the files that the words name.
        code: exit code; 2: the user's mistake, 1: a failure.
        leaves: what may be new: of a run that starts something before the mistake can be found, its logs.
    """

    words: str
    named: tuple[str, ...]
    prepare: Prepare = lambda _: None
    code: int = 2
    leaves: frozenset[str] = frozenset()


def lines(*texts: str) -> Prepare:
    """``prompts.jsonl`` of these lines."""
    return lambda folder: (folder / "prompts.jsonl").write_text("".join(f"{text}\n" for text in texts))


def model(change: Callable[[Path], object] = lambda _: None, **fields: Any) -> Prepare:
    """A good prompt file, and a changed copy of the embedded model in ``model``, with these fields in config.json."""

    def prepare(folder: Path) -> None:
        lines(GOOD)(folder)
        shutil.copytree(ARITHMETIC / "model", folder / "model")
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        change(folder / "model")

    return prepare


def terabyte(folder: Path) -> None:
    """Weights of that size; the file is sparse and takes no room on the disk."""
    size = 10**12
    entry = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + size)


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100_000)


GOOD = '{"prompt": "1+2", "label": "3"}'
LONG = json.dumps({"prompt": "1" * 130, "label": "1"})
DATA = "--prompt-data prompts.jsonl --rollout-max-response-len 8"
OWN = "--hf-checkpoint model --rollout-max-response-len 8"
BATCHES = "--rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 10 --num-steps-per-rollout 3"
EVALUATION = "--rollout-max-response-len 8 --eval-prompt-data mine prompts.jsonl"
THREE = "--actor-num-gpus-per-node 3"
SHARED = f"{OWN} --device cpu --colocate true --update-weight-buffer-size {10**12}"
QUANTISED = """--sglang-json-model-override-args {{"quantization_config":{{"quant_method":"no_such_method"}}}}"""
ENGINE = f"{OWN} --prompt-data prompts.jsonl --output-dir out {QUANTISED}"

ROWS = {
    "a prompt file that is not there": Row(DATA, ("prompts.jsonl",)),
    "an empty prompt file": Row(DATA, ("prompts.jsonl",), lines()),
    "a line that is not JSON": Row(DATA, ("prompts.jsonl, line 3, column 12: ",), lines(GOOD, "", '{"prompt": }')),
    "a row without the prompt": Row(
        DATA, ("prompts.jsonl, line 2: ", "question", "--input-key"), lines(GOOD, '{"question": ""}')
    ),
    "an evaluation file with a bad line": Row(EVALUATION, ("prompts.jsonl, line 2: ",), lines(GOOD, "[]")),
    "a prompt longer than the context": Row(
        DATA, ("prompts.jsonl, line 2: ", " 132 ", " 128", "--rollout-max-prompt-len 120"), lines(GOOD, LONG)
    ),
    "a checkpoint folder without config.json": Row(
        OWN, ("hf_checkpoint: ", "config.json"), lambda folder: (folder / "model").mkdir()
    ),
    "an architecture without a model spec": Row(OWN, ("MambaForCausalLM",), model(architectures=["MambaForCausalLM"])),
    "weights that were cut short": Row(OWN, ("hf_checkpoint: ", "not fully covered"), model(cut)),
    "a tokenizer that cannot be read": Row(
        f"{OWN} --prompt-data prompts.jsonl",
        ("tokenizer", "model: ", "tokenizer.json"),
        model(lambda folder: (folder / "tokenizer.json").write_text("{}")),
    ),
    "batches that do not add up": Row(BATCHES, ("8 x 4 = 32", "10 x 3 = 30")),
    "a layout that does not divide the ranks": Row(f"{THREE} --pipeline-model-parallel-size 2", ("1 x 2 x 1 = 2", "3")),
    "a layout that does not divide the model": Row(
        f"{THREE} --tensor-model-parallel-size 3", ("tensor_model_parallel_size = 3", "num_attention_heads = 4")
    ),
    "a port that another program uses": Row(
        "--ray-address 127.0.0.1:{port}", ("'127.0.0.1:", "ray start --head"), code=1, leaves=frozenset({"tmp"})
    ),
    "GPUs on a machine without": Row("--device cuda", ("device = cuda", "--device cpu")),
    "too little memory": Row(f"{OWN} --device cpu", ("memory: ", "3725.3 learner", "GiB"), model(terabyte)),
    "too little shared memory": Row(
        SHARED, ("shared memory: ", "/dev/shm", "--shm-size", "--update-weight-buffer-size"), model(terabyte)
    ),
    "a file where the output folder should be": Row(
        "--output-dir prompts.jsonl/run", ("output_dir: ", "prompts.jsonl"), lines(GOOD)
    ),
    "an output folder that cannot be written": Row(
        "--output-dir /proc/slime/run", ("output_dir: /proc/slime/run", "--output-dir")
    ),
    "an engine that does not come up": Row(
        ENGINE,
        ("engine 0 ", "out/logs/engine-0.log:", "no_such_method"),
        model(),
        code=1,
        leaves=frozenset({"tmp", "out"}),
    ),
}


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    errors: str
    core_s: float
    left: list[str]
    alive: list[psutil.Process]


@pytest.fixture
def place() -> Iterator[Path]:
    """A new working directory with a short name: Ray makes sockets below TMPDIR, and a socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="bad-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_a_mistake_is_explained_and_leaves_nothing(row: Row, place: Path) -> None:
    if "--device cuda" in row.words and free_resources().can_use_gpus:
        pytest.skip("this machine has GPUs")
    row.prepare(place)
    with listening() as port:
        ended = attempt(place, "run --plugin grpo --progress lines " + row.words.format(port=port))
    assert ended.code == row.code, ended.errors
    assert re.search(".*".join(map(re.escape, row.named)), ended.errors, re.DOTALL), ended.errors
    assert ended.errors.startswith("slime: ")
    assert "Traceback" not in ended.errors
    assert left_of(*ended.alive) == []
    assert {Path(name).parts[0] for name in ended.left} <= row.leaves
    assert row.leaves or ended.core_s < LIMIT_CORE_S


def attempt(place: Path, words: str) -> Ended:
    """Run the command in ``place`` and see what came of it."""
    (place / "tmp").mkdir()
    before, spent = listing(place), core_seconds()
    env = {**os.environ, MARK: place.name, "TMPDIR": str(place / "tmp")}
    env.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        command(*words.split()), cwd=place, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    left = sorted(listing(place) - before)
    return Ended(done.returncode, done.stderr, core_seconds() - spent, left, marked(place.name))


def core_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def listing(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*")}


def marked(mark: str) -> list[psutil.Process]:
    """The living processes that the command started, and what those started."""
    return [one for one in psutil.process_iter() if one.pid != os.getpid() and environment(one).get(MARK) == mark]


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


@contextmanager
def listening() -> Iterator[int]:
    """A port at which a program listens that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
