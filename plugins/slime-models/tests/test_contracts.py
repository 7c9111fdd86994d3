"""The families that mbridge does not map by itself, held to the contract by the kit that plugin authors use."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slime_testing import ModelSpecSuite

UNTIED: Sequence[Mapping[str, Any]] = ({"tie_word_embeddings": False},)
LATENT: Mapping[str, Any] = {"num_key_value_heads": 4}
"""Multi-latent attention has as many keys and values as queries."""


class TestGlm4(ModelSpecSuite):
    component = "glm4"
    tiny: ClassVar[Mapping[str, Any]] = {"attention_bias": True}
    variants = UNTIED


class TestGlm4Moe(ModelSpecSuite):
    component = "glm4_moe"
    tiny: ClassVar[Mapping[str, Any]] = {"attention_bias": True, "use_qk_norm": True}
    variants = UNTIED


class TestGlm4MoeLite(ModelSpecSuite):
    component = "glm4_moe_lite"
    tiny: ClassVar[Mapping[str, Any]] = LATENT
    variants = UNTIED


class TestDeepseekV3(ModelSpecSuite):
    component = "deepseek_v3"
    tiny: ClassVar[Mapping[str, Any]] = {**LATENT, "q_lora_rank": None}
    variants = UNTIED
