"""Code that imports from ``slime``, in files that a run names by path: what it finds, and what check says."""

from __future__ import annotations

import importlib.util
import sys
import textwrap

import pytest

from slime_compat.check import load_checked
from slime_compat.forms import rollout_forms
from slime_compat.names import NAMES
from slime_compat.options import PathOptions
from slime_core.errors import PluginError
from slime_core.types import Sample
from tests.function_paths import handed, resolve

FORMS = rollout_forms(group_rm=False)


def given(tmp_path, code: str, flag: str = "custom-rm-path") -> PathOptions:
    (tmp_path / "mine.py").write_text(textwrap.dedent(code))
    return handed([f"--{flag}", f"{tmp_path}/mine.py"])


def checked(tmp_path, code: str, *flags: str) -> None:
    from slime_core.plugins.selection import check_settings

    (tmp_path / "mine.py").write_text(textwrap.dedent(code))
    resolved, active = resolve(["--plugin", "grpo", "--custom-rm-path", f"{tmp_path}/mine.py", *flags])
    check_settings(resolved, active.registry, code=active.functions)


REWARD = """
    async def reward(args, sample):
        from slime.utils.types import Sample as Again
        return float(isinstance(sample, Sample) and Again is Sample)
"""


@pytest.mark.parametrize("module", ["slime.data", "slime.utils.types"])
async def test_a_file_finds_slimes_names_at_its_top_and_in_its_functions(tmp_path, module) -> None:
    code = f"from {module} import Sample\n{textwrap.dedent(REWARD)}"
    loaded = load_checked(given(tmp_path, code), "custom_rm_path", FORMS)
    assert await loaded.function(None, Sample()) == 1.0


async def test_no_other_code_finds_a_package_called_slime(tmp_path) -> None:
    load_checked(given(tmp_path, f"from slime.data import Sample\n{textwrap.dedent(REWARD)}"), "custom_rm_path", FORMS)
    assert "slime" not in sys.modules
    assert importlib.util.find_spec("slime") is None
    with pytest.raises(ModuleNotFoundError):
        import slime  # noqa: F401


@pytest.mark.parametrize("name", [f"{module}:{name}" for module, names in NAMES.items() for name in names])
def test_every_name_leads_somewhere(name: str) -> None:
    module, _, attribute = name.partition(":")
    if "megatron" in module:
        pytest.importorskip("torch")
    target, _, found = NAMES[module][attribute].partition(":")
    assert hasattr(importlib.import_module(target), found)


RULES = {
    module: f"--rm-type {name}"
    for module, name in {
        "math_utils": "math",
        "deepscaler": "deepscaler",
        "f1": "f1",
        "gpqa": "gpqa",
        "ifbench": "ifbench",
    }.items()
}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("from slime.rollout.rm_hub import async_rm", "--rm-type NAME"),
        (
            "from slime.rollout import rm_hub as hub\nasync def score(sample): return await hub.async_rm(None, sample)",
            "3: async_rm",
        ),
        ("import slime.rollout.rm_hub\nscore = slime.rollout.rm_hub.batched_async_rm", "3: batched_async_rm"),
        *((f"from slime.rollout.rm_hub.{module} import score", advice) for module, advice in RULES.items()),
        ("from slime.data import Sampel", "RolloutDataSource, RolloutDataSourceWithBuffer, Sample, pop_first"),
        ("import slime.ray.rollout", "2: slime.ray.rollout"),
        ("import nowhere_at_all", "'nowhere_at_all'"),
        ("from .neighbour import f", "'neighbour'"),
        ("def helper(): return undefined_name", "2: 'undefined_name'"),
    ],
)
def test_check_says_what_a_file_lacks_before_anything_starts(tmp_path, code, message) -> None:
    with pytest.raises(PluginError) as caught:
        checked(tmp_path, f"# mine\n{code}\ndef reward(args, sample): return 0.0\n")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    import nowhere_at_all\nexcept ImportError:\n    nowhere_at_all = None",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nowhere_at_all import X",
        "from math import *\nprint(tau)",
        "def helper():\n    global made\n    made = 1\ndef other(): return made, [x for x in (1,)], __name__, __file__",
        "class A:\n    b = 1\n    def c(self): return super().__repr__(), __class__",
        "import slime.utils.types as types, slime.data\nx = types.Sample, slime.data.Sample",
        "from slime.rollout import sglang_rollout\nx = sglang_rollout.GenerateState",
    ],
)
def test_names_that_exist_are_accepted(tmp_path, code) -> None:
    checked(tmp_path, f"{code}\ndef reward(args, sample): return 0.0\n")


BOTH = """
    async def reward_func(args, sample, **kwargs) -> float:
        return 1.0

    async def batched_custom_rm(args, samples) -> list[float]:
        return [2.0 for _ in samples]
"""


@pytest.mark.parametrize(("group_rm", "name"), [(False, "reward_func"), (True, "batched_custom_rm")])
def test_group_rm_chooses_between_two_reward_functions_of_a_file(tmp_path, group_rm, name) -> None:
    checked(tmp_path, BOTH, *(["--group-rm"] if group_rm else []))
    loaded = load_checked(given(tmp_path, BOTH), "custom_rm_path", rollout_forms(group_rm=group_rm))
    assert loaded.function.__name__ == name


def test_a_reward_class_that_needs_a_model_says_so_before_anything_starts(tmp_path) -> None:
    code = """
    class Judge:
        def __init__(self, model_path):
            self.path = model_path

        def compute_reward(self, prompts, responses):
            return [0.0 for _ in prompts]
    """
    with pytest.raises(PluginError, match="model_path"):
        checked(tmp_path, code)
    checked(tmp_path, code, "--rm-model-path", str(tmp_path))
    checked(tmp_path, code.replace("model_path)", "model_path=None)"))
