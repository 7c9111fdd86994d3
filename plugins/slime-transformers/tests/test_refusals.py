"""What is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from slime_core import RunPlan
from slime_testing.harness import Kind, activate
from slime_transformers.refusals import unsupported

MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
OWN_CODE = {"model_type": "mine", "architectures": ["Mine"], "auto_map": {"AutoModelForCausalLM": "code.Mine"}}


def test_a_causal_language_model_of_transformers_is_built() -> None:
    assert list(unsupported(MISTRAL, RunPlan())) == []


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tensor_model_parallel_size", 2),
        ("pipeline_model_parallel_size", 2),
        ("context_parallel_size", 2),
        ("expert_model_parallel_size", 2),
        ("critic_tensor_model_parallel_size", 2),
        ("fp32_lm_head", True),
        ("use_rollout_routing_replay", True),
        ("transformer_impl", "transformer_engine"),
    ],
)
def test_a_setting_of_megatrons_layers_is_refused_by_name(setting: str, value: Any) -> None:
    (text,) = unsupported(MISTRAL, RunPlan(settings={setting: value}))
    assert setting in text


def test_a_split_over_several_axes_is_one_mistake() -> None:
    plan = RunPlan(settings={"tensor_model_parallel_size": 2, "context_parallel_size": 4})
    (text,) = unsupported(MISTRAL, plan)
    assert "tensor_model_parallel_size = 2" in text
    assert "context_parallel_size = 4" in text


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**MISTRAL, "quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({**MISTRAL, "text_config": {}}, "text_config"),
        ({"model_type": "mistral", "architectures": ["MistralModel"]}, "MistralModel"),
        ({"model_type": "mistral"}, "None"),
        (OWN_CODE, "--trust-remote-code"),
    ],
)
def test_a_checkpoint_that_cannot_be_built_is_refused(config: dict[str, Any], named: str) -> None:
    (text,) = unsupported(config, RunPlan())
    assert named in text


def test_code_of_a_trusted_checkpoint_is_accepted() -> None:
    assert list(unsupported(OWN_CODE, RunPlan(settings={"trust_remote_code": True}))) == []


def test_the_spec_is_for_all_architectures_that_no_other_names() -> None:
    plugin = activate("transformers")
    component = plugin.component(Kind.MODEL_SPEC, "transformers")
    assert component.traits.architectures == {"*"}
    assert component.traits.implementation == "transformers"
