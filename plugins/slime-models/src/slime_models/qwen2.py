"""Qwen2 and Qwen2.5 dense models (Qwen2.5 Technical Report, 2412.15115): grouped-query attention, biases on queries,
keys and values, tied output weights in the small ones.

Left out: YaRN positions beyond the trained length and the sliding windows that the config allows; both are refused.
"""

from __future__ import annotations

from slime_core.modeling import MBridgeSpec
from slime_models import refusals

__all__ = ["Qwen2"]


class Qwen2(MBridgeSpec):
    """Builds Qwen2 and Qwen2.5 dense models and maps their weights both ways."""

    unsupported = staticmethod(refusals.qwen2)
