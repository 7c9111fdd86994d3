"""A plugin under test is loaded as in a run, and again in another process."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_core import Place, RunView
from slime_core.errors import ManifestMismatch, PluginError
from slime_core.generation import SamplingParams
from slime_testing import harness
from slime_testing.fake_engine import FakeEngine
from slime_testing.harness import (
    PLACES,
    ActivePlugin,
    Kind,
    activate,
    core_sections,
    find_plugin,
    hook_parameters,
    installed_plugins,
    learner_info,
    only_core_installed,
    owner_of,
    run_info,
)
from slime_testing.harness.engines import connect, real_engine
from slime_testing.harness.learner import train_step

SOURCE = """
from slime_core import PluginOptions, hookimpl

class Options(PluginOptions):
    factor: float = 2.0
    \"\"\"Reward of a letter.\"\"\"

class Length:
    def __init__(self, options, run):
        self.factor = options.factor
        self.seed = run.seed
    async def score(self, samples):
        return [self.factor * len(sample.response) for sample in samples]

@hookimpl
def slime_register(add):
    add.reward_model("length", Length)
    add.options(Options)

@hookimpl
def slime_after_weight_sync(version, options):
    raise RuntimeError(f"version {version}, factor {options.factor}")
"""
AGAIN = """
import sys
from slime_testing.harness import ActivePlugin, Kind
active, options = ActivePlugin.from_json(sys.stdin.read())
print(active.plugin.name, active.components[0].name, options.factor, active.load(Kind.REWARD_MODEL, "length").__name__)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_an_active_plugin_has_its_components_and_finds_those_of_core(mine: Path) -> None:
    active = activate(str(mine))
    assert [(component.kind, component.name) for component in active.components] == [(Kind.REWARD_MODEL, "length")]
    assert active.added.options_target is not None
    assert active.lifecycle == ("slime_after_weight_sync",)
    assert active.component(Kind.REWARD_MODEL, "exact_match").name == "exact_match"
    target: Any = active.load(Kind.REWARD_MODEL, "length")
    assert target.__name__ == "Length"
    with pytest.raises(PluginError, match="'width'"):
        active.load(Kind.REWARD_MODEL, "width")


def test_a_component_is_built_with_options_and_run_as_in_a_run(mine: Path) -> None:
    active = activate(str(mine))
    options = active.default_options()
    assert options is not None
    default: Any = active.build(Kind.REWARD_MODEL, "length")
    half = options.model_copy(update={"factor": 0.5})
    built: Any = active.build(Kind.REWARD_MODEL, "length", options=half, run=RunView(seed=7))
    assert (default.factor, default.seed, built.factor, built.seed) == (2.0, 1234, 0.5, 7)


def test_core_is_a_plugin_like_any_other() -> None:
    core = activate("core")
    assert (Kind.POLICY_LOSS, "clipped") in [(component.kind, component.name) for component in core.components]
    assert core.default_options() is None


def test_hooks_get_the_plugin_s_options_and_their_failures_are_recorded(mine: Path) -> None:
    hooks = activate(str(mine)).hooks(Place.DRIVER)
    hooks.call("slime_after_weight_sync", version=3)
    (warning,) = hooks.failures.take().warnings
    assert "RuntimeError: version 3, factor 2.0" in warning


def test_another_process_loads_the_same_code_with_the_same_options(mine: Path) -> None:
    active = activate(str(mine))
    options = active.default_options()
    assert options is not None
    text = active.to_json(options.model_copy(update={"factor": 0.5}))
    done = subprocess.run([sys.executable, "-c", AGAIN], input=text, text=True, capture_output=True, check=False)
    assert done.stdout == "mine length 0.5 Length\n", done.stderr


def test_another_process_with_other_code_refuses() -> None:
    values = json.loads(activate("grpo").to_json(None))
    manifest = json.loads(values["manifest"])
    manifest["plugins"][-1]["digest"] = "0" * 64
    with pytest.raises(ManifestMismatch, match="slime-grpo"):
        ActivePlugin.from_json(json.dumps({**values, "manifest": json.dumps(manifest)}))


def test_installed_plugins_are_found_unless_they_are_hidden(mine: Path) -> None:
    assert owner_of(Kind.ADVANTAGE_ESTIMATOR, "grpo").name == find_plugin("grpo").name == "grpo"
    with only_core_installed():
        assert {plugin.name for plugin in installed_plugins()} == {"core"}
        with pytest.raises(PluginError, match="grpo"):
            find_plugin("grpo")
        assert activate(str(mine)).plugin.name == "mine"
    assert "grpo" in {plugin.name for plugin in installed_plugins()}


def test_the_parameters_of_a_hook_are_those_of_its_specification() -> None:
    assert hook_parameters("slime_after_weight_sync") == ("version", "options")
    assert all(hook_parameters(hook)[-1] == "options" for hook in PLACES)
    with pytest.raises(PluginError, match="'slime_after_lunch'"):
        hook_parameters("slime_after_lunch")


def test_arguments_of_hooks_have_every_setting_at_its_default(tmp_path: Path) -> None:
    run, rank = run_info(tmp_path, step=1, num_rollout=5), learner_info(1, 2)
    assert (run.folder, run.step, run.num_rollout) == (tmp_path, 1, 5)
    assert (rank.rank, rank.world_size, rank.model, rank.optimizer) == (1, 2, (), None)
    assert run.settings["seed"] == rank.settings["seed"] == 1234
    assert {"algorithm", "rollout"} <= set(core_sections())


async def _answer_of(url: str) -> list[int]:
    async with connect(url, vocab_size=16) as client:
        (answer,) = await client.generate([3, 8], sampling=SamplingParams(max_new_tokens=2))
        return list(answer.token_ids)


def test_the_client_of_a_run_requests_from_the_fake_engine() -> None:
    with FakeEngine(vocab_size=16) as engine:
        assert asyncio.run(_answer_of(engine.url)) == [(3 + 8) % 14 + 2, (3 + 8 + 13) % 14 + 2]


def test_every_public_name_is_described_and_typed() -> None:
    functions = {name: getattr(harness, name) for name in harness.__all__}
    functions |= {f"ActivePlugin.{name}": each for name, each in inspect.getmembers(ActivePlugin, inspect.isfunction)}
    functions |= {"connect": connect, "real_engine": real_engine, "train_step": train_step}
    public = {name: each for name, each in functions.items() if name.rpartition(".")[2][0] != "_"}
    public = {name: each for name, each in public.items() if inspect.isfunction(each)}
    assert len(public) > 15
    for name, function in public.items():
        assert inspect.getdoc(function), name
        assert "return" in inspect.get_annotations(inspect.unwrap(function)), name
