"""A plugin under test is activated as in a run, and again in another process."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core import Kind, Place, RunView, harness
from slime_core.errors import ManifestMismatch, PluginError
from slime_core.harness import (
    LIFECYCLE_HOOKS,
    ActivePlugin,
    activate,
    core_sections,
    find_plugin,
    hook_parameters,
    installed,
    learner_info,
    only_core_installed,
    run_info,
)
from slime_core.harness.engines import connect, real_engine
from slime_core.harness.learner import train_step
from slime_testing.fake_engine import FakeEngine

SOURCE = """
from pydantic import BaseModel, ConfigDict, Field
from slime_core import Component, hookimpl

class Options(BaseModel):
    model_config = ConfigDict(frozen=True)
    factor: float = Field(2.0, description="What a letter counts.")

class Length:
    def __init__(self, options, run):
        self.factor = options.factor
        self.seed = run.seed
    async def score(self, samples):
        return [self.factor * len(sample.response) for sample in samples]

@hookimpl
def slime_register_reward_models():
    yield Component("length", target=f"{__name__}:Length")

@hookimpl
def slime_options():
    return Options

@hookimpl
def slime_after_weight_sync(version, options):
    raise RuntimeError(f"version {version}, factor {options.factor}")
"""
AGAIN = """
import sys
from slime_core import Kind
from slime_core.harness import ActivePlugin
plugin, options = ActivePlugin.from_json(sys.stdin.read())
print(plugin.identity.name, plugin.offers[0][1], options.factor, plugin.load(Kind.REWARD_MODEL, "length").__name__)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_an_active_plugin_offers_what_is_its_own_and_finds_what_core_offers(mine: Path):
    plugin = activate(str(mine))
    assert plugin.offers == ((Kind.REWARD_MODEL, "length"),)
    assert plugin.lifecycle == ("slime_after_weight_sync",)
    assert plugin.component(Kind.REWARD_MODEL, "exact_match").name == "exact_match"
    assert plugin.load(Kind.REWARD_MODEL, "length").__name__ == "Length"  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match="'width'"):
        plugin.load(Kind.REWARD_MODEL, "width")


def test_a_component_is_made_with_options_and_run_as_in_a_run(mine: Path):
    plugin = activate(str(mine))
    options = plugin.default_options()
    assert options is not None
    default = plugin.build(Kind.REWARD_MODEL, "length")
    given = plugin.build(
        Kind.REWARD_MODEL, "length", options=options.model_copy(update={"factor": 0.5}), run=RunView(seed=7)
    )
    assert (default.factor, default.seed, given.factor, given.seed) == (2.0, 1234, 0.5, 7)  # type: ignore[attr-defined]


def test_core_is_a_plugin_like_any_other():
    core = activate("core")
    assert (Kind.POLICY_LOSS, "clipped") in core.offers
    assert core.default_options() is None


def test_hooks_get_the_plugin_s_options_and_their_failures_are_kept(mine: Path):
    plugin = activate(str(mine))
    hooks = plugin.hooks(Place.DRIVER, plugin.default_options())
    hooks.call("slime_after_weight_sync", version=3)
    (warning,) = hooks.failures.take().warnings
    assert "RuntimeError: version 3, factor 2.0" in warning


def test_another_process_activates_the_same_code_with_the_same_options(mine: Path):
    plugin = activate(str(mine))
    options = plugin.default_options()
    assert options is not None
    text = plugin.to_json(options.model_copy(update={"factor": 0.5}))
    done = subprocess.run([sys.executable, "-c", AGAIN], input=text, text=True, capture_output=True, check=False)
    assert done.stdout == "mine length 0.5 Length\n", done.stderr


def test_another_process_with_other_code_refuses():
    text = activate("grpo").to_json(None)
    given = json.loads(text)
    manifest = json.loads(given["manifest"])
    manifest["plugins"][-1]["digest"] = "0" * 64
    with pytest.raises(ManifestMismatch, match="slime-grpo"):
        ActivePlugin.from_json(json.dumps({**given, "manifest": json.dumps(manifest)}))


def test_a_block_without_installed_plugins_finds_core_files_and_modules_only(mine: Path):
    with only_core_installed():
        assert {plugin.name for plugin in installed()} == {"core"}
        with pytest.raises(PluginError, match="--plugin grpo: "):
            find_plugin("grpo")
        assert activate(str(mine)).identity.name == "mine"
    assert "grpo" in {plugin.name for plugin in installed()}


def test_the_parameters_of_a_hook_are_those_of_its_specification():
    assert hook_parameters("slime_after_weight_sync") == ("version", "options")
    assert all(hook_parameters(hook)[-1] == "options" for hook in LIFECYCLE_HOOKS)
    with pytest.raises(PluginError, match="'slime_after_lunch'"):
        hook_parameters("slime_after_lunch")


def test_arguments_of_hooks_have_every_setting_at_its_default(tmp_path: Path):
    run, rank = run_info(tmp_path, step=1, num_rollout=5), learner_info(1, 2)
    assert (run.folder, run.step, run.num_rollout) == (tmp_path, 1, 5)
    assert (rank.rank, rank.world_size, rank.model, rank.optimizer) == (1, 2, (), None)
    assert run.settings["seed"] == rank.settings["seed"] == 1234
    assert {"algorithm", "rollout"} <= set(core_sections())


def test_the_client_of_a_run_asks_the_fake_engine():
    async def answer_of(url: str) -> list[int]:
        from slime_core.generation import SamplingParams

        async with connect(url, vocab_size=16) as client:
            (answer,) = await client.generate([3, 8], sampling=SamplingParams(max_new_tokens=2))
            return list(answer.token_ids)

    with FakeEngine(vocab_size=16) as engine:
        assert asyncio.run(answer_of(engine.url)) == [(3 + 8) % 14 + 2, (3 + 8 + 13) % 14 + 2]


def test_every_name_of_the_room_is_described_and_typed():
    named = {name: getattr(harness, name) for name in harness.__all__}
    functions = {name: found for name, found in named.items() if inspect.isfunction(found)}
    functions |= {f"ActivePlugin.{name}": one for name, one in inspect.getmembers(ActivePlugin, inspect.isfunction)}
    functions |= {"connect": connect, "real_engine": real_engine, "train_step": train_step}
    public = {name: one for name, one in functions.items() if name.rpartition(".")[2][0] != "_"}
    assert len(public) > 15
    for name, function in public.items():
        assert inspect.getdoc(function), name
        assert "return" in inspect.get_annotations(inspect.unwrap(function)), name
