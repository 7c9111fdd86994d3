"""A Llama spec, broken in one place; each is built in a separate process."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from slime_testing import ModelSpecSuite, models
from slime_testing.suite import PropertyViolation, properties

ADDED = 'model_spec("mine", Llama, architectures={"LlamaForCausalLM"})'
SOURCE = """
from slime_core.modeling import MBridgeSpec

class Llama(MBridgeSpec):
    pass
"""
EXPORT = """
    def export_weights(self, chunks):
        weights = dict(super().export_weights(chunks))
"""
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
SWAPPED = f"""
        weights["{GATE}"], weights["{UP}"] = weights["{UP}"], weights["{GATE}"]
        yield from weights.items()
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
FAILS = "    def build(self, config, **more):\n        raise KeyError('heads')\n"
ROUND_TRIP, LOGITS = "weights_come_back_bit_for_bit", "logits_are_those_of_hugging_face"
BROKEN = {
    "swaps two tensors of one shape": (EXPORT + SWAPPED, {ROUND_TRIP: GATE}),
    "leaves a tensor out": (
        f'{EXPORT}        del weights["{GATE}"]\n        yield from weights.items()',
        {ROUND_TRIP: GATE},
    ),
    "swaps them both ways": (
        SWAP_BOTH_WAYS + EXPORT + SWAPPED,
        {LOGITS: "", "every_tensor_acts_as_in_hugging_face": GATE},
    ),
    "other positions": (OTHER_POSITIONS, {LOGITS: ""}),
    "cannot be built": (FAILS, {"the_model_is_built_and_loaded": "KeyError: 'heads'"}),
}
HANGS = "    def build(self, config, **more):\n        import time\n        time.sleep(3600)\n"
ENDS = "    def build(self, config, **more):\n        import os\n        os._exit(3)\n"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_spec_is_caught(name: str, suite_of: Callable[..., Any]) -> None:
    body, expected = BROKEN[name]
    source = SOURCE.replace("    pass\n", body)
    tested = suite_of(ModelSpecSuite, source, ADDED, variants=({"tie_word_embeddings": False},))
    for prop, word in expected.items():
        with pytest.raises(PropertyViolation) as failure:
            getattr(tested(), f"test_{prop}")()
        assert word in str(failure.value)
    if name == "swaps them both ways":
        tested().test_weights_come_back_bit_for_bit()


@pytest.mark.parametrize(("body", "limit_s", "word"), [(HANGS, 1.0, "limit_s"), (ENDS, 300.0, "status 3")])
def test_a_process_that_reports_nothing_runs_once(
    body: str, limit_s: float, word: str, suite_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Mock(side_effect=models._process)
    monkeypatch.setattr(models, "_process", started)
    tested = suite_of(ModelSpecSuite, SOURCE.replace("    pass\n", body), ADDED, limit_s=limit_s)()
    declared, built, *others = [outcome(tested, name) for name in properties(ModelSpecSuite)]
    assert declared is None
    assert word in str(built)
    assert others == 5 * ["skipped"]
    assert started.call_count == 1


def outcome(tested: Any, name: str) -> str | None:
    """Return the message of the property; None if it holds."""
    try:
        getattr(tested, name)()
    except PropertyViolation as failure:
        return str(failure)
    except unittest.SkipTest:
        return "skipped"
    return None
