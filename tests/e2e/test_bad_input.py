"""Mistakes, each made with the real command in a folder of its own: its message, its exit code, the files it leaves.

A row gives the content of the folder, the command, the exit code, and texts of standard error. Every message holds
what was given, what was found, what is accepted and the next step. Rows that need no engine cost less than 10 s of
a core and leave no file; the others may leave the run folder, for its logs.
"""

from __future__ import annotations

import json
import os
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

MODEL = ARITHMETIC / "model"
LIMIT_CORE_S = 10.0
"""Seconds of a core, not of a clock: the tests of a busy machine must not fail."""

MARK = "SLIME_TEST_BAD_INPUT"
"""In the environment of the command, and so in that of every process it starts."""

RUN = "run --plugin grpo --progress lines"
Prepare = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One mistake.

    Arguments:
        words: after ``slime``; ``{port}`` is one at which another program listens.
        says: texts of standard error, in this order.
        prepare: makes the files that the words name.
        code: exit code; 2: the user's mistake, 1: a failure.
        starts: processes are started before the mistake can be found; ``ray``, or ``engine`` with a log to read.
    """

    words: str
    says: tuple[str, ...]
    prepare: Prepare = lambda _: None
    code: int = 2
    starts: str = ""


def lines(*texts: str) -> Prepare:
    """``prompts.jsonl`` of these lines."""

    def prepare(folder: Path) -> None:
        (folder / "prompts.jsonl").write_text("".join(f"{text}\n" for text in texts))

    return prepare


def model(change: Callable[[Path], object] = lambda _: None, **described: Any) -> Prepare:
    """A copy of the embedded model in ``model``, with other values in its config.json, and then changed."""

    def prepare(folder: Path) -> None:
        shutil.copytree(MODEL, folder / "model")
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | described))
        change(folder / "model")

    return prepare


def of_size(bytes_: int) -> Callable[[Path], None]:
    """Weights of that many bytes; the file is sparse and takes no room on the disk."""

    def change(folder: Path) -> None:
        entry = {"dtype": "F32", "shape": [bytes_ // 4], "data_offsets": [0, bytes_]}
        header = json.dumps({"model.embed_tokens.weight": entry}).encode()
        file = folder / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(file, 8 + len(header) + bytes_)

    return change


def cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100_000)


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def together(*steps: Prepare) -> Prepare:
    def prepare(folder: Path) -> None:
        for step in steps:
            step(folder)

    return prepare


GOOD = '{"prompt": "1+2", "label": "3"}'
DATA = f"{RUN} --prompt-data prompts.jsonl --rollout-max-response-len 8"
OWN = f"{RUN} --hf-checkpoint model --rollout-max-response-len 8"
TERABYTE = 10**12

ROWS = {
    "a prompt file that is not there": Row(DATA, ("prompt_data: ", "does not exist; accepted: a prompt file")),
    "an empty prompt file": Row(
        DATA, ("prompts.jsonl holds no rows. Give a file that holds some, such as JSON Lines",), lines()
    ),
    "a line that is not JSON": Row(
        DATA,
        ("prompts.jsonl, line 3, column 12: not JSON", "Expected an object such as"),
        lines(GOOD, "", '{"prompt": }'),
    ),
    "a row without the prompt": Row(
        DATA,
        ("prompts.jsonl, line 2: no field 'prompt', found question", "--input-key"),
        lines(GOOD, '{"question": ""}'),
    ),
    "an evaluation file with a bad line": Row(
        f"{RUN} --rollout-max-response-len 8 --eval-prompt-data mine prompts.jsonl",
        ("prompts.jsonl, line 2: found list. Expected an object",),
        lines(GOOD, "[]"),
    ),
    "a prompt longer than the context": Row(
        DATA,
        (
            "prompts.jsonl, line 2: a prompt of 132 tokens",
            "together 140",
            "at most 128",
            "--rollout-max-prompt-len 120",
        ),
        lines(GOOD, json.dumps({"prompt": "1" * 130, "label": "1"})),
    ),
    "a checkpoint folder without config.json": Row(
        OWN,
        ("hf_checkpoint: ", "model holds no config.json; accepted: a Hugging Face folder"),
        lambda folder: (folder / "model").mkdir(),
    ),
    "an architecture without a model spec": Row(
        OWN,
        ("no active plugin has a model spec for architecture MambaForCausalLM", "no installed one claims it"),
        model(architectures=["MambaForCausalLM"]),
    ),
    "weights that were cut short": Row(
        OWN,
        ("hf_checkpoint: ", "is incomplete or no safetensors file", "not fully covered", "Download or copy it again"),
        model(cut),
    ),
    "a tokenizer that cannot be read": Row(
        f"{OWN} --prompt-data prompts.jsonl",
        ("the tokenizer in ", "model: reading it failed with", "Take tokenizer.json"),
        together(lines(GOOD), model(without_tokenizer)),
    ),
    "batches that do not add up": Row(
        f"{RUN} --rollout-batch-size 8 --n-samples-per-prompt 4 --global-batch-size 10 --num-steps-per-rollout 3",
        (
            "rollout_batch_size x n_samples_per_prompt = 8 x 4 = 32, but "
            "global_batch_size x num_steps_per_rollout = 10 x 3 = 30. They must be equal",
        ),
    ),
    "a layout that does not divide the ranks": Row(
        f"{RUN} --actor-num-gpus-per-node 3 --pipeline-model-parallel-size 2",
        ("= 1 x 2 x 1 = 2 ranks hold one copy of the model", "and 3 ranks are no multiple of that; give 2 ranks"),
    ),
    "a layout that does not divide the model": Row(
        f"{RUN} --actor-num-gpus-per-node 3 --tensor-model-parallel-size 3",
        ("tensor_model_parallel_size = 3 does not divide num_attention_heads = 4", "give a size that does"),
    ),
    "a port that another program uses": Row(
        f"{RUN} --ray-address 127.0.0.1:{{port}}",
        ("No Ray cluster answers at '127.0.0.1:", "ray start --head"),
        code=1,
        starts="ray",
    ),
    "GPUs on a machine without": Row(
        f"{RUN} --device cuda", ("device = cuda, but ", "accepted here: --device cpu or auto")
    ),
    "too little memory": Row(
        f"{OWN} --device cpu",
        ("memory: ", "3725.3 learner", "GiB are needed at least, and this machine has"),
        model(of_size(TERABYTE)),
    ),
    "too little shared memory": Row(
        f"{OWN} --device cpu --colocate true --update-weight-buffer-size {TERABYTE}",
        ("shared memory: ", "MiB of /dev/shm", "--shm-size", "--update-weight-buffer-size"),
        model(of_size(TERABYTE)),
    ),
    "a file where the output folder should be": Row(
        f"{RUN} --output-dir prompts.jsonl/run", ("output_dir: ", "prompts.jsonl is a file, so"), lines(GOOD)
    ),
    "an output folder that cannot be written": Row(
        f"{RUN} --output-dir /proc/slime/run", ("output_dir: /proc/slime/run", "cannot be written", "--output-dir")
    ),
    "an engine that does not come up": Row(
        f"{OWN} --prompt-data prompts.jsonl --output-dir out --sglang-json-model-override-args "
        """{{"quantization_config":{{"quant_method":"no_such_method"}}}}""",
        ("engine 0 ended with exit code", "The last lines of ", "out/logs/engine-0.log:", "no_such_method"),
        together(lines(GOOD), model()),
        code=1,
        starts="engine",
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
        ended = attempt(place, row.words.format(port=port))
    assert ended.code == row.code, ended.errors
    rest = ended.errors
    for text in row.says:
        assert text in rest, f"{text!r} is not in\n{rest}"
        rest = rest.split(text, maxsplit=1)[1]
    assert ended.errors.startswith("slime: ")
    assert "Traceback" not in ended.errors
    assert left_of(*ended.alive) == []
    assert {Path(name).parts[0] for name in ended.left} <= EXPECTED[row.starts]
    assert row.starts or ended.core_s < LIMIT_CORE_S


EXPECTED = {"": set(), "ray": {"tmp"}, "engine": {"tmp", "out"}}
"""What may be new. Ray keeps the logs of its sessions in the folder for temporary files."""


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
