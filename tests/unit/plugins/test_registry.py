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


def test_without_a_name_only_core_is_active():
    active = activate([])
    assert [plugin.name for plugin in active.registry.plugins] == ["core"]
    assert {"exact_match", "random"} <= set(active.registry.names(Kind.REWARD_MODEL))
    assert active.registry.names(Kind.POLICY_LOSS) == ("clipped", "sft")
    assert active.by_need == ()


def test_every_target_of_core_that_needs_no_engine_is_importable():
    registry = activate([]).registry
    for kind in (Kind.REWARD_MODEL, Kind.POLICY_LOSS):
        for name in registry.names(kind):
            assert isinstance(registry.load(kind, name), type)


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


def test_a_target_that_is_not_there_names_plugin_component_and_next_step(install):
    install("acme", "2.1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": rewards("length")})
    registry = activate(["acme"]).registry
    with pytest.raises(PluginError) as failure:
        registry.load(Kind.REWARD_MODEL, "length")
    assert str(failure.value) == (
        "plugin 'acme' (acme 2.1, entry point acme.plugin): importing acme.code:Thing of component 'length' failed "
        "with ModuleNotFoundError: No module named 'acme.code'\n"
        "Reinstall acme with what it depends on, report it to its author, or run without --plugin acme."
    )


def test_an_unknown_component_is_answered_with_what_there_is(install):
    install("acme", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": rewards("length")})
    with pytest.raises(PluginError) as failure:
        activate([]).registry.find(Kind.POLICY_LOSS, "cliped")
    text = str(failure.value)
    assert text.startswith(
        "no active plugin offers a policy loss called 'cliped' (did you mean 'clipped'?). "
        "The active plugins (core) offer: clipped, sft.\n"
        "Name the plugin that has it with --plugin NAME; slime plugins list says what is installed."
    )


def test_a_broken_import_is_chained_and_names_distribution_version_and_next_step(install):
    install("acme", "2.1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": "import no_such_thing"})
    with pytest.raises(PluginError) as failure:
        activate(["acme"])
    assert re.sub(r"\(/.*/acme/", "(", str(failure.value)) == (
        "plugin 'acme' (acme 2.1, entry point acme.plugin): importing it failed with ModuleNotFoundError: No module "
        "named 'no_such_thing' (plugin.py:1)\nReinstall acme with what it depends on, report it to its author, or run "
        "without --plugin acme."
    )
    assert isinstance(failure.value.__cause__, ModuleNotFoundError)


def test_an_error_of_the_authors_own_code_names_its_line(install):
    code = {"acme/plugin.py": rewards("length"), "acme/code.py": "\n\nraise RuntimeError('no key')"}
    install("acme", plugins={"acme": "acme.plugin"}, files=code)
    with pytest.raises(PluginError, match=r"RuntimeError: no key \(/.*/acme/code\.py:3\)\n"):
        activate(["acme"]).registry.load(Kind.REWARD_MODEL, "length")
    install("zeta", plugins={"zeta": "zeta"}, files={"zeta.py": "\nraise RuntimeError('no key')"})
    text = refusal("zeta")
    assert re.search(r"RuntimeError: no key \(/.*/zeta\.py:2\)\n.*, report it to its author", text)


@pytest.mark.parametrize(
    "line", ["import helper", "from . import helper", "raise RuntimeError()", "import slime_core)"]
)
def test_a_single_file_that_cannot_be_imported_names_the_line_and_what_to_do(tmp_path, line):
    (tmp_path / "helper.py").touch()
    (tmp_path / "mine.py").write_text(f"import os\n{line}\n")
    text = refusal(str(tmp_path / "mine.py"))
    assert (
        f"mine.py{', line 2' if ')' in line[-1:] and '(' not in line else ':2'})\nCorrect {tmp_path}/mine.py. " in text
    )
    assert text.endswith("or make a package: slime plugins new KIND NAME.")


def test_a_plugin_that_exits_while_it_is_imported_does_not_end_the_process(install):
    install("acme", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": "raise SystemExit(0)"})
    assert "importing it failed with SystemExit: 0" in refusal("acme")


def test_two_plugins_that_offer_one_component_are_both_named(install):
    install("acme", "1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": rewards("length")})
    install("zeta", "2", plugins={"zeta": "zeta.plugin"}, files={"zeta/plugin.py": rewards("length")})
    assert refusal("acme", "zeta") == (
        "the reward model 'length' is offered twice: by plugin 'acme' (acme 1, entry point acme.plugin) and by plugin "
        "'zeta' (zeta 2, entry point zeta.plugin).\n"
        "Name only one of these plugins, or ask an author for another component name."
    )


def test_a_plugin_cannot_take_a_name_of_core(install):
    install("acme", "1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": rewards("random")})
    assert refusal("acme").startswith("the reward model 'random' is offered twice: by plugin 'core' (slime-rl ")


