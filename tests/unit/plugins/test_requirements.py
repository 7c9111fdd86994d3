from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.discovery import inactive_flags, scan
from tests.unit.plugins.test_registry import presets, rewards, specs

NOTHING = "from slime_core import *\n@hookimpl\ndef slime_register_trackers(): return []\n"


def refusal(*names: str, without: tuple[str, ...] = (), architecture: str | None = None) -> str:
    with pytest.raises(PluginError) as failure:
        activate(names, without=without, architecture=architecture)
    return str(failure.value)


@pytest.fixture
def pair(install) -> None:
    """Plugin ``search`` of acme 2, which requires ``base`` of zeta 1."""
    install("zeta", "1", plugins={"base": "zeta.plugin"}, files={"zeta/plugin.py": presets("{'gamma': 0.9}")})
    install("acme", "2", plugins={"search": "acme.plugin"}, requires={"base": "search"}, files={
        "acme/plugin.py": rewards("length"),
    })  # fmt: skip


@pytest.mark.usefixtures("pair")
def test_a_required_plugin_comes_with_its_presets_and_is_recorded_with_who_needs_it():
    active = activate(["search"])
    assert active.presets == {"gamma": (0.9, "base")}
    assert [str(need) for need in active.by_need] == ["base is active because search requires it"]
    assert [(entry.plugin, entry.needed_by) for entry in active.manifest.entries] == [
        ("core", ""),
        ("search", ""),
        ("base", "search requires it"),
    ]


@pytest.mark.usefixtures("pair")
def test_a_required_plugin_that_is_named_too_is_there_once_and_by_name():
    active = activate(["base", "search"])
    assert [entry.plugin for entry in active.manifest.entries] == ["core", "base", "search"]
    assert active.by_need == ()


def test_requirements_are_transitive(install):
    chain = {"one": "two", "two": "three", "three": None}
    for name, needs in chain.items():
        requires = {needs: name} if needs else {}
        install(name, plugins={name: f"{name}_p"}, requires=requires, files={f"{name}_p.py": NOTHING})
    assert [str(need) for need in activate(["one"]).by_need] == [
        "two is active because one requires it",
        "three is active because two requires it",
    ]


def test_a_required_plugin_that_is_not_installed_is_named_with_who_needs_it(install):
    install("acme", "2", plugins={"search": "acme"}, requires={"base": "search"}, files={"acme.py": NOTHING})
    assert refusal("search") == (
        "plugin 'search' (acme 2, entry point acme) requires plugin 'base', and none of that name is installed.\n"
        "Reinstall acme with what it depends on."
    )


@pytest.mark.usefixtures("pair")
def test_a_required_plugin_that_two_distributions_claim_is_for_the_user_to_choose(install):
    install("omega", "3", plugins={"base": "omega"}, files={"omega.py": NOTHING})
    assert refusal("search") == (
        "plugin 'search' (acme 2, entry point acme.plugin): plugin 'base' (omega 3, entry point omega) and plugin "
        "'base' (zeta 1, entry point zeta.plugin) claim one name.\n"
        "Name the one that is meant: --plugin omega:base or --plugin zeta:base."
    )
    assert [entry.distribution for entry in activate(["search", "omega:base"]).manifest.entries[1:]] == [
        "acme",
        "omega",
    ]


def test_plugins_may_require_one_another(install):
    for name, needs in {"one": "two", "two": "one"}.items():
        install(name, plugins={name: f"{name}_p"}, requires={needs: name}, files={f"{name}_p.py": NOTHING})
    assert [entry.plugin for entry in activate(["one"]).manifest.entries] == ["core", "one", "two"]


# --- What --no-plugin takes away --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("written", ["search", "acme:search", "Acme:search"])
def test_a_plugin_that_is_named_and_taken_away_is_not_imported_nor_what_it_requires(written):
    assert [entry.plugin for entry in activate(["search"], without=(written,)).manifest.entries] == ["core"]


@pytest.mark.usefixtures("pair")
def test_a_required_plugin_that_is_taken_away_is_an_error_that_says_who_needs_it():
    assert refusal("search", without=("base",)) == (
        "plugin 'search' (acme 2, entry point acme.plugin) needs plugin 'base' (zeta 1, entry point zeta.plugin), and "
        "--no-plugin takes that away.\nLeave one of the two out."
    )


def test_the_only_plugin_for_the_architecture_that_is_taken_away_is_an_error_that_says_why(install):
    install("acme", "1", plugins={"acme": "acme"}, claims={"AcmeLM": "acme"}, files={"acme.py": specs("AcmeLM")})
    assert refusal(architecture="AcmeLM", without=("acme",)) == (
        "architecture AcmeLM needs plugin 'acme' (acme 1, entry point acme), and --no-plugin takes that away.\n"
        "Leave one of the two out."
    )


