"""What slime says of command lines that it refuses, stored in ``messages.txt`` and read as a diff.

    settings    lines of ``refused.txt``: what is wrong with settings; only plugins that flags mean are active
    commands    command lines of ``cases.toml`` that are refused, as a user gives them
    inputs      files and folders that are wrong, of ``tests/e2e/test_bad_input.py``, as far as no process is started
                and the message does not depend on the machine

``python -m tests.golden.messages --write`` stores what the code says now; read the difference before committing it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).parent
REPO = HERE.parents[1]
REFUSED = HERE / "refused.txt"
STORED = HERE / "messages.txt"
EXPLAIN = "slime config explain KEY says what a setting does and accepts."
"""Ends every report; stored without it."""

OF_THE_MACHINE = {
    "GPUs on a machine without",
    "too little memory",
    "too little shared memory",
}
"""Inputs of which the message names what the machine has."""

NOT_CHECKED = {"a file where the output folder should be", "an output folder that cannot be written"}
"""Inputs that only ``slime run`` looks at, when it makes its folder."""


def lines() -> list[str]:
    """The lines of ``refused.txt``."""
    return [line for line in REFUSED.read_text().splitlines() if line and not line.startswith("#")]


def messages() -> dict[str, str]:
    """Command line -> what slime says of it."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name)
        shutil.copytree(HERE / "files", folder, dirs_exist_ok=True)
        model = next(REPO.glob("slime_core/**/model/model.safetensors")).parent
        places = {str(folder.resolve()): "<files>", name: "<files>", str(model): "<model>", str(REPO): "<repo>"}
        found = dict(_of_settings(model))
        found |= dict(_of_commands(model))
        found |= dict(_of_inputs(folder))
        return {line: _without_places(text, places) for line, text in found.items()}


def _of_settings(model: Path) -> Iterator[tuple[str, str]]:
    from slime_core.config.load import load, peek
    from slime_core.errors import ConfigError
    from slime_core.plugins.activation import activate

    for line in lines():
        argv = [*shlex.split(line.replace("{model}", str(model))), "--advantage-estimator", "toy"]
        try:
            load(argv, **activate([], flags=peek(argv).flags).for_settings)
        except ConfigError as refusal:
            yield line, str(refusal)
        else:
            yield line, "is accepted"


def _of_commands(model: Path) -> Iterator[tuple[str, str]]:
    stored = json.loads((HERE / "settings.json").read_text())["cases"]
    for group, cases in tomllib.loads((HERE / "cases.toml").read_text()).items():
        for name, line in cases.items():
            if stored[f"{group}.{name}"].get("refused"):
                yield f"slime check {' '.join(line.split())}", _check(line.format(repo=REPO, model=model))


def _of_inputs(folder: Path) -> Iterator[tuple[str, str]]:
    from tests.e2e.test_bad_input import ROWS

    for number, (name, row) in enumerate(ROWS.items()):
        if row.starts or name in OF_THE_MACHINE | NOT_CHECKED:
            continue
        place = folder / f"input-{number}"
        place.mkdir()
        row.prepare(place)
        with contextlib.chdir(place):
            line = row.words.removeprefix("run ").replace("--progress lines ", "")
            yield f"slime check {line}  # {name}", _check(line).replace(str(place), "<files>")


def _check(line: str) -> str:
    from slime_core.cli.main import main

    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main(["check", *shlex.split(line)])
    return errors.getvalue() if code else "is accepted"


def _without_places(text: str, places: Mapping[str, str]) -> str:
    for place, name in places.items():
        text = text.replace(place, name)
    return "\n".join(line for line in text.strip().splitlines() if line != EXPLAIN)


def text_of(found: Mapping[str, str]) -> str:
    """The stored form: each command line, followed by its message, indented."""
    blocks = []
    for line, message in found.items():
        blocks.append("\n".join([line, *(f"    {one}".rstrip() for one in message.splitlines())]))
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    text = text_of(messages())
    if "--write" in sys.argv:
        STORED.write_text(text)
    else:
        print(text, end="")
