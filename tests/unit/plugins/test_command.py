from __future__ import annotations

import json
import re

import pytest

from slime_core.cli.plugins import execute
from slime_core.errors import PluginError

SOURCE = """
from slime_core import Component, hookimpl
@hookimpl
def slime_register_reward_models():
    yield Component("length", target="acme.code:Length", summary="Shorter is better")
"""


def slime(_: str, *words: str) -> int:
    return execute(words)


def test_list_shows_every_plugin_with_distribution_version_and_entry_point(capsys, install):
    install("acme-tree", "2.1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": SOURCE})
    assert slime("plugins", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["acme", "acme-tree", "2.1", "acme.plugin"] in [line.split() for line in lines]
    assert ["core", "slime-rl", "0.1.0", "slime_core.builtin.plugin"] in [line.split() for line in lines]


def test_list_marks_what_two_claim_and_survives_what_is_broken(capsys, install):
    for name in ("acme", "zeta"):
        install(name, plugins={"tree": f"{name}.plugin"}, files={f"{name}/plugin.py": "raise SystemExit(3)"})
    assert slime("plugins", "list") == 0
    out = capsys.readouterr().out
    assert " acme:tree," in out
    assert " zeta:tree," in out
    assert slime("plugins", "list", "--json") == 0
    rows = {row["distribution"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["acme"] == {
        "name": "tree",
        "distribution": "acme",
        "version": "1.0",
        "entry_point": "acme.plugin",
        "architectures": [],
        "claims": {},
        "activated_by": [],
        "requires": [],
        "unfit": None,
        "conflict": True,
    }
    assert rows["slime-grpo"]["conflict"] is False


def test_list_says_which_architectures_a_plugin_s_own_distribution_claims(capsys, install):
    install("acme", plugins={"tree": "acme.plugin"}, claims={"OakForCausalLM": "tree"}, files={"acme/plugin.py": ""})
    install("zeta", plugins={"other": "zeta.plugin"}, claims={"ElmForCausalLM": "tree"}, files={"zeta/plugin.py": ""})
    assert slime("plugins", "list", "--json") == 0
    rows = {row["distribution"]: row["architectures"] for row in json.loads(capsys.readouterr().out)}
    assert (rows["acme"], rows["zeta"]) == (["OakForCausalLM"], [])
    assert slime("plugins", "list") == 0
    assert " OakForCausalLM\n" in capsys.readouterr().out


def test_list_marks_a_plugin_whose_bounds_leave_out_this_core(capsys, install):
    install("acme", "2.1", plugins={"tree": "acme.plugin"}, files={}, dependencies=["slime-rl<0.1"])
    assert slime("plugins", "list") == 0
    assert "slime-rl<0.1" in capsys.readouterr().out


def test_list_says_what_a_plugin_brings_with_it(capsys):
    assert slime("plugins", "list") == 0
    below = capsys.readouterr().out.partition("slime_searchr1.plugin")[2]
    assert "--generate-function search_r1" in below
    assert "brings grpo" in below


def test_list_names_a_distribution_that_cannot_be_read(capsys, install):
    site = install("acme", "2.1", plugins={"tree": "acme.plugin"}, files={})
    (site / "acme-2.1.dist-info/METADATA").write_text("")
    assert slime("plugins", "list") == 0
    shown = capsys.readouterr()
    assert "slime_grpo.plugin" in shown.out
    assert str(site) in shown.err


@pytest.mark.parametrize(
    ("entry_point", "named"),
    [
        ("acme_oak.plugn", "acme_oak.plugin"),
        ("acme_oak.hooks", "acme_oak.plugin"),
        ("acme_oka.plugin", "acme_oak"),
        ("acme_oak.plugin:Plugn", "Plugin"),
    ],
)
def test_a_wrong_entry_point_suggests_the_right_one(capsys, install, entry_point, named):
    code = "from slime_core import hookimpl\nclass Plugin:\n  @hookimpl\n  def slime_presets(self): return {}\n"
    install("acme-oak", plugins={"oak": entry_point}, files={"acme_oak/__init__.py": "", "acme_oak/plugin.py": code})
    assert slime("plugins", "show", "oak") == 2
    advice = capsys.readouterr().out.splitlines()[-1]
    assert named in advice
    assert entry_point in advice
    assert "einstall" not in advice


def test_an_entry_point_whose_module_lacks_a_package_still_advises_to_install(capsys, install):
    files = {"acme_oak/__init__.py": "", "acme_oak/plugin.py": "import acme_gone"}
    install("acme-oak", plugins={"oak": "acme_oak.plugin"}, files=files)
    assert slime("plugins", "show", "oak") == 2
    assert "Reinstall acme-oak" in capsys.readouterr().out


def test_show_as_json_holds_everything(capsys, install):
    install("acme-tree", "2.1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": SOURCE})
    assert slime("plugins", "show", "acme", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["components"][0].pop("traits")["scope"] == "sample"
    assert found == {
        "name": "acme",
        "distribution": "acme-tree",
        "version": "2.1",
        "entry_point": "acme.plugin",
        "architectures": [],
        "claims": {},
        "activated_by": [],
        "requires": [],
        "unfit": None,
        "error": None,
        "components": [
            {"kind": "reward_model", "name": "length", "target": "acme.code:Length", "summary": "Shorter is better"}
        ],
        "presets": {},
        "options": {},
        "hooks": [],
    }


def test_show_of_a_broken_plugin_says_who_it_is_and_what_is_wrong(capsys, install):
    install("acme-tree", "2.1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": "import no_such_thing"})
    assert slime("plugins", "show", "acme") == 2
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["acme", "acme-tree", "2.1", "acme.plugin"]
    assert "'no_such_thing'" in shown
    assert slime("plugins", "show", "acme", "--json") == 2
    assert "'no_such_thing'" in json.loads(capsys.readouterr().out)["error"]


def test_show_of_an_unknown_plugin_is_a_plugin_error():
    with pytest.raises(PluginError, match=r"--plugin grpoo: .*'grpo'"):
        slime("plugins", "show", "grpoo")


def test_show_lists_components_with_traits_presets_and_options(capsys):
    assert slime("plugins", "show", "grpo") == 0
    out = capsys.readouterr().out
    traits = next(line for line in out.splitlines() if "slime_grpo.advantage:GroupCentred" in line).strip()
    assert {"scope sample", "reads groups, rewards, rollouts", "policy_loss clipped"} <= set(traits.split("; "))
    assert "--advantage-estimator grpo\n" in out
    assert re.search("--grpo.std-normalization .*default true", out)


def test_show_and_trace_say_where_hooks_are_and_which_only_observe(capsys, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from slime_core import hookimpl, observer\n"
        "@hookimpl\n@observer\ndef slime_after_rollout(rollout, samples): ...\n"
        "@hookimpl\ndef slime_before_rollout(rollout, groups): ...\n"
    )
    policies = {"slime_after_rollout": "observer", "slime_before_rollout": "participant"}
    assert slime("plugins", "show", str(mine), "--json") == 0
    assert {row["hook"]: row["policy"] for row in json.loads(capsys.readouterr().out)["hooks"]} == policies
    assert slime("plugins", "show", str(mine)) == 0
    rows = [line.split("; ") for line in capsys.readouterr().out.splitlines() if line.strip().startswith("slime_")]
    assert {row[0].split()[0]: row[1] for row in rows} == policies
    assert sorted(row[2] for row in rows) == [f"{mine}:2", f"{mine}:5"]
    assert execute(["trace", "--plugin", "grpo", "--plugin", str(mine)]) == 0
    traced = [line for line in capsys.readouterr().out.splitlines() if "mine.py" in line]
    assert [line.endswith("observer") for line in traced].count(True) == 1