def test_taking_one_of_two_claims_away_settles_them(install):
    for name in ("acme", "zeta"):
        files = {f"{name}.py": specs("AcmeLM")}
        install(name, "1", plugins={name: name}, claims={"AcmeLM": name}, files=files)
    active = activate([], architecture="AcmeLM", without=("acme",))
    assert [entry.plugin for entry in active.manifest.entries] == ["core", "zeta"]


def test_a_claim_means_the_plugin_of_the_distribution_that_makes_it(install):
    for name in ("acme", "zeta"):
        claims = {"AcmeLM": "models"} if name == "zeta" else {}
        install(name, plugins={"tree": name, "models": f"{name}_m"}, claims=claims, files={
            f"{name}.py": NOTHING,
            f"{name}_m.py": specs("AcmeLM"),
        })  # fmt: skip
    assert activate([], architecture="AcmeLM").manifest.entries[1].distribution == "zeta"


@pytest.mark.parametrize("plugin", ["ghost", "grpo"])
def test_a_stranger_s_claim_changes_no_run(install, plugin):
    install("acme", "1", claims={"Qwen3ForCausalLM": plugin}, files={"acme.py": NOTHING})
    assert [entry.plugin for entry in activate([], architecture="Qwen3ForCausalLM").manifest.entries] == [
        "core",
        "models",
    ]


def test_a_claim_for_another_s_plugin_imports_nothing(install):
    install("acme", "1", claims={"AcmeLM": "grpo"}, files={"acme.py": NOTHING})
    message = refusal(architecture="AcmeLM")
    assert message.startswith(
        "no active plugin has a model spec for architecture AcmeLM, and no installed one claims it."
    )
    assert "AcmeLM" not in message.partition("Claimed architectures: ")[2].splitlines()[0]
    assert "slime-grpo" not in message


def test_a_name_that_means_nothing_takes_nothing_away_and_is_an_error():
    assert refusal("grpo", without=("gpro",)).startswith(
        "--no-plugin gpro: no such plugin is named or installed (did you mean 'grpo'?), or it is core, which every run "
        "has. Accepted are: agents, compat, datasets, grpo, mlflow, models, offpolicy, "
    )


@pytest.mark.parametrize("name", ["core", "slime-rl:core"])
def test_no_run_goes_without_the_core(name):
    assert f"--no-plugin {name}: " in refusal(without=(name,))
    assert "or it is core, which every run has" in refusal(without=(name,))


def test_a_file_is_taken_away_by_its_stem(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit(3)")
    active = activate([str(tmp_path / "mine.py")], without=("mine",))
    assert [entry.plugin for entry in active.manifest.entries] == ["core"]


@pytest.mark.parametrize("written", ["./mine.py", "mine.py", "../work/mine.py", "mine"])
def test_a_file_is_taken_away_by_any_path_of_it(tmp_path, monkeypatch, written):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("mine.py").write_text("raise SystemExit(3)")
    assert [entry.plugin for entry in activate(["./mine.py"], without=(written,)).manifest.entries] == ["core"]


def test_a_module_is_taken_away_as_it_is_named():
    assert [entry.plugin for entry in activate(["json.tool"], without=("json.tool",)).manifest.entries] == ["core"]


def test_functions_named_by_path_need_the_plugin_that_runs_them():
    with pytest.raises(PluginError) as failure:
        activate([], flags={"custom-rm-path": "--custom-rm-path"}, without=("compat",))
    assert str(failure.value) == (
        "--custom-rm-path needs plugin 'compat' (slime-compat 0.1.0, entry point slime_compat.plugin), and "
        "--no-plugin takes that away.\nLeave one of the two out."
    )


def test_functions_named_by_path_name_the_distribution_that_is_not_installed():
    declared = scan()
    others = tuple(entry for entry in declared.entries if entry.distribution != "slime-compat")
    assert inactive_flags([], replace(declared, entries=others))["custom-rm-path"] == (
        "a setting of slime-compat, which is not installed; install it"
    )


# --- What may be imported ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pair")
def test_plugins_that_are_not_admitted_are_not_imported():
    import sys

    def refuse(manifest: object) -> None:
        raise PluginError("not today")

    with pytest.raises(PluginError, match="not today"):
        activate(["search"], admit=refuse)
    assert "acme.plugin" not in sys.modules


def test_the_installed_searchr1_brings_grpo_and_its_presets():
    active = activate(["searchr1"])
    assert [str(need) for need in active.by_need] == ["grpo is active because searchr1 requires it"]
    assert active.presets["advantage_estimator"] == ("grpo", "grpo")
