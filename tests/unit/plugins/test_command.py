"""``slime plugins``, and the commands that plugins add."""

from __future__ import annotations

import json
import sys
from contextlib import suppress

import pytest

from slime_core.cli.main import _COMMANDS, CORE_COMMANDS, is_core, main
from slime_core.cli.plugins import parser
from tests.plugin_files import Site

OAK = """
@hookimpl
def slime_register(add: Registration) -> None:
    add.reward_model("length", "oak_p.code:Length", summary="Shorter is better.")
    add.presets(lr=0.5)
    add.options("oak_p.options:Options")
    add.command("oak", "oak_p.code:main")
    add.command("oak cut", "oak_p.code:refuse")
    add.command("plugins grow", "oak_p.code:main")
    add.command("gone", "oak_p.code:gone")
    add.command("nowhere", "oak_q:main")
    add.command("silent", "oak_p.code:silent")
    add.command("run", "oak_p.code:main")
    add.command("plugins list", "oak_p.code:main")

@hookimpl
def slime_run_start(): ...
"""
OPTIONS = """
from slime_core import PluginOptions
class Options(PluginOptions):
    strength: float = 1.0
    '''How much.'''
"""
CODE = """
from slime_core.errors import DataError
def main(words):
    print("oak", *words)
    return len(words)
def refuse(words):
    raise DataError("oak.jsonl:3: no prompt")
def silent(words): ...
"""


@pytest.fixture(autouse=True)
def _oak(site: Site) -> None:
    site.install("oak", OAK, options=OPTIONS, code=CODE)


def output(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(words) == code
    shown = capsys.readouterr()
    return shown.err if code == 2 else shown.out


# --- slime plugins ----------------------------------------------------------------------------------------------------


def test_list_shows_every_plugin_and_survives_broken_ones(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.install("elm", "import no_such_thing")
    lines = [line.split() for line in output(capsys, "plugins", "list").splitlines()]
    assert ["oak", "oak-dist", "2.1"] in lines
    assert any(line[:1] == ["elm"] and "no_such_thing'" in " ".join(line) for line in lines)
    rows = {row["name"]: row for row in json.loads(output(capsys, "plugins", "list", "--json"))}
    assert rows["core"]["distribution"] == "slime-rl"
    assert set(rows["elm"]) == {"name", "error"}
    assert rows["oak"]["adds"] == {"reward_model": ["length"]}
    assert rows["oak"]["options"] is True
    assert "oak cut" in rows["oak"]["commands"]
    assert {"oak_p.code", "oak_p.options"} & sys.modules.keys() == set()


def test_list_names_metadata_that_cannot_be_read(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    folder = site.install("elm")
    (folder / "elm_dist-2.1.dist-info/METADATA").write_text("")
    assert str(folder) in output(capsys, "plugins", "list")


def test_show_holds_everything_that_a_plugin_adds(capsys: pytest.CaptureFixture[str]) -> None:
    about = json.loads(output(capsys, "plugins", "show", "oak", "--json"))
    (component,) = about["components"]
    assert (component["kind"], component["name"], component["summary"]) == (
        "reward_model",
        "length",
        "Shorter is better.",
    )
    assert (component["target"], component["traits"]["scope"]) == ("oak_p.code:Length", "sample")
    assert about["presets"] == {"lr": 0.5}
    assert about["options"]["--oak.strength"]["help"] == "How much."
    assert set(about["hooks"]) == {"slime_register", "slime_run_start"}
    page = output(capsys, "plugins", "show", "oak")
    for text in ("length", "Shorter is better.", "--lr 0.5", "--oak.strength", "slime oak cut", "oak_p/plugin.py:"):
        assert text in page


def test_show_of_a_file_and_of_what_is_not_there(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    path = site.file("mine", "@hookimpl\ndef slime_run_start(): ...")
    assert f"{path}:5" in output(capsys, "plugins", "show", path)
    assert "oak" in output(capsys, "plugins", "show", "oka", code=2)
    site.install("elm", "import no_such_thing")
    assert "no_such_thing" in output(capsys, "plugins", "show", "elm", code=2)


# --- Commands of plugins ----------------------------------------------------------------------------------------------


def test_a_command_gets_the_words_after_it_and_its_result_is_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert output(capsys, "oak", "--deep", "3", "4", code=3) == "oak --deep 3 4\n"
    assert output(capsys, "plugins", "grow") == "oak\n"
    assert "oak.jsonl:3" in output(capsys, "oak", "cut", code=2)


def test_help_lists_commands_without_importing_them(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in output(capsys, "--help").splitlines()]
    assert ["slime", "oak", "cut", "(plugin", "oak)"] in lines
    assert "oak_p.code" not in sys.modules


@pytest.mark.parametrize("words", [["run", "--help"], ["plugins", "list"]])
def test_a_command_of_the_core_cannot_be_replaced(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with suppress(SystemExit):
        main(words)
    assert not capsys.readouterr().out.startswith("oak\n")


@pytest.mark.parametrize(
    ("name", "problem"), [("gone", "AttributeError"), ("nowhere", "ModuleNotFoundError"), ("silent", "None")]
)
def test_a_command_that_cannot_run_names_its_plugin(
    capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    error = output(capsys, name, code=2)
    assert all(text in error for text in ("'oak'", f"slime {name}", problem))


def test_the_names_of_the_core_are_the_commands_that_it_has() -> None:
    assert set(CORE_COMMANDS) == set(_COMMANDS)
    below = next(action.choices for action in parser()._actions if isinstance(action.choices, dict))
    assert sorted(below) == sorted(CORE_COMMANDS["plugins"])
    words: list[tuple[list[str], bool]] = [([], False), (["run"], True), (["plugins", "list"], True)]
    words += [(["plugins", "grow"], False), (["oak"], False)]
    assert [is_core(entry) for entry, _ in words] == [known for _, known in words]
