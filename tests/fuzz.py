"""Feeds slime random bad input, in this process, and lists inputs that do not end in one clear error.

    python -m tests.fuzz [--cases 10000] [--seed 1] [--first 0] [--kind KIND]

Case N of a seed is the same in every run, so ``--first N --cases 1`` repeats a finding. A case is a finding where it
raises anything but a SlimeError, takes more than 20 s of CPU, fails without a message, or leaves a file.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from slime_core.checkpoint.folder import RunState, drafted, write_state
from slime_core.cli.main import main as slime
from slime_core.config.schema import ARITHMETIC
from slime_core.config.settings import core_settings
from slime_core.errors import SlimeError
from slime_core.rollout.engines.responses import read_answer, read_generation
from slime_core.track.ledger import JOURNAL

__all__ = ["KINDS", "findings"]

LIMIT_S = 20
"""CPU time of a case."""

LONG = "x" * 5000
TEXTS = [
    "",
    " ",
    "none",
    "..",
    "../../x",
    "/",
    "/dev/null",
    LONG,
    "é" * 300,
    "\x1b[31m",
    "{",
    "[[",
    "${HOME}",
    "a\nb",
    "-1",
]
VALUES: list[Any] = [None, True, [], {}, 0, -1, 3, 2**31, 2**70, -0.0, 0.5, 1e308, float("nan"), *TEXTS]
PROMPT = {"prompt": "1+1=", "label": "2", "metadata": {"rm_type": "exact_match"}}
REPLY = {
    "text": "2",
    "output_ids": [5, 6],
    "meta_info": {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.1, 5, None], [-0.2, 6, None]],
        "weight_versions": [{"version": "1", "start": 0, "end": 2}],
        "prompt_tokens": 3,
    },
}
LEDGER = [{"take": [[0, [0, 1]], [1, [2]]]}, {"back": [1]}, {"close": 0}]
ROWS = [{"group": 0, "index": index, "status": "completed", "reward": 1.0, "response": "2"} for index in (0, 1)]


class _LateError(BaseException):
    """A case has used its time."""


def findings(cases: range, *, seed: int, kind: str | None = None) -> Iterator[str]:
    """What went wrong, case by case."""
    kinds = list(KINDS) if kind is None else [kind]
    with tempfile.TemporaryDirectory(prefix="slime-fuzz-") as home:
        for number in cases:
            name = kinds[number % len(kinds)]
            folder = Path(home, "case")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            wrong = _outcome(KINDS[name], random.Random(f"{seed} {number}"), folder)
            if wrong:
                yield f"case {number} of seed {seed}, {name}: {wrong}"


def _outcome(kind: Callable[[random.Random, Path], list[str] | None], chance: random.Random, folder: Path) -> str:
    """What is wrong with how one case ended; empty: nothing is."""
    output, words, code, path = io.StringIO(), None, 2, list(sys.path)
    try:
        with chdir(folder), redirect_stdout(output), redirect_stderr(output), _alarm():
            words = kind(chance, folder)
            if words is None:
                return ""
            before = _files(folder)
            code = slime(words)
            if after := _files(folder) - before:
                return f"slime {_shown(words)} left {sorted(after)[:3]}"
    except SlimeError as error:
        return "" if str(error) else f"{type(error).__name__} without a message"
    except _LateError:
        return f"slime {_shown(words)} took more than {LIMIT_S} s"
    except BaseException as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"slime {_shown(words)}: {type(error).__name__}: {str(error)[:200]} ({at.filename}:{at.lineno})"
    finally:
        sys.path[:] = path
    return (
        "" if code == 0 or output.getvalue().strip() else f"slime {_shown(words)} printed nothing and returned {code}"
    )


@contextmanager
def _alarm() -> Iterator[None]:
    def end(signum: int, frame: object) -> None:
        raise _LateError

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    wall = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 30 * LIMIT_S)  # what waits uses no CPU
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, before)
        signal.signal(signal.SIGALRM, wall)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _shown(words: list[str] | None) -> str:
    return " ".join(repr(word[:60]) for word in words or [])


# --- Mutations --------------------------------------------------------------------------------------------------------


def _value(chance: random.Random) -> Any:
    value = chance.choice(VALUES)
    if chance.random() < 0.1:
        return [value] * chance.choice((1, 2, 40))
    return {"a": value} if chance.random() < 0.1 else value


def _bent(value: Any, chance: random.Random) -> Any:
    """``value`` with some of its parts replaced, removed, or added."""
    whole = [copy.deepcopy(value)]
    for _ in range(chance.choice((1, 1, 2, 5))):
        holder: Any = whole
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(holder[key], dict | list) and chance.random() < 0.75:
                holder = holder[key]
                continue
            if isinstance(holder, dict) and chance.random() < 0.2:
                del holder[key]
            else:
                holder[key] = _value(chance)
            break
    return whole[0]


def _flipped(content: bytes, chance: random.Random) -> bytes:
    """``content`` with bytes changed, cut off, or put in."""
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 3, 20))):
        place = chance.randrange(len(found) + 1)
        match chance.randrange(5):
            case 0:
                del found[place:]
            case 1:
                found[place:place] = chance.choice(
                    (b"[", b"{", b'"', b"\0", b"\xff", b"." * 50, b"9" * 5000, b"[" * 3000)
                )
            case _ if place < len(found):
                found[place] ^= 1 << chance.randrange(8)
    return bytes(found)


def _bad_json(value: Any, chance: random.Random) -> bytes:
    text = json.dumps(_bent(value, chance)).encode()
    return _flipped(text, chance) if chance.random() < 0.3 else text


# --- Kinds of cases ---------------------------------------------------------------------------------------------------


def _flags(chance: random.Random, folder: Path) -> list[str]:
    words = [chance.choice(("check", "check", "config show", "plugins trace"))]
    words = [*words[0].split(), *chance.choice(([], ["--plugin", "grpo"], ["--plugin", "ppo"]))]
    for setting in chance.sample(list(core_settings().values()), chance.choice((1, 2, 4))):
        count = chance.choice((0, 1, 1, 1, 2, 3))
        words += [setting.flag, *(_word(chance) for _ in range(count))]
    return words


def _word(chance: random.Random) -> str:
    value = _value(chance)
    return value.replace("\0", "") if isinstance(value, str) else json.dumps(value)


def _toml(chance: random.Random, folder: Path) -> list[str]:
    tables: dict[str, list[str]] = {}
    for setting in chance.sample(list(core_settings().values()), 4):
        tables.setdefault(setting.section, []).append(f"{setting.name} = {_toml_value(_value(chance))}")
    text = '[run]\nplugins = ["grpo"]\n' + "".join(
        f"[{name}]\n" + "\n".join(rows) + "\n" for name, rows in tables.items()
    )
    content = text.encode()
    (folder / "run.toml").write_bytes(_flipped(content, chance) if chance.random() < 0.5 else content)
    return [*chance.choice((["check"], ["config", "show"])), "--config", "run.toml"]


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml_value(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return '""' if value is None else str(value).lower() if isinstance(value, bool | float) else json.dumps(value)


def _prompts(chance: random.Random, folder: Path) -> list[str]:
    rows = [_bad_json(PROMPT, chance) if chance.random() < 0.5 else json.dumps(PROMPT).encode() for _ in range(3)]
    (folder / "p.jsonl").write_bytes(b"\n".join(rows))
    return _check(
        folder, ARITHMETIC / "model", *chance.choice(([], ["--apply-chat-template"], ["--metadata-key", "metadata"]))
    )


def _parquet(chance: random.Random, folder: Path) -> list[str] | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from slime_datasets.columnar import ParquetTable

    path = folder / "p.parquet"
    pq.write_table(pa.table({"prompt": ["1+1", "2+2"], "label": ["2", "4"]}), path, compression="none")
    path.write_bytes(_flipped(path.read_bytes(), chance))
    table = ParquetTable(path)
    list(table.read(0, table.total()))
    return None


def _model(chance: random.Random, folder: Path) -> list[str]:
    model = Path(shutil.copytree(ARITHMETIC / "model", folder / "model"))
    name = chance.choice(["config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "index", "header"])
    if name == "index":
        index = {"metadata": {}, "weight_map": {"lm_head.weight": "model.safetensors"}}
        (model / "model.safetensors.index.json").write_bytes(_bad_json(index, chance))
    elif name == "header":
        content = (model / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        head = _bad_json(json.loads(content[8:end]), chance)
        size = chance.choice((len(head), len(head), 2**62, 3))
        (model / "model.safetensors").write_bytes(size.to_bytes(8, "little") + head + content[end:])
    else:
        (model / name).write_bytes(_bad_json(json.loads((model / name).read_bytes()), chance))
    (folder / "p.jsonl").write_text(json.dumps(PROMPT) + "\n")
    return _check(folder, model)


def _check(folder: Path, model: Path, *more: str) -> list[str]:
    lengths = ["--rollout-max-response-len", "8", "--prompt-data", str(folder / "p.jsonl")]
    return ["check", "--plugin", "grpo", "--hf-checkpoint", str(model), *lengths, *more]


def _metadata(chance: random.Random, folder: Path) -> list[str]:
    about = folder / "acme-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_bytes(_flipped(b"Name: acme\nVersion: 1.0\nRequires-Dist: slime-rl>=0.1\n", chance))
    points = b"[slime]\nacme = acme.plugin\n[slime.flags]\nacme-x = acme:activates\n[slime.corrections]\ntis = acme\n"
    (about / "entry_points.txt").write_bytes(_flipped(points, chance))
    sys.path.append(str(folder))
    return chance.choice((["plugins", "list"], ["plugins", "list", "--json"], ["plugins", "show", "acme"], ["--help"]))


def _run_folder(chance: random.Random, folder: Path) -> list[str]:
    run = folder / "run"
    with drafted(run / "checkpoints", 1) as draft:
        (draft / "hf").symlink_to(ARITHMETIC / "model")
        write_state(draft, RunState(1, cursor={"ledger": {"journal": 0, "in_flight": [[1, [2]]], "held": []}}))
    (run / "samples").mkdir()
    (run / "config.toml").write_text('[run]\nplugins = ["grpo"]\n')
    files = {"state.json": run / "checkpoints" / "step-000001" / "state.json"}
    texts = {
        run / "samples" / JOURNAL: b"".join(json.dumps(line).encode() + b"\n" for line in LEDGER),
        run / "samples" / "train-000000.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in ROWS),
        run / "plugins.json": json.dumps({"plugins": [], "changes": []}).encode(),
        run / "metrics.jsonl": b'{"step": 0, "train/loss": 0.5}\n',
    }
    for path, text in texts.items():
        path.write_bytes(text)
    for path in chance.sample([*texts, *files.values(), run / "config.toml"], 2):
        lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
        bad = [
            _bad_json(json.loads(line), chance) if path.suffix != ".toml" else _flipped(line, chance) for line in lines
        ]
        path.write_bytes(b"\n".join([*bad, b""]))
    return chance.choice(
        (
            ["ledger", "run"],
            ["check", "--load", "run"],
            ["config", "show", "--load", "run"],
            ["eval", "run", "--eval-top-k", "x"],
        )
    )


def _reply(chance: random.Random, folder: Path) -> None:
    try:
        rows = read_answer(_bad_json(REPLY, chance))
    except ValueError:  # the client sends the request again
        return
    for row in rows:
        read_generation(row, chance.choice((None, (2, 2))))


KINDS: dict[str, Callable[[random.Random, Path], list[str] | None]] = {
    "flags": _flags,
    "toml": _toml,
    "prompts": _prompts,
    "parquet": _parquet,
    "model": _model,
    "metadata": _metadata,
    "run": _run_folder,
    "reply": _reply,
}


def main() -> int:
    """Print every finding; the exit code is 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    given = parser.parse_args()
    count = 0
    for found in findings(range(given.first, given.first + given.cases), seed=given.seed, kind=given.kind):
        count += 1
        print(found, flush=True)
    print(f"{given.cases} cases, {count} findings, {sum(os.times()[:2]):.0f} s of CPU")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
