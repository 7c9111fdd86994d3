"""Commands that installed distributions add: found in metadata, run like the core's own."""

from __future__ import annotations

import sys
from contextlib import suppress

import pytest

from slime_core.cli import main as commands
from slime_core.cli.main import _COMMANDS, CORE_COMMANDS, is_core, main
from slime_core.cli.plugins import parser
from slime_core.plugins.discovery import COMMAND_GROUP, OUR_DISTRIBUTIONS, Declared

OURS = {name: one for one, groups in OUR_DISTRIBUTIONS.items() for name in groups.get(COMMAND_GROUP, ())}

SOURCE = """
from slime_core.errors import DataError

def main(argv):
    print("oak", *argv)
    return len(argv)

def refuse(argv):
    raise DataError("oak.jsonl:3: no prompt; write one")

def silent(argv):
    return None
"""


def test_a_command_is_run_with_the_words_after_it(install, capsys):
    install("acme-oak", commands={"oak": "acme_oak:main"}, files={"acme_oak.py": SOURCE})
    assert main(["oak", "--deep", "3"]) == 2
    assert capsys.readouterr().out == "oak --deep 3\n"


@pytest.mark.parametrize("name", [name for name in OURS if "." not in name])
def test_a_command_of_ours_needs_no_words_after_it(install, name):
    install(OURS[name], commands={name: "acme_oak:main"}, files={"acme_oak.py": SOURCE})
    assert main([name]) == 0


def test_a_dot_joins_two_words_and_the_longer_command_wins(install, capsys):
    install("acme-oak", commands={"oak": "acme_oak:main", "oak.cut": "acme_oak:refuse"}, files={"acme_oak.py": SOURCE})
    assert main(["oak", "cut"]) == 2
    assert "oak.jsonl:3" in capsys.readouterr().err


def test_a_command_can_be_added_to_the_cores_own_under_plugins(install, capsys):
    install("acme-oak", "2.1", commands={"plugins.grow": "acme_oak:main"}, files={"acme_oak.py": SOURCE})
    assert main(["plugins", "grow", "tall"]) == 1
    assert capsys.readouterr().out == "oak tall\n"
    with pytest.raises(SystemExit):
        main(["plugins", "--help"])
    assert ["grow", "from", "acme-oak", "2.1"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_help_lists_commands_with_their_distribution_and_imports_none(install, capsys):
    install("acme-oak", "2.1", commands={"oak.cut": "acme_oak:main"}, files={"acme_oak.py": "raise SystemExit(3)"})
    assert main(["--help"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["slime", "oak", "cut", "(acme-oak", "2.1)"] in lines
    assert "acme_oak" not in sys.modules


@pytest.mark.parametrize("name", ["run", "run.fast", "plugins", "plugins.list", "config.show"])
def test_a_command_of_the_core_cannot_be_taken(install, capsys, name):
    install("acme-oak", commands={name: "acme_oak:main"}, files={"acme_oak.py": SOURCE})
    assert main(["--help"]) == 0
    assert "acme-oak" not in capsys.readouterr().out
    with suppress(SystemExit):  # argparse exits after it has printed its help
        main([*name.split("."), "--help"])
    assert "oak" not in capsys.readouterr().out.split()


def test_two_claims_of_one_command_name_both_distributions(install, capsys):
    for name in ("acme", "zeta"):
        install(name, commands={"oak": f"{name}_oak:main"}, files={f"{name}_oak.py": SOURCE})
    assert main(["oak"]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in ("slime oak", "acme 1.0 (acme_oak:main)", "zeta 1.0 (zeta_oak:main)"))
    assert main(["--help"]) == 0
    assert "slime oak" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("acme_gone:main", "ModuleNotFoundError"),
        ("acme_oak:gone", "AttributeError"),
        ("acme_oak", "not a function"),
        ("acme_oak:silent", "returned None"),
    ],
)
def test_a_target_that_cannot_be_run_names_the_command_and_its_distribution(install, capsys, target, problem):
    install("acme-oak", commands={"oak": target}, files={"acme_oak.py": SOURCE})
    assert main(["oak"]) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in ("slime oak", f"acme-oak 1.0 ({target})", problem))


@pytest.mark.parametrize("name", sorted(OURS))
def test_a_command_of_ours_that_is_not_installed_says_what_to_install(monkeypatch, capsys, name):
    monkeypatch.setattr(commands, "scan", Declared)
    assert main([*name.split("."), "more"]) == 2
    assert f"pip install ./plugins/{OURS[name]}\n" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert f"plugins/{OURS[name]}" in capsys.readouterr().out


def test_the_names_of_the_core_are_the_commands_that_it_has():
    assert set(CORE_COMMANDS) == set(_COMMANDS)
    below = next(one for one in parser()._actions if isinstance(one.choices, dict))
    assert sorted(below.choices) == sorted(CORE_COMMANDS["plugins"])


@pytest.mark.parametrize(
    ("words", "known"),
    [([], False), (["run"], True), (["plugins", "list"], True), (["plugins", "oak"], False), (["oak"], False)],
)
def test_commands_of_the_core_are_known_without_reading_metadata(words, known):
    assert is_core(words) is known
