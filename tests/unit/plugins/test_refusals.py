"""A model spec's plugin reports before the start which features of a checkpoint it does not build."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.construction import refusals
from slime_core.plugins.registry import Registry

PLUGIN = """
from slime_core import Component, ModelSpecTraits, hookimpl

@hookimpl
def slime_register_model_specs():
    traits = ModelSpecTraits(architectures={{"MyForCausalLM"}}, unsupported={refuses})
    yield Component("mine", target=f"{{__name__}}:Mine", traits=traits)

def texts(config):
    yield f"asks for {{config['layers']}} layers; only 1 is built"

def numbers(config):
    return [1]
"""
NAMED = 'f"{__name__}:texts"'


def registry(folder: Path, refuses: str) -> Registry:
    file = folder / "mine.py"
    file.write_text(PLUGIN.format(refuses=refuses))
    return activate([str(file)]).registry


def test_each_text_says_whose_spec_it_is(tmp_path):
    (found,) = refusals(registry(tmp_path, NAMED), "MyForCausalLM", {"layers": 2})
    assert re.match(r"asks for 2 layers; .*model spec 'mine' of plugin 'mine' \(", found), found


@pytest.mark.parametrize(("refuses", "architecture"), [("None", "MyForCausalLM"), (NAMED, "OtherForCausalLM")])
def test_a_spec_without_refuses_and_a_spec_of_another_architecture_refuse_nothing(tmp_path, refuses, architecture):
    assert refusals(registry(tmp_path, refuses), architecture, {"layers": 2}) == []


@pytest.mark.parametrize(
    ("refuses", "message"),
    [
        (NAMED, "KeyError: 'layers'"),
        ('f"{__name__}:numbers"', r"TypeError: .*\[1\]"),
        ('f"{__name__}:missing"', "AttributeError"),
    ],
)
def test_a_plugin_that_cannot_say_is_named(tmp_path, refuses, message):
    with pytest.raises(PluginError, match=rf"(?s)mine.*'mine' .*{message}"):
        refusals(registry(tmp_path, refuses), "MyForCausalLM", {})
