"""The resolved settings and the selected components of many command lines, stored by flag in ``settings.json``.

Commands are run as a user runs them (``slime config show``, ``slime check``) and start nothing. Values are stored by
the flag's spelling, not by section, because settings may move between sections and to the options of plugins, where
their flags stay. ``base`` holds the values of ``BASE`` that are no defaults, and its components; each case, on a line,
what differs from it. The defaults themselves are in ``docs/settings.md``.

``python -m tests.golden.settings --write`` stores what the code does now; read the difference before committing it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import tomllib
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slime_core.config.settings import plugin_settings
from slime_core.plugins.registry import load_plugins

HERE = Path(__file__).parent
REPO = HERE.parents[1]
STORED = HERE / "settings.json"
OWNED_BY_ENGINE = {"megatron": "", "sglang": "sglang-"}
"""Section of an engine -> what stands before the names of its flags."""
BASE = "--plugin grpo"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command resolves to: flag -> value, without defaults, and components as ``slime check`` prints them."""

    settings: dict[str, Any]
    components: list[str]

    def since(self, base: Outcome) -> dict[str, Any]:
        """Return what differs from ``base``; settings of ``base`` that are at their default here are in ``default``."""
        changes = {
            "settings": {key: value for key, value in self.settings.items() if base.settings.get(key) != value},
            "default": sorted(base.settings.keys() - self.settings.keys()),
            "with": sorted(set(self.components) - set(base.components)),
            "without": sorted(set(base.components) - set(self.components)),
        }
        return {key: value for key, value in changes.items() if value}


def resolve_all() -> dict[str, Any]:
    """Return the stored form: ``base``, and ``cases`` by name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copytree(HERE / "files", folder, dirs_exist_ok=True)
        _write_parquet(Path(folder))
        (Path(folder) / "inbox").mkdir()
        places = {str(Path(folder).resolve()): "<files>", folder: "<files>", str(REPO): "<repo>"}
        model = next(REPO.glob("slime_core/**/model/model.safetensors")).parent
        base = _outcome(shlex.split(BASE), places)
        cases = {}
        for group, lines in tomllib.loads((HERE / "cases.toml").read_text()).items():
            for name, line in lines.items():
                argv = shlex.split(line.format(repo=REPO, model=model))
                cases[f"{group}.{name}"] = _outcome(argv, places).since(base)
    return {"base": asdict(base), "cases": cases}


def _outcome(argv: list[str], places: dict[str, str]) -> Outcome:
    """Return what the command resolves to; ``slime check`` has to accept it."""
    code, printed = _slime("check", *argv)
    assert code == 0, printed
    components = sorted(re.findall(r"^  (\S.*) of \S+, by ", printed, re.MULTILINE))
    _, shown = _slime("config", "show", *argv)
    settings = [(flag, _without_places(value, places)) for flag, value in _changed(shown)]
    assert len(dict(settings)) == len(settings), "a flag is shown twice"
    return Outcome(dict(sorted(settings)), components)


def _slime(*argv: str) -> tuple[int, str]:
    from slime_core.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(argv)
    return code, out.getvalue()


def _changed(shown: str) -> list[tuple[str, Any]]:
    """(flag without dashes, value) of each line of ``slime config show`` that is no default."""
    found, section = [], ""
    for line in shown.splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
        elif (match := re.fullmatch(r"(?:# )?(\w+) = (.*)  # (.*)", line)) and match[3].split(";")[0] != "default":
            found.append((_flag(section, match[1]), tomllib.loads(f"value = {match[2]}")["value"]))
    return found


@cache
def _flags() -> dict[tuple[str, str], str]:
    """Return (plugin, option) -> its flag, for all installed plugins."""
    settings = plugin_settings(load_plugins().options)
    return {(setting.section, setting.name): setting.flag.removeprefix("--") for setting in settings.values()}


def _flag(section: str, name: str) -> str:
    """As the command line spells it; some options of plugins have a flag of their own."""
    flat = name.replace("_", "-")
    if section in OWNED_BY_ENGINE:
        return OWNED_BY_ENGINE[section] + flat
    return _flags().get((section, name), flat)


def _without_places(value: Any, places: dict[str, str]) -> Any:
    text = json.dumps(value)
    for place, name in places.items():
        text = text.replace(place, name)
    return json.loads(text)


def _write_parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")


def text_of(resolved: dict[str, Any]) -> str:
    """The stored form, with a line for each case."""
    cases = ",\n".join(f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in resolved["cases"].items())
    base = json.dumps(resolved["base"], indent=1).replace("\n", "\n ")
    return f'{{\n "base": {base},\n "cases": {{\n{cases}\n }}\n}}\n'


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["GOLDEN_TOKEN"] = "a secret that must not be stored"
    text = text_of(resolve_all())
    if "--write" in sys.argv:
        STORED.write_text(text)
    else:
        print(text, end="")