def test_a_preset_carries_the_plugin_that_sets_it(install):
    install("acme", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": presets("{'gamma': 0.9}")})
    assert activate(["acme"]).presets == {"gamma": (0.9, "acme")}


def test_a_preset_of_two_plugins_is_neither_of_theirs_even_if_they_agree(install):
    install("acme", "1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": presets("{'gamma': 0.9}")})
    install("zeta", "2", plugins={"zeta": "zeta.plugin"}, files={"zeta/plugin.py": presets("{'gamma': 0.9}")})
    presets_of_both = activate(["zeta", "acme"]).presets
    by = ("plugin 'zeta' (zeta 2, entry point zeta.plugin)", "plugin 'acme' (acme 1, entry point acme.plugin)")
    assert presets_of_both["gamma"][0] == Contested(by)
    with pytest.raises(ConfigError) as refused:
        load([], presets=presets_of_both, check_rules=False)
    assert (
        f"gamma is preset by {by[0]} and by {by[1]}; say what it is to be with --gamma, or take one of them away with "
        "--no-plugin NAME\n"
    ) in str(refused.value)
    assert load(["--gamma", "0.8"], presets=presets_of_both, check_rules=False).config.algorithm.gamma == 0.8


@pytest.mark.parametrize(
    ("source", "mistake"),
    [
        (presets("['gamma']"), "it returned ['gamma']; return a dict from flag names to values"),
        (presets("{'eps-clip': 1}"), "the keys ['eps-clip'] are no flag names; write them with underscores"),
        (rewards("length").replace("yield", "return"), "; yield Components, or return a list"),
        (rewards("length").replace("yield", "_ ="), "it returned None; yield Components, or return a list"),
        (f"{HEAD}@hookimpl\ndef slime_register_trackers():\n    yield 'wandb'", "it yielded 'wandb'; yield Component("),
        (
            f"{HEAD}@hookimpl\ndef slime_register_trackers():\n"
            "    yield Component('t', target='a:b', traits=DataTraits())",
            "component 't' carries DataTraits; a tracker carries TrackerTraits",
        ),
        (f"{HEAD}@hookimpl\ndef slime_options():\n    return dict", "return a subclass of slime_core.PluginOptions"),
        (
            f"{HEAD}from pydantic import BaseModel\nclass O(BaseModel): x: int = 1\n"
            "@hookimpl\ndef slime_options():\n    return O",
            "O is not frozen; give it model_config = ConfigDict(frozen=True)",
        ),
        (
            f"{HEAD}from pydantic import BaseModel\nclass O(BaseModel, frozen=True): x: int = 1\n"
            "@hookimpl\ndef slime_options():\n    return O",
            "O.x needs a default and help",
        ),
        (
            options("float = Field(1.0, alias='y', description='x')"),
            "O.x has an alias or letters beyond a to z; a sett",
        ),
        (
            options("int = Field('a', description='x')"),
            "O.x has the default 'a', which config.toml cannot hold: found \"a\"; accepted: a whole number",
        ),
        (
            options("str = Field(timedelta(1), description='x')"),
            "O.x has the default datetime.timedelta(days=1), which config.toml cannot hold: a setting of ",
        ),
        (
            presets("{'load': '/elsewhere', 'lock_file': 'mine', 'gamma': 1.0}"),
            "load, lock_file cannot be preset: which code and weights a run loads, only the run says",
        ),
        (presets("{'plugins': ('evil',)}"), "plugins cannot be preset"),
        (f"{HEAD}@hookimpl\ndef slime_presets():\n    return 1 / 0", "failed with ZeroDivisionError: division by zero"),
    ],
)
def test_return_values_of_hooks_are_checked_and_attributed(install, source, mistake):
    install("acme", "2.1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": source})
    found = refusal("acme")
    assert found.startswith("plugin 'acme' (acme 2.1, entry point acme.plugin): calling slime_")
    assert mistake in found


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
    source = rewards("length").replace("@hookimpl\n", "")
    install("acme", "2.1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": source})
    assert "slime_register_reward_models is not marked as a hook" in refusal("acme")


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


def test_a_broken_local_file_is_named_by_its_path(tmp_path: Path, install):
    (tmp_path / "mine.py").write_text("from neighbour import thing\n")
    found = refusal(str(tmp_path / "mine.py"))
    assert found.startswith(f"plugin 'mine' ({tmp_path}/mine.py sha256:")
    assert "(" + str(tmp_path / "mine.py") + ":1)\nCorrect " in found


def test_a_module_that_no_distribution_declares_can_be_named(install):
    install("unrelated", files={"my_lab/__init__.py": "", "my_lab/plugin.py": rewards("length")})
    assert {"exact_match", "length", "random"} <= set(activate(["my_lab.plugin"]).registry.names(Kind.REWARD_MODEL))


