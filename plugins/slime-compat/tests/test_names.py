"""Files that import from ``slime``: the names that they can import, and the checks before a run."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest

from slime_compat.calling import call_async
from slime_compat.dapo import compute_score
from slime_compat.names import NAMES
from slime_core.errors import PluginError
from slime_core.types import Sample

REWARD = "def reward(args, sample): return 0.0\n"


@pytest.mark.parametrize("module", ["slime.data", "slime.utils.types"])
async def test_only_the_file_can_import_slimes_names_at_its_top_and_in_its_functions(write, module: str) -> None:
    code = f"""
        from {module} import Sample

        async def reward(args, sample):
            from slime.utils.types import Sample as Again
            return float(isinstance(sample, Sample) and Again is Sample)
    """
    loaded = write("custom_rm_path", code).function("custom_rm_path")
    assert "slime" not in sys.modules
    assert importlib.util.find_spec("slime") is None
    with pytest.raises(ModuleNotFoundError):
        import slime  # noqa: F401
    assert await call_async(loaded, None, Sample()) == 1.0
    assert "slime" not in sys.modules


@pytest.mark.parametrize("target", sorted({target for names in NAMES.values() for target in names.values()}))
def test_every_name_has_a_counterpart(target: str) -> None:
    module, _, attribute = target.partition(":")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(
    ("response", "label", "strict", "score", "pred"),
    [
        ("so\nAnswer: \\boxed{1,234}.", "1234", False, 1.0, "1234"),
        ("Answer: x = 3.0", 3, False, 1.0, "3.0"),
        ("Answer: $\\text{ten}$", "ten", False, 1.0, "ten"),
        ("it is 3", "3", False, -1.0, "[INVALID]"),
        ("\\boxed{2} or \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", True, 1.0, "\\frac{1}{2}"),
        ("Answer: 3", "3", True, -1.0, None),
        ("\\boxed{3}" + " " * 100, "3", True, -1.0, None),
    ],
)
def test_the_rule_of_dapo_by_hand(response: str, label: object, strict: bool, score: float, pred: str | None) -> None:
    result = compute_score(response, label, strict_box_verify=strict)
    assert result == {"score": score, "acc": score > 0, "pred": pred}


RULES = ("math", "deepscaler", "f1", "gpqa", "ifbench")


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("from slime.rollout.rm_hub import async_rm", ["line 2", "async_rm", "--rm-type"]),
        ("from slime.rollout import rm_hub as hub\nasync def f(s): return await hub.async_rm(s)", ["line 3: async_rm"]),
        ("import slime.rollout.rm_hub\nx = slime.rollout.rm_hub.batched_async_rm", ["line 3: batched_async_rm"]),
        ("from slime.rollout.rm_hub.math_utils import score", ["--rm-type math"]),
        *((f"from slime.rollout.rm_hub.{rule} import score", [f"--rm-type {rule}"]) for rule in RULES[1:]),
        ("from slime.data import Sampel", ["RolloutDataSource, RolloutDataSourceWithBuffer, Sample, pop_first"]),
        ("import slime.ray.rollout", ["line 2: slime.ray.rollout"]),
        ("import nowhere_at_all", ["line 2", "'nowhere_at_all'"]),
        ("from .neighbour import f", ["'neighbour'"]),
        ("def helper(): return undefined_name", ["line 2: 'undefined_name'"]),
        ("from other import x", ["other.py", "line 2", "'nowhere_at_all'"]),
        ("def helper():\n    import of_slime", ["of_slime.py", "slime.ray"]),
        ("import broken", ["broken.py"]),
        ("try:\n    import nowhere_at_all\nexcept ImportError as e:\n    raise ImportError('x') from e", ["line 3"]),
    ],
)
def test_names_that_do_not_exist_are_refused_before_a_run(write, code: str, named: list[str]) -> None:
    Path("other.py").write_text("\nimport nowhere_at_all")
    Path("of_slime.py").write_text("from slime.ray import rollout")
    Path("broken.py").write_text("def (")
    with pytest.raises(PluginError) as refused:
        write("custom_rm_path", f"# mine\n{code}\n{REWARD}", name=":reward")
    assert all(word in str(refused.value) for word in ("--custom-rm-path mine.py", *named))


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    import nowhere_at_all\nexcept ImportError:\n    nowhere_at_all = None",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nowhere_at_all import X",
        "def helper(web=False):\n    if web:\n        import nowhere_at_all",
        "from math import *\nprint(tau)",
        "def helper():\n    global made\n    made = 1\ndef other(): return made, [x for x in (1,)], __name__, __file__",
        "class A:\n    b = 1\n    def c(self): return super().__repr__(), __class__",
        "import slime.utils.types as types, slime.data\nx = types.Sample, slime.data.Sample",
        "from slime.rollout import sglang_rollout\nx = sglang_rollout.GenerateState",
    ],
)
def test_names_that_exist_are_accepted(write, code: str) -> None:
    write("custom_rm_path", f"{textwrap.dedent(code)}\n{REWARD}", name=":reward")
