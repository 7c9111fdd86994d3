from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from slime_core import AdvantageTraits, Component, Kind, RewardTraits
from slime_core.config.load import load
from slime_core.config.settings import Contested
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.activation import activate

THING = "class Thing:\n    def __init__(self, options, run): ...\n    async def score(self, samples): ...\n"
HEAD = "from slime_core import *\n"


def rewards(*names: str, package: str = "acme") -> str:
    lines = "".join(f"    yield Component('{name}', target='{package}.code:Thing')\n" for name in names)
    return f"{HEAD}@hookimpl\ndef slime_register_reward_models():\n{lines}"


def specs(architecture: str) -> str:
    traits = f"ModelSpecTraits(architectures={{'{architecture}'}})"
    hook = "@hookimpl\ndef slime_register_model_specs():\n"
    return f"{HEAD}{hook}    yield Component('{architecture.lower()}', target='acme.code:Thing', traits={traits})\n"


def presets(returned: str) -> str:
    return f"{HEAD}@hookimpl\ndef slime_presets():\n    return {returned}\n"


def options(field: str) -> str:
    """A plugin whose options class has the field ``x`` of this annotation and default."""
    head = f"{HEAD}from datetime import timedelta\nfrom pydantic import BaseModel, Field\n"
    models = f"class Inner(BaseModel): y: int = 1\nclass O(BaseModel, frozen=True): x: {field}\n"
    return f"{head}{models}@hookimpl\ndef slime_options(): return O\n"


def refusal(*names: str, architecture: str | None = None) -> str:
    with pytest.raises(PluginError) as failure:
        activate(names, architecture=architecture)
    return str(failure.value)


def acme(install, source: str, name: str = "acme", version: str = "2.1", **more) -> None:
    install(name, version, plugins={name: f"{name}.plugin"}, files={f"{name}/plugin.py": source}, **more)


def test_without_a_name_only_core_is_active():
    active = activate([])
    assert [plugin.name for plugin in active.registry.plugins] == ["core"]
    assert {"exact_match", "random"} <= set(active.registry.names(Kind.REWARD_MODEL))
    assert active.registry.names(Kind.POLICY_LOSS) == ("clipped", "sft")
    assert active.by_need == ()


