from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.discovery import inactive_flags, scan
from tests.unit.plugins.test_registry import presets, rewards, specs

NOTHING = "from slime_core import *\n@hookimpl\ndef slime_register_trackers(): return []\n"


def refusal(names: str, *activated: str, without: tuple[str, ...] = (), architecture: str | None = None) -> None:
    """Assert that the activation is refused with a message that has ``names`` in this order."""
    with pytest.raises(PluginError, match=rf"(?s){names}"):
        activate(activated, without=without, architecture=architecture)


def needed(*names: str) -> dict[str, str]:
    return {need.plugin.name: need.why for need in activate(names).by_need}


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
    assert needed("search") == {"base": "search requires it"}
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
    assert needed("one") == {"two": "one requires it", "three": "two requires it"}


def test_a_required_plugin_that_is_not_installed_is_named_with_who_needs_it(install):
    install("acme", "2", plugins={"search": "acme"}, requires={"base": "search"}, files={"acme.py": NOTHING})
    refusal(r"'search' \(acme 2.*'base'", "search")


@pytest.mark.usefixtures("pair")
def test_a_required_plugin_that_two_distributions_claim_is_for_the_user_to_choose(install):
    install("omega", "3", plugins={"base": "omega"}, files={"omega.py": NOTHING})
    refusal(r"'search' .*'base' \(omega 3.*'base' \(zeta 1.*--plugin omega:base .*--plugin zeta:base", "search")
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
    refusal(r"'search' .*'base' .*--no-plugin", "search", without=("base",))


def test_the_only_plugin_for_the_architecture_that_is_taken_away_is_an_error_that_says_why(install):
    install("acme", "1", plugins={"acme": "acme"}, claims={"AcmeLM": "acme"}, files={"acme.py": specs("AcmeLM")})
    refusal("AcmeLM .*'acme' .*--no-plugin", architecture="AcmeLM", without=("acme",))


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
    with pytest.raises(PluginError, match=r" AcmeLM, .* architectures: ") as failure:
        activate([], architecture="AcmeLM")
    assert str(failure.value).count("AcmeLM") == 1
    assert "slime-grpo" not in str(failure.value)


@pytest.mark.parametrize(("name", "near"), [("gpro", "'grpo'"), ("core", "core"), ("slime-rl:core", "core")])
def test_a_name_that_takes_nothing_away_is_an_error(name, near):
    refusal(f"--no-plugin {name}: .*{near}.*: agents, compat, datasets, grpo", "grpo", without=(name,))


@pytest.mark.parametrize("written", ["./mine.py", "mine.py", "../work/mine.py", "mine"])
def test_a_file_is_taken_away_by_any_path_of_it(tmp_path, monkeypatch, written):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("mine.py").write_text("raise SystemExit(3)")
    assert [entry.plugin for entry in activate(["./mine.py"], without=(written,)).manifest.entries] == ["core"]


def test_a_module_is_taken_away_as_it_is_named():
    assert [entry.plugin for entry in activate(["json.tool"], without=("json.tool",)).manifest.entries] == ["core"]


def test_functions_named_by_path_need_the_plugin_that_runs_them():
    with pytest.raises(PluginError, match=r"--custom-rm-path .*'compat' .*--no-plugin"):
        activate([], flags={"custom-rm-path": "--custom-rm-path"}, without=("compat",))


def test_functions_named_by_path_name_the_distribution_that_is_not_installed():
    declared = scan()
    others = tuple(entry for entry in declared.entries if entry.distribution != "slime-compat")
    assert "slime-compat" in inactive_flags([], replace(declared, entries=others))["custom-rm-path"]


# --- What may be imported ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pair")
def test_plugins_that_are_not_admitted_are_not_imported():
    import sys

    def refuse(manifest: object) -> None:
        raise PluginError("not today")

    with pytest.raises(PluginError, match="not today"):
        activate(["search"], admit=refuse)
    assert "acme.plugin" not in sys.modules
