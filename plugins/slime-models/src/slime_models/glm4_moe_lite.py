"""GLM-4.7-Flash (transformers, models/glm4_moe_lite): the layers of DeepSeek-V3 with plain rotary positions and one
group of experts; the weights have DeepSeek's names, so it shares DeepSeek's bridge.

Left out: multi-token prediction layers (the checkpoint's are not read) and quantised weights (refused).
"""

from __future__ import annotations

from slime_models import refusals
from slime_models.deepseek_v3 import DeepseekV3

__all__ = ["Glm4MoeLite"]


class Glm4MoeLite(DeepseekV3):
    """Builds GLM-4.7-Flash and maps its weights both ways."""

    unsupported = staticmethod(refusals.glm4_moe_lite)
