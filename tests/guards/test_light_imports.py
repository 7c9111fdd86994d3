"""The edges stay light: what every command imports first loads no engine, no torch and no Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "ray", "megatron", "sglang", "transformers", "mbridge", "numpy"}
PROGRAM = "import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
LIST = "import sys; from slime_core.cli.plugins import list_plugins; list_plugins(); print(*sys.modules)"
LOADED = """
import sys
from slime_core.plugins.activation import activate
activate(["grpo", "offpolicy", "ppo", "rewards", "searchr1"])
print(*sys.modules)
"""


def loaded_by(program: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


LOOKED_UP = """
import sys
from slime_core import RunView
from slime_core.components.construction import refusals
from slime_core.plugins.activation import activate
registry = activate(["models"]).registry
for architecture in ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM"):
    assert refusals(registry, architecture, {"hidden_act": "gelu"}, RunView())
print(*sys.modules)
"""


@pytest.mark.parametrize("module", ["slime_core", "slime_core.cli.plugins", "slime_core.plugins.activation"])
def test_importing_loads_nothing_heavy(module):
    assert not loaded_by(PROGRAM.format(module=module)) & HEAVY


def test_listing_plugins_loads_nothing_heavy_and_not_even_pydantic() -> None:
    assert not loaded_by(LIST) & (HEAVY | {"pydantic"})


def test_activating_our_own_plugins_loads_nothing_heavy():
    found = loaded_by(LOADED)
    assert {"slime_grpo", "slime_offpolicy", "slime_ppo", "slime_rewards", "slime_searchr1"} <= found
    assert not found & HEAVY


def test_asking_our_own_model_specs_what_they_do_not_build_loads_nothing_heavy():
    assert not loaded_by(LOOKED_UP) & HEAVY


def test_what_starts_a_run_loads_nothing_that_computes():
    computing = {"torch", "megatron", "sglang", "transformers", "mbridge"}
    assert not loaded_by(PROGRAM.format(module="slime_core.launch")) & computing


def test_a_rank_loads_no_megatron_before_it_is_made_to_run_on_a_cpu():
    """``slime_core.modeling.prepare_megatron`` refuses to come after Megatron."""
    assert "megatron" not in loaded_by(PROGRAM.format(module="slime_core.learner.actor, slime_core.learner.rank"))