def test_one_piece_of_code_under_two_names_is_refused(install):
    install("acme", "1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": rewards("length")})
    assert refusal("acme", "acme.plugin").endswith("are the same code.\nName it once, as acme.")


@pytest.mark.parametrize("name", ["data", "my plugin", "größe", "a.b"])
def test_a_name_that_no_section_of_a_file_can_have_is_refused(tmp_path, name):
    (tmp_path / f"{name}.py").write_text(rewards("length"))
    assert refusal(str(tmp_path / f"{name}.py")).endswith(
        f"no plugin can have this name: its options would stand in [{name}], which holds settings of the core or is "
        "not a section of a TOML file; accepted: the letters a to z, digits, - and _.\n"
        f"Rename it, or report this to the author of {tmp_path}/{name}.py."
    )


def test_code_that_declares_nothing_is_no_plugin(tmp_path: Path):
    (tmp_path / "x.py").write_text("")
    for name in ("os.path", str(tmp_path / "x.py")):
        assert refusal(name).endswith(
            " declares no component, preset, option or hook, so a run is the same without it.\n"
            "Name what has them, or mark a function of it with @hookimpl, such as slime_register_reward_models."
        )


def test_two_plugins_of_one_name_are_both_named(tmp_path: Path, install):
    install("acme", "1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": rewards("length")})
    (tmp_path / "acme.py").write_text(rewards("width"))
    found = refusal("acme", str(tmp_path / "acme.py"))
    assert found.startswith(
        "two plugins share one name: plugin 'acme' (acme 1, entry point acme.plugin) and plugin 'acme'"
    )


def test_the_architecture_activates_the_plugin_that_claims_it(install):
    files = {"acme/plugin.py": specs("AcmeLM")}
    install("acme", plugins={"acme": "acme.plugin"}, claims={"AcmeLM": "acme"}, files=files)
    active = activate([], architecture="AcmeLM")
    assert [str(need) for need in active.by_need] == ["acme is active because the model's architecture AcmeLM needs it"]
    assert active.manifest.entries[1].needed_by == "the model's architecture AcmeLM needs it"
    assert active.registry.model_spec("AcmeLM") == active.registry.find(Kind.MODEL_SPEC, "acmelm")
    assert [entry.plugin for entry in active.manifest.entries] == ["core", "acme"]


def test_a_named_plugin_with_a_model_spec_settles_two_claims(install):
    for name in ("acme", "zeta"):
        files = {f"{name}/plugin.py": specs("AcmeLM")}
        install(name, "1", plugins={name: f"{name}.plugin"}, claims={"AcmeLM": name}, files=files)
    assert refusal(architecture="AcmeLM") == (
        "architecture AcmeLM: plugin 'acme' (acme 1, entry point acme.plugin) and plugin 'zeta' (zeta 1, entry point "
        "zeta.plugin) claim one name.\nName the one that is meant: --plugin acme:acme or --plugin zeta:zeta."
    )
    assert activate(["zeta"], architecture="AcmeLM").by_need == ()
    assert refusal("acme", "zeta", architecture="AcmeLM").startswith("the model spec 'acmelm' is offered twice")


def test_an_architecture_without_a_claim_says_what_to_install(install):
    install("acme", plugins={"acme": "acme.plugin"}, claims={"AcmeLM": "acme"}, files={"acme/plugin.py": ""})
    found = refusal(architecture="NobodyLM")
    assert found.startswith(
        "no active plugin has a model spec for architecture NobodyLM, and no installed one claims it. "
        "Claimed architectures: Acme"
    )
    assert "or write a plugin with a model spec for it (docs/models.md) and name it: --plugin ./mine.py" in found


def test_a_claim_that_the_plugin_does_not_keep_is_an_error(install):
    files = {"acme/plugin.py": specs("OtherLM")}
    install("acme", "1", plugins={"acme": "acme.plugin"}, claims={"AcmeLM": "acme"}, files=files)
    assert refusal(architecture="AcmeLM").startswith(
        "plugin 'acme' (acme 1, entry point acme.plugin) claims architecture AcmeLM, but declares no model spec for it."
    )


def test_the_installed_grpo_plugin_presets_the_estimator_it_offers():
    active = activate(["grpo"])
    assert active.presets == {"advantage_estimator": ("grpo", "grpo")}
    assert active.options["grpo"].model_fields["std_normalization"].default is True
    assert active.registry.find(Kind.ADVANTAGE_ESTIMATOR, "grpo").traits == AdvantageTraits(
        scope="sample", reads={"rewards", "groups", "rollouts"}, policy_loss="clipped"
    )


@pytest.mark.parametrize("name", ["grpo", "ppo", "searchr1"])
def test_the_targets_of_our_own_plugins_are_importable(name):
    registry = activate([name]).registry
    for kind in (Kind.ADVANTAGE_ESTIMATOR, Kind.REWARD_MODEL):
        for component in registry.names(kind):
            assert isinstance(registry.load(kind, component), type)
