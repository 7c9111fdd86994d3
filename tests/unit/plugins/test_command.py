from __future__ import annotations

import argparse
import json

import pytest

from slime_core.cli.plugins import add_commands
from slime_core.errors import PluginError

SOURCE = """
from slime_core import Component, hookimpl
@hookimpl
def slime_register_reward_models():
    yield Component("length", target="acme.code:Length", summary="Shorter is better")
"""


def slime(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    arguments = parser.parse_args(words)
    return arguments.handler(arguments)


def test_list_shows_every_plugin_with_distribution_version_and_entry_point(capsys, install):
    install("acme-tree", "2.1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": SOURCE})
    assert slime("plugins", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["acme", "acme-tree", "2.1", "acme.plugin"] in [line.split() for line in lines]
    assert ["core", "slime-rl", "0.1.0", "slime_core.builtin.plugin"] in [line.split() for line in lines]


def test_list_survives_broken_and_conflicting_plugins(capsys, install):
    for name in ("acme", "zeta"):
        install(name, plugins={"tree": f"{name}.plugin"}, files={f"{name}/plugin.py": "raise SystemExit(3)"})
    assert slime("plugins", "list", "--json") == 0
    rows = {row["distribution"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["acme"] == {
        "name": "tree",
        "distribution": "acme",
        "version": "1.0",
        "entry_point": "acme.plugin",
        "conflict": True,
    }
    assert rows["slime-grpo"]["conflict"] is False


def test_show_lists_components_presets_and_options(capsys):
    assert slime("plugins", "show", "grpo") == 0
    out = capsys.readouterr().out
    assert "  advantage estimator grpo: Group-relative advantage (DeepSeekMath, 2402.03300)\n" in out
    assert "  sets --advantage-estimator grpo\n" in out
    assert "  --grpo.std-normalization (default True): Divide grpo's advantages" in out


def test_show_as_json_holds_the_targets(capsys, install):
    install("acme-tree", "2.1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": SOURCE})
    assert slime("plugins", "show", "acme", "--json") == 0
    assert json.loads(capsys.readouterr().out)["components"] == [
        {"kind": "reward_model", "name": "length", "target": "acme.code:Length", "summary": "Shorter is better"}
    ]


def test_show_of_core_lists_what_the_core_ships(capsys):
    assert slime("plugins", "show", "core") == 0
    assert "  generate function single_turn: One response to each prompt" in capsys.readouterr().out


def test_show_of_a_broken_plugin_says_who_it_is_and_what_is_wrong(capsys, install):
    install("acme-tree", "2.1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": "import no_such_thing"})
    assert slime("plugins", "show", "acme") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("plugin 'acme' (acme-tree 2.1, entry point acme.plugin)\n  does not load:\n")
    assert "No module named 'no_such_thing'" in shown.err


def test_show_of_an_unknown_plugin_is_a_plugin_error():
    with pytest.raises(
        PluginError, match=r"--plugin grpoo: no installed plugin is called that \(did you mean 'grpo'\?\)"
    ):
        slime("plugins", "show", "grpoo")
