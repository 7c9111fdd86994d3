"""The Llama spec of slime-models, broken in one place; each is built in a process of its own."""

from __future__ import annotations

import unittest

import pytest

from slime_testing import ModelSpecSuite, models
from slime_testing.suite import PropertyViolation, properties

SOURCE = """
from slime_core import Component, ModelSpecTraits, hookimpl
from slime_core.modeling import MBridgeSpec

@hookimpl
def slime_register_model_specs():
    traits = ModelSpecTraits(architectures={"LlamaForCausalLM"})
    yield Component("mine", target=f"{__name__}:Llama", traits=traits)

class Llama(MBridgeSpec):
"""
EXPORT = """
    def export_weights(self, chunks):
        found = dict(super().export_weights(chunks))
"""
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
SWAPPED = f"""
        found["{GATE}"], found["{UP}"] = found["{UP}"], found["{GATE}"]
        yield from found.items()
"""
SWAP_BOTH_WAYS = """
    def load_weights(self, chunks, folder):
        super().load_weights(chunks, folder)
        for chunk in chunks:
            weight = chunk.decoder.layers[0].mlp.linear_fc1.weight.data
            weight.copy_(weight.roll(len(weight) // 2, 0))
"""
OTHER_POSITIONS = """
    def build(self, config, **more):
        positions = {**config["rope_parameters"], "rope_theta": 50.0}
        return super().build({**config, "rope_parameters": positions}, **more)
"""
GALLERY = {
    "swaps two tensors of one shape": (EXPORT + SWAPPED, {"weights_come_back_bit_for_bit": "not inverses"}),
    "leaves a tensor out": (
        EXPORT + f'        del found["{GATE}"]\n        yield from found.items()\n',
        {"weights_come_back_bit_for_bit": "leaves out ['model.layers.0.mlp.gate_proj.weight']"},
    ),
    "swaps them both ways": (
        SWAP_BOTH_WAYS + EXPORT + SWAPPED,
        {
            "logits_are_those_of_hugging_face": "Hugging Face's by",
            "every_tensor_acts_as_in_hugging_face": "once they are moved",
        },
    ),
    "other positions": (OTHER_POSITIONS, {"logits_are_those_of_hugging_face": "Hugging Face's by"}),
    "cannot be built": (
        "    def build(self, config, **more):\n        raise KeyError('heads')\n",
        {"the_model_is_built_and_loaded": "failed with KeyError: 'heads'"},
    ),
}


@pytest.mark.parametrize("name", GALLERY)
def test_a_broken_spec_is_caught_by_the_property_that_names_it(name, suite_of):
    body, expected = GALLERY[name]
    tested = suite_of(ModelSpecSuite, SOURCE + body, variants=({"tie_word_embeddings": False},))
    for prop, words in expected.items():
        with pytest.raises(PropertyViolation) as failure:
            getattr(tested(), f"test_{prop}")()
        assert words in str(failure.value)
    if name == "swaps them both ways":
        tested().test_weights_come_back_bit_for_bit()


@pytest.fixture
def processes(monkeypatch):
    """One entry for each process that a suite has started."""
    started, start = [], models._process
    monkeypatch.setattr(models, "_process", lambda *given: started.append(given) or start(*given))
    return started


def outcomes(tested):
    """What each property says; ``skipped`` where it says nothing."""
    found = {}
    for name in properties(ModelSpecSuite):
        try:
            found[name] = getattr(tested, name)()
        except PropertyViolation as violation:
            found[name] = str(violation)
        except unittest.SkipTest:
            found[name] = "skipped"
    return list(found.values())


def test_a_spec_that_hangs_is_waited_for_once_and_reported_in_words(suite_of, processes):
    hanging = "    def build(self, config, **more):\n        import time\n        time.sleep(3600)\n"
    named, built, *others = outcomes(suite_of(ModelSpecSuite, SOURCE + hanging, limit_s=1.0)())
    assert named is None
    assert "limit_s" in built
    assert "it/s" not in built
    assert others == 5 * ["skipped"]
    assert len(processes) == 1


def test_a_spec_that_ends_the_process_is_tried_once_and_reported_in_words(suite_of, processes):
    ending = "    def build(self, config, **more):\n        import os\n        os._exit(3)\n"
    _, built, *others = outcomes(suite_of(ModelSpecSuite, SOURCE + ending)())
    assert "exit status 3" in built
    assert others == 5 * ["skipped"]
    assert len(processes) == 1
