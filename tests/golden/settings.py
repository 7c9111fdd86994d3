"""The resolved settings and the selected components of many command lines, stored by flag in ``settings.json``.

Commands are run as a user runs them (``slime config show``, ``slime check``) and start nothing. Values are stored by
the flag's spelling, not by section, because settings may move between sections and to the options of plugins, where
their flags stay. Of each command only values that are no defaults are stored; ``defaults`` holds those of every flag.

``python -m tests.golden.settings --write`` stores what the code does now; read the difference before committing it.
With ``--verbose`` it prints what slime says about each command that it refuses.
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
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPO = HERE.parents[1]
STORED = HERE / "settings.json"
OWNED_BY_ENGINE = {"megatron": "", "sglang": "sglang-"}
"""Section of an engine -> what stands before the names of its flags."""
CORE_PLUGINS = ("core",)
"""Plugins that every run has and that need no name."""


WITHOUT_CLIENT = {"mlflow", "wandb"}
"""Plugins that are refused here, because the clients of their services are not installed (``make trackers``)."""


def resolve_all() -> dict[str, Any]:
    """``defaults`` (flag -> value), ``cases`` (name -> settings and components, or that the command is refused)."""
    defaults: dict[str, Any] = {}
    cases = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copytree(HERE / "files", folder, dirs_exist_ok=True)
        _write_parquet(Path(folder))
        (Path(folder) / "inbox").mkdir()
        places = {str(Path(folder).resolve()): "<files>", folder: "<files>", str(REPO): "<repo>"}
        model = next(REPO.glob("slime_core/**/model/model.safetensors")).parent
        for group, lines in tomllib.loads((HERE / "cases.toml").read_text()).items():
            for name, line in lines.items():
                argv = shlex.split(line.format(repo=REPO, model=model))
                cases[f"{group}.{name}"] = _case(argv, places, defaults)
        every = [
            word for name in sorted(_plugins() - set(CORE_PLUGINS) - WITHOUT_CLIENT) for word in ("--plugin", name)
        ]
        # The presets of searchr1 are for models that search, which the built-in one does not.
        instead = ("--generate-function", "single_turn", "--reward-key", "score", "--eval-reward-key", "exact_match")
        _case([*every, "--advantage-estimator", "grpo", *instead], places, defaults)
        # Where a model is named, what follows from the built-in one is not set.
        _case(["--hf-checkpoint", str(model), "--advantage-estimator", "grpo"], places, defaults)
    return {"defaults": dict(sorted(defaults.items())), "cases": cases}


def _case(argv: list[str], places: dict[str, str], defaults: dict[str, Any]) -> dict[str, Any]:
    """The case as it is stored; adds the defaults that it shows to ``defaults``."""
    code, shown = _slime("config", "show", *argv)
    if code != 0:
        return {"refused": True}
    given = {}
    for flag, value, is_default in _flat(shown):
        value = _without_places(value, places)
        if is_default:
            assert defaults.setdefault(flag, value) == value, f"--{flag} has two defaults"
        else:
            assert flag not in given, f"--{flag} is shown twice"
            given[flag] = value
    _, checked = _slime("check", *argv)
    found = sorted(re.findall(r"^  (\S.*) of \S+, by ", checked, re.MULTILINE))
    accepted = re.search(r"^settings, .* are right$", checked, re.MULTILINE) is not None
    return {"settings": dict(sorted(given.items())), "components": found, "files_are_right": accepted}


def _slime(*argv: str) -> tuple[int, str]:
    from slime_core.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(argv)
    if code and "--verbose" in sys.argv:
        print(shlex.join(argv), out.getvalue(), sep="\n", file=sys.stderr)
    return code, out.getvalue()


def _flat(shown: str) -> list[tuple[str, Any, bool]]:
    """(flag without dashes, value, whether it is the default) of each line of ``slime config show``."""
    stored = json.loads(STORED.read_text())["defaults"] if STORED.exists() else {}
    found, section = [], ""
    for line in shown.splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section = match[1]
        elif match := re.fullmatch(r"# (\w+) is not set", line):
            found.append((_flag(section, match[1], stored), None, True))
        elif match := re.fullmatch(r"(?:# )?(\w+) = (.*)  # (.*)", line):
            value = tomllib.loads(f"value = {match[2]}")["value"]
            found.append((_flag(section, match[1], stored), value, match[3].split(";")[0] == "default"))
    return found


@cache
def _plugins() -> frozenset[str]:
    """Names of the installed plugins. Finding them reads the metadata of every installed distribution."""
    return frozenset(entry_points(group="slime").names)


def _flag(section: str, name: str, stored: dict[str, Any]) -> str:
    """As the command line spells it. An option of a plugin that is a flag of its own is one by its stored name."""
    flat = name.replace("_", "-")
    if section in OWNED_BY_ENGINE:
        return OWNED_BY_ENGINE[section] + flat
    of_plugin = section in _plugins() and flat not in stored
    return f"{section}.{flat}" if of_plugin else flat


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


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["GOLDEN_TOKEN"] = "a secret that must not be stored"
    text = json.dumps(resolve_all(), indent=1, ensure_ascii=False) + "\n"
    if "--write" in sys.argv:
        STORED.write_text(text)
    else:
        print(text, end="")