def test_a_named_plugin_is_active_and_its_neighbour_is_not_even_imported(install):
    install("acme", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": rewards("length")})
    install("other", plugins={"other": "other.plugin"}, files={"other/plugin.py": "raise SystemExit(3)"})
    registry = activate(["acme"]).registry
    assert registry.find(Kind.REWARD_MODEL, "length") == Component(
        "length", target="acme.code:Thing", traits=RewardTraits()
    )
    assert registry.owner(Kind.REWARD_MODEL, "length").distribution == "acme"
    assert "other" not in sys.modules


def test_naming_a_plugin_twice_or_core_at_all_changes_nothing(install):
    install("acme", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": rewards("length")})
    assert [plugin.name for plugin in activate(["acme", "core", "acme"]).registry.plugins] == ["core", "acme"]


def test_a_target_is_imported_only_when_it_is_loaded(install):
    code = {"acme/plugin.py": rewards("length"), "acme/code.py": THING}
    install("acme", plugins={"acme": "acme.plugin"}, files=code)
    registry = activate(["acme"]).registry
    assert "acme.code" not in sys.modules
    assert registry.load(Kind.REWARD_MODEL, "length") is sys.modules["acme.code"].Thing


def test_an_unknown_component_is_answered_with_what_there_is(install):
    with pytest.raises(PluginError, match=r"'cliped'.*'clipped'.*: clipped, sft\."):
        activate([]).registry.find(Kind.POLICY_LOSS, "cliped")


def test_a_broken_import_is_chained_and_names_distribution_version_and_line(install):
    acme(install, "import no_such_thing")
    with pytest.raises(PluginError, match=r"\(acme 2\.1, .*'no_such_thing' \(/.*/acme/plugin\.py:1\)") as failure:
        activate(["acme"])
    assert isinstance(failure.value.__cause__, ModuleNotFoundError)


def test_an_error_of_the_authors_own_code_names_its_line(install):
    code = {"acme/plugin.py": rewards("length"), "acme/code.py": "\n\nraise RuntimeError('no key')"}
    install("acme", plugins={"acme": "acme.plugin"}, files=code)
    with pytest.raises(PluginError, match=r"RuntimeError: no key \(/.*/acme/code\.py:3\)\n"):
        activate(["acme"]).registry.load(Kind.REWARD_MODEL, "length")
    install("zeta", plugins={"zeta": "zeta"}, files={"zeta.py": "\nraise RuntimeError('no key')"})
    assert re.search(r"RuntimeError: no key \(/.*/zeta\.py:2\)\n", refusal("zeta"))


@pytest.mark.parametrize(
    ("line", "place"),
    [("import helper", ":2"), ("from . import helper", ":2"), ("raise RuntimeError()", ":2"), ("x)", ", line 2")],
)
def test_a_single_file_that_cannot_be_imported_names_the_line(tmp_path, line, place):
    (tmp_path / "helper.py").touch()
    (tmp_path / "mine.py").write_text(f"import os\n{line}\n")
    text = refusal(str(tmp_path / "mine.py"))
    assert text.startswith(f"plugin 'mine' ({tmp_path}/mine.py sha256:")
    assert f"mine.py{place})\n" in text
    assert f"{tmp_path}/mine.py. " in text.splitlines()[-1]


def test_a_plugin_that_exits_while_it_is_imported_does_not_end_the_process(install):
    acme(install, "raise SystemExit(0)")
    assert "SystemExit: 0" in refusal("acme")


def test_two_plugins_that_offer_one_component_are_both_named(install):
    acme(install, rewards("length"))
    acme(install, rewards("length"), "zeta")
    assert re.search(r"'length'.*acme 2\.1.*zeta 2\.1", refusal("acme", "zeta"))
    acme(install, rewards("random"), "oak")
    assert re.search(r"'random'.*slime-rl.*oak 2\.1", refusal("oak"))


def test_a_preset_carries_the_plugin_that_sets_it(install):
    install("acme", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": presets("{'gamma': 0.9}")})
    assert activate(["acme"]).presets == {"gamma": (0.9, "acme")}


def test_a_preset_of_two_plugins_is_neither_of_theirs_even_if_they_agree(install):
    for name in ("acme", "zeta"):
        acme(install, presets("{'gamma': 0.9}"), name)
    presets_of_both = activate(["zeta", "acme"]).presets
    by = ("plugin 'zeta' (zeta 2.1, entry point zeta.plugin)", "plugin 'acme' (acme 2.1, entry point acme.plugin)")
    assert presets_of_both["gamma"][0] == Contested(by)
    with pytest.raises(ConfigError, match=r"acme 2\.1") as refused:
        load([], presets=presets_of_both, check_rules=False)
    assert refused.value.keys == {"gamma"}
    assert load(["--gamma", "0.8"], presets=presets_of_both, check_rules=False).config.algorithm.gamma == 0.8


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (presets("['gamma']"), "['gamma']"),
        (presets("{'eps-clip': 1}"), "['eps-clip']"),
        (rewards("length").replace("yield", "return"), "returned Component("),
        (rewards("length").replace("yield", "_ ="), "returned None"),
        (f"{HEAD}@hookimpl\ndef slime_register_trackers():\n    yield 'wandb'", "yielded 'wandb'"),
        (
            f"{HEAD}@hookimpl\ndef slime_register_trackers():\n"
            "    yield Component('t', target='a:b', traits=DataTraits())",
            "'t' carries DataTraits",
        ),
        (f"{HEAD}@hookimpl\ndef slime_options():\n    return dict", "PluginOptions"),
        (options("int = 1").replace(", frozen=True", ""), "frozen=True"),
        (options("int = 1"), "O.x needs"),
        (options("float = Field(1.0, alias='y', description='x')"), "O.x has an alias"),
        (options("int = Field('a', description='x')"), "O.x has the default 'a'"),
        (options("str = Field(timedelta(1), description='x')"), "datetime.timedelta(days=1)"),
        (presets("{'load': '/elsewhere', 'lock_file': 'mine', 'gamma': 1.0}"), " load, lock_file "),
        (presets("{'plugins': ('evil',)}"), " plugins "),
        (f"{HEAD}@hookimpl\ndef slime_presets():\n    return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_return_values_of_hooks_are_checked_and_attributed(install, source, found):
    acme(install, source)
    text = refusal("acme")
    assert "(acme 2.1, " in text
    assert " slime_" in text
    assert found in text


@pytest.mark.parametrize(
    "field",
    [
        "bool | None = Field(None, description='x')",
        "Path = Field(Path('data'), description='x')",
        "Literal['a', 2] = Field('a', description='x')",
        "tuple[Annotated[float, Field(gt=0)], ...] = Field((1.0,), description='x')",
        "Colour | None = Field(Colour.RED, description='x')",
        "dict[str, list[int]] = Field(default_factory=lambda: {'a': [1]}, description='x')",
    ],
)
def test_options_that_a_file_of_settings_can_hold_are_accepted(install, field):
    head = (
        "from enum import StrEnum\nfrom pathlib import Path\nfrom typing import *\nclass Colour(StrEnum): RED = 'red'\n"
    )
    install("acme", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": head + options(field)})
    assert list(activate(["acme"]).options["acme"].model_fields) == ["x"]


def test_a_hook_that_would_never_run_fails_the_activation(install):
    acme(install, rewards("length").replace("@hookimpl\n", ""))
    assert re.search(r"acme 2\.1.*slime_register_reward_models", refusal("acme"))


def test_an_entry_point_may_name_an_object(install):
    source = f"{HEAD}class P:\n    @hookimpl\n    def slime_presets(self): return {{'gamma': 1.0}}\nplugin = P()\n"
    install("acme", plugins={"acme": "acme.plugin:plugin"}, files={"acme/plugin.py": source})
    assert activate(["acme"]).presets == {"gamma": (1.0, "acme")}


def test_a_local_file_offers_components_of_its_own_module(tmp_path: Path, install):
    mine = THING.replace("Thing", "Mine")
    source = f"{HEAD}{mine}@hookimpl\ndef slime_register_reward_models():\n"
    (tmp_path / "mine.py").write_text(source + "    yield Component('mine', target=f'{__name__}:Mine')\n")
    registry = activate([str(tmp_path / "mine.py")]).registry
    assert registry.load(Kind.REWARD_MODEL, "mine").__name__ == "Mine"
    assert [plugin.name for plugin in registry.plugins] == ["core", "mine"]


def test_a_module_that_no_distribution_declares_can_be_named(install):
    install("unrelated", files={"my_lab/__init__.py": "", "my_lab/plugin.py": rewards("length")})
    assert {"exact_match", "length", "random"} <= set(activate(["my_lab.plugin"]).registry.names(Kind.REWARD_MODEL))


def test_one_piece_of_code_under_two_names_is_refused(install):
    acme(install, rewards("length"))
    assert refusal("acme", "acme.plugin").endswith(" acme.")


@pytest.mark.parametrize("name", ["data", "my plugin", "größe", "a.b"])
def test_a_name_that_no_section_of_a_file_can_have_is_refused(tmp_path, name):
    (tmp_path / f"{name}.py").write_text(rewards("length"))
    assert f"[{name}]" in refusal(str(tmp_path / f"{name}.py"))


def test_code_that_declares_nothing_is_no_plugin(tmp_path: Path):
    (tmp_path / "x.py").write_text("")
    for name in ("os.path", str(tmp_path / "x.py")):
        assert re.search(rf"'\w+' \((module )?{name}.*@hookimpl", refusal(name), re.DOTALL)


def test_two_plugins_of_one_name_are_both_named(tmp_path: Path, install):
    acme(install, rewards("length"))
    (tmp_path / "acme.py").write_text(rewards("width"))
    assert re.search(rf"'acme' \(acme 2\.1.*'acme' \({tmp_path}/acme\.py", refusal("acme", str(tmp_path / "acme.py")))


def test_the_architecture_activates_the_plugin_that_claims_it(install):
    acme(install, specs("AcmeLM"), claims={"AcmeLM": "acme"})
    active = activate([], architecture="AcmeLM")
    [need] = active.by_need
    assert (need.plugin.name, active.manifest.entries[1].needed_by) == ("acme", need.why)
    assert "AcmeLM" in need.why
    assert active.registry.model_spec("AcmeLM") == active.registry.find(Kind.MODEL_SPEC, "acmelm")
    assert [entry.plugin for entry in active.manifest.entries] == ["core", "acme"]


def test_a_named_plugin_with_a_model_spec_settles_two_claims(install):
    for name in ("acme", "zeta"):
        acme(install, specs("AcmeLM"), name, claims={"AcmeLM": name})
    assert re.search("AcmeLM.*--plugin acme:acme .*--plugin zeta:zeta", refusal(architecture="AcmeLM"), re.DOTALL)
    assert activate(["zeta"], architecture="AcmeLM").by_need == ()
    assert re.search("'acmelm'.*acme 2.*zeta 2", refusal("acme", "zeta", architecture="AcmeLM"))


def test_an_architecture_without_a_claim_is_answered_with_those_that_are_claimed(install):
    acme(install, "", claims={"AcmeLM": "acme"})
    assert re.search(r" NobodyLM.*: AcmeLM.*docs/models\.md", refusal(architecture="NobodyLM"), re.DOTALL)


def test_a_claim_that_the_plugin_does_not_keep_is_an_error(install):
    acme(install, specs("OtherLM"), claims={"AcmeLM": "acme"})
    assert re.search(r"acme 2\.1.*AcmeLM", refusal(architecture="AcmeLM"))


def test_the_installed_grpo_plugin_presets_the_estimator_it_offers():
    active = activate(["grpo"])
    assert active.presets == {"advantage_estimator": ("grpo", "grpo")}
    assert active.options["grpo"].model_fields["std_normalization"].default is True
    assert active.registry.find(Kind.ADVANTAGE_ESTIMATOR, "grpo").traits == AdvantageTraits(
        scope="sample", reads={"rewards", "groups", "rollouts"}, policy_loss="clipped"
    )


def test_a_target_that_is_not_there_names_plugin_and_component(install):
    acme(install, rewards("length"))
    registry = activate(["acme"]).registry
    with pytest.raises(PluginError, match=r"acme 2\.1.*acme\.code:Thing .*'length'.*'acme\.code'"):
        registry.load(Kind.REWARD_MODEL, "length")
