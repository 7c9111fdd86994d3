"""Plugins are imported, checked and collected; a broken one breaks no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime_core.cli.main import added_commands
from slime_core.components.construction import load
from slime_core.errors import PluginError
from slime_core.plugins.discovery import CORE, Plugin
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry, load_plugins, register
from tests.plugin_files import HEAD, Site, activated, loaded

REGISTER = "@hookimpl\ndef slime_register(add: Registration) -> None:\n    "
REWARD = f"{REGISTER}add.reward_model('length', 'NAME_p.code:Length')\n"
LENGTH = "class Length:\n    async def score(self, samples): ...\n"


def options(fields: str, base: str = "PluginOptions") -> str:
    body = "".join(f"    {line}\n" for line in fields.splitlines())
    return f"from typing import Annotated\nclass Options({base}):\n{body}{REGISTER}add.options(Options)\n"


def refusal(*names: str) -> str:
    with pytest.raises(PluginError) as failure:
        loaded(*names)
    return str(failure.value)


def both(site: Site, source: str) -> Registry:
    """Install ``acme`` and ``zeta`` with the same source, each with its name for ``NAME``."""
    for name in ("acme", "zeta"):
        site.install(name, source.replace("NAME", name))
    return loaded()


# --- Plugins that do not load -----------------------------------------------------------------------------------------

BROKEN = {
    "no module": ("import no_such_thing", ["ModuleNotFoundError", "no_such_thing", "acme_p/plugin.py:5"]),
    "an error in its code": ("\nraise RuntimeError('no key')", ["RuntimeError: no key", "acme_p/plugin.py:6"]),
    "exit at import": ("raise SystemExit(0)", ["SystemExit: 0"]),
    "syntax": ("def f(:", ["SyntaxError", "line 5"]),
    "no hook": ("def slime_run_start(): ...", ["hookimpl"]),
    "misspelt hook": ("@hookimpl\ndef slime_run_strat(): ...", ["slime_run_strat", "slime_run_start"]),
    "misspelt specname": ("@hookimpl(specname='slime_regster')\ndef mine(): ...", ["slime_regster"]),
    "unknown parameter": ("@hookimpl\ndef slime_run_start(runn): ...", ["slime_run_start", "runn"]),
    "a hook of another plugin's": ("@hookimpl\ndef acme_hook(): ...", ["acme_hook"]),
    "wrapper without yield": (
        "@hookimpl(wrapper=True)\ndef slime_run_start(): ...",
        ["slime_run_start", "wrapper=True"],
    ),
    "async": ("@hookimpl\nasync def slime_run_start(): ...", ["slime_run_start", "plain"]),
    "not async": ("@hookimpl\ndef slime_evaluate(step): ...", ["slime_evaluate", "async"]),
    "an async generator": ("@hookimpl\nasync def slime_evaluate(step): yield 1", ["slime_evaluate", "async"]),
    "a yield": ("@hookimpl\ndef slime_run_start(): yield", ["slime_run_start", "return"]),
    "the old wrapper": ("@hookimpl(hookwrapper=True)\ndef slime_run_start(): yield", ["slime_run_start", "return"]),
    "no restore": ("@hookimpl\ndef slime_checkpoint_state(): ...", ["slime_checkpoint_restore"]),
    "an error in slime_register": (f"{REGISTER}1 / 0", ["slime_register", "ZeroDivisionError", "acme_p/plugin.py:7"]),
    "a wrong registration": (f"{REGISTER}add.tracker('a b', 'a:b')", ["slime_register", "ValueError", "'a b'"]),
    "no such method": (f"{REGISTER}add.rewards('a', 'a:b')", ["slime_register", "AttributeError", "rewards"]),
    "no such trait": (f"{REGISTER}add.tracker('a', 'a:b', scope='x')", ["slime_register", "TypeError", "scope"]),
    "options of another class": (f"{REGISTER}add.options(dict)", ["TypeError", "PluginOptions"]),
    "options that can change": (
        options("x: int = Field(1, description='x')", "BaseModel"),
        ["TypeError", "PluginOptions"],
    ),
    "options without default": (options("x: int = Field(description='x')"), ["option x"]),
    "options without description": (options("x: int = 1"), ["option x"]),
    "options that are not there": (f"{REGISTER}add.options('acme_p.plugin:Gone')", ["AttributeError", "Gone"]),
    "a flag of the core": (options("x: Annotated[int, Flag('--lr')] = Field(1, description='x')"), ["--lr", "slime"]),
}


@pytest.mark.parametrize(("source", "names"), BROKEN.values(), ids=BROKEN)
def test_a_plugin_that_does_not_load_is_a_warning_and_an_error_once_it_is_named(
    site: Site, source: str, names: list[str]
) -> None:
    site.install("acme", source)
    site.install("zeta", REWARD.replace("NAME", "zeta"))
    registry = loaded()
    assert list(registry.broken) == ["acme"]
    assert "acme" not in registry.loaded
    assert registry.owner(Kind.REWARD_MODEL, "length").name == "zeta"
    text = str(registry.broken["acme"])
    assert refusal("acme") == text
    assert text.startswith("plugin 'acme' (acme-dist 2.1)")
    assert [name for name in names if name not in text] == []


def test_the_error_of_an_import_is_chained(site: Site) -> None:
    site.install("acme", "import no_such_thing")
    with pytest.raises(PluginError) as failure:
        loaded("acme")
    assert isinstance(failure.value.__cause__, ModuleNotFoundError)


def test_a_component_that_is_missing_may_be_that_of_a_plugin_that_does_not_load(site: Site) -> None:
    site.install("acme", "import no_such_thing")
    with pytest.raises(PluginError, match="no_such_thing"):
        loaded().find(Kind.REWARD_MODEL, "length")


@pytest.mark.parametrize("name", ["os.path", "my_lab.nowhere", "nowhere_at_all.plugin"])
def test_a_module_that_is_no_plugin_is_refused(name: str) -> None:
    assert refusal(name).startswith(f"plugin {name.replace('.', '_')!r} (module {name} ")


@pytest.mark.parametrize(
    ("line", "place"),
    [("import helper", ":2"), ("from . import helper", ":2"), ("raise RuntimeError()", ":2"), ("x)", ", line 2")],
)
def test_a_single_file_that_cannot_be_imported_names_the_line(tmp_path: Path, line: str, place: str) -> None:
    (tmp_path / "helper.py").touch()
    (tmp_path / "mine.py").write_text(f"import os\n{line}\n")
    text = refusal(f"{tmp_path}/mine.py")
    assert text.startswith(f"plugin 'mine' ({tmp_path}/mine.py sha256:")
    assert f"mine.py{place})" in text


@pytest.mark.parametrize("name", ["data", "my plugin", "größe", "a.b"])
def test_a_name_that_no_table_of_a_file_can_have_is_refused_with_options(site: Site, name: str) -> None:
    assert f"[{name}]" in refusal(site.file(name, options("x: int = Field(1, description='x')")))
    assert name in loaded(site.file(name, "@hookimpl\ndef slime_run_start(): ...")).loaded


# --- Plugins that clash -----------------------------------------------------------------------------------------------


def test_two_distributions_with_a_plugin_of_one_name_are_both_named(site: Site) -> None:
    for name in ("acme", "zeta"):
        site.install(name, REWARD.replace("NAME", name), points={"tree": f"{name}_p.plugin"})
    assert list(loaded().broken) == ["tree"]
    text = refusal("tree")
    assert "acme-dist 2.1" in text
    assert "zeta-dist 2.1" in text


def test_a_flag_of_another_plugin_is_refused_with_both(site: Site) -> None:
    flag = options("x: Annotated[int, Flag('--strength')] = Field(1, description='x')")
    registry = both(site, flag)
    assert list(registry.broken) == ["zeta"]
    assert "--strength" in str(registry.broken["zeta"])
    assert "'acme' (acme-dist 2.1)" in str(registry.broken["zeta"])
    assert set(load_plugins(["zeta"], without=["acme"]).options) >= {"zeta"}


def test_two_plugins_with_one_component_are_both_there_and_the_bare_name_is_an_error(site: Site) -> None:
    registry = both(site, REWARD)
    assert registry.broken == {}
    with pytest.raises(PluginError) as failure:
        registry.find(Kind.REWARD_MODEL, "length")
    for name in ("acme-dist 2.1", "zeta-dist 2.1", "acme:length", "zeta:length"):
        assert name in str(failure.value)
    assert registry.find(Kind.REWARD_MODEL, "zeta:length")[0].name == "zeta"
    assert registry.find(Kind.REWARD_MODEL, "acme:length")[1].target == "acme_p.code:Length"
    assert {"acme:length", "zeta:length"} <= set(registry.names(Kind.REWARD_MODEL))
    assert "length" not in registry.names(Kind.REWARD_MODEL)
    with pytest.raises(PluginError):
        registry.find(Kind.REWARD_MODEL, "grpo:length")


def test_a_component_of_the_core_counts_like_any_other(site: Site) -> None:
    site.install("acme", f"{REGISTER}add.reward_model('exact_match', 'a:b')")
    registry = loaded()
    with pytest.raises(PluginError, match="core:exact_match"):
        registry.find(Kind.REWARD_MODEL, "exact_match")
    assert registry.owner(Kind.REWARD_MODEL, "core:exact_match") == CORE


def test_two_specs_of_one_architecture_are_both_named_unless_one_is_preferred(site: Site) -> None:
    registry = both(site, f"{REGISTER}add.model_spec('tree', 'NAME_p.code:S', architectures={{'AcmeLM', 'NAMELM'}})")
    with pytest.raises(PluginError) as failure:
        registry.model_spec("AcmeLM")
    for name in ("AcmeLM", "acme-dist", "zeta-dist", "--no-plugin"):
        assert name in str(failure.value)
    preferred = registry.model_spec("AcmeLM", prefer=("zeta",))
    assert preferred is not None
    assert preferred[0].name == "zeta"
    single = registry.model_spec("zetaLM")
    assert single is not None
    assert single == registry.find(Kind.MODEL_SPEC, "zeta:tree")
    assert registry.model_spec("NobodyLM", implementation="megatron") is None


def test_a_spec_for_all_architectures_is_used_if_no_other_fits_or_its_implementation_is_named(site: Site) -> None:
    site.install("acme", f"{REGISTER}add.model_spec('acme', 'a.code:S', architectures={{'AcmeLM'}})")
    site.install("zeta", f"{REGISTER}add.model_spec('all', 'z.code:S', architectures={{'*'}}, implementation='own')")
    registry = loaded().only(("acme", "zeta"))
    chosen = {
        (architecture, implementation): offer and offer[1].name
        for architecture in ("AcmeLM", "NobodyLM")
        for implementation in ("auto", "megatron", "own", "other")
        for offer in [registry.model_spec(architecture, implementation=implementation)]
    }
    assert chosen == {
        ("AcmeLM", "auto"): "acme",
        ("AcmeLM", "megatron"): "acme",
        ("AcmeLM", "own"): "all",
        ("AcmeLM", "other"): None,
        ("NobodyLM", "auto"): "all",
        ("NobodyLM", "megatron"): None,
        ("NobodyLM", "own"): "all",
        ("NobodyLM", "other"): None,
    }


def test_a_plugin_that_hangs_while_it_is_imported_is_broken(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_core.plugins.registry.LIMIT_S", 0.05)
    site.install("acme", "import time\ntime.sleep(600)")
    registry = register([Plugin("acme", "acme-dist", "2.1", "acme_p.plugin")], required=())
    assert "TimeoutError" in str(registry.broken["acme"])


def test_a_command_of_two_plugins_is_that_of_the_first_by_name(site: Site) -> None:
    registry = both(site, f"{REGISTER}add.command('oak', 'NAME_p.code:main')")
    plugin, path = added_commands(registry)["oak"]
    assert (plugin.name, path) == ("acme", "acme_p.code:main")


# --- What plugins add -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "near"), [("cliped", "clipped"), ("nothing-like-it", "clipped")])
def test_a_component_that_no_plugin_offers_is_answered_with_those_that_exist(name: str, near: str) -> None:
    registry = activated()
    assert registry.offers(Kind.POLICY_LOSS, name) == []
    with pytest.raises(PluginError, match=rf"{name}(.|\n)*{near}"):
        registry.find(Kind.POLICY_LOSS, name)


def test_a_target_is_imported_when_it_is_loaded(site: Site) -> None:
    site.install("acme", REWARD.replace("NAME", "acme"), code=LENGTH)
    registry = loaded()
    assert "acme_p.code" not in sys.modules
    assert load(registry, Kind.REWARD_MODEL, "length") is sys.modules["acme_p.code"].Length


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import no_such_thing", ["ModuleNotFoundError", "code.py:1"]),
        ("", ["AttributeError", "Length"]),
        (LENGTH.replace("score", "scores"), ["score"]),
        (LENGTH.replace("async ", ""), ["score", "async"]),
    ],
    ids=["no module", "no class", "no method of its kind", "not async"],
)
def test_a_target_that_cannot_be_used_names_plugin_and_component(site: Site, code: str, names: list[str]) -> None:
    site.install("acme", REWARD.replace("NAME", "acme"), code=code)
    registry = loaded()
    assert registry.broken == {}
    with pytest.raises(PluginError) as failure:
        load(registry, Kind.REWARD_MODEL, "length")
    text = str(failure.value)
    assert [name for name in ("acme-dist 2.1", "'length'", "acme_p.code:Length", *names) if name not in text] == []


def test_a_file_and_a_module_offer_what_they_define(site: Site) -> None:
    code = f"{REGISTER}add.reward_model('mine', Mine)\n" + LENGTH.replace("Length", "Mine")
    (site.install("lab", points={}) / "lab_p/plugin.py").write_text(HEAD + code.replace("'mine'", "'other'"))
    registry = activated(site.file("mine", code), "lab_p.plugin")
    assert load(registry, Kind.REWARD_MODEL, "mine").__name__ == "Mine"
    assert registry.owner(Kind.REWARD_MODEL, "other").name == "lab_p_plugin"
    assert [plugin.name for plugin in registry.plugins] == ["core", "datasets", "mine", "lab_p_plugin"]


def test_an_entry_point_may_name_an_object(site: Site) -> None:
    source = "class Tree:\n    @hookimpl\n    def slime_register(self, add): add.presets(gamma=0.5)\ntree = Tree()\n"
    site.install("acme", source, points={"acme": "acme_p.plugin:tree"})
    assert loaded("acme").loaded["acme"].added.preset_values == {"gamma": 0.5}


@pytest.mark.parametrize("as_path", [False, True])
def test_options_are_a_class_or_its_path_and_have_defaults(site: Site, as_path: bool) -> None:
    source = options("x: int = Field(3, description='x')")
    site.install("acme", source.replace("add.options(Options)", "add.options('acme_p.plugin:Options')"))
    registry = loaded()
    assert list(registry.options["acme"].model_fields) == ["x"]
    assert registry.options_of("acme").x == 3
    assert registry.options_of("acme", {"acme": "others"}) == "others"
    assert registry.options_of("core") is None
    assert load_plugins(options=False).options == {}


def test_a_registry_of_some_plugins_has_the_components_of_no_other(site: Site) -> None:
    registry = both(site, REWARD).only(["core", "zeta", "zeta"])
    assert [plugin.name for plugin in registry.plugins] == ["core", "zeta"]
    assert registry.owner(Kind.REWARD_MODEL, "length").name == "zeta"
    assert [component.name for component in registry.loaded["zeta"].added.components] == ["length"]


def test_all_plugins_are_required_unless_the_caller_names_some(site: Site) -> None:
    site.install("acme", "import no_such_thing")
    plugin = Plugin("acme", "acme-dist", "2.1", "acme_p.plugin")
    with pytest.raises(PluginError):
        register([CORE, plugin])
    assert list(register([CORE, plugin], required={"core"}).broken) == ["acme"]


def test_every_installed_plugin_of_this_project_loads() -> None:
    registry = loaded()
    assert registry.broken == {}
    assert len(registry.loaded) >= 14
    assert "core" in registry.loaded


def test_one_module_is_one_plugin(site: Site) -> None:
    site.install("acme", REWARD.replace("NAME", "acme"))
    assert "acme" in refusal("acme", "acme_p.plugin")


def test_a_plugin_that_fails_is_not_called_for_the_next_one(site: Site) -> None:
    registry = both(site, f"{REGISTER}seen.append('NAME'); assert seen == ['NAME'] and 'NAME' != 'acme'")
    assert list(registry.broken) == ["acme"]
    assert "zeta" in registry.loaded
