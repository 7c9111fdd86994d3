"""Qwen3 dense models (Qwen3 Technical Report, 2505.09388): grouped-query attention, normed queries and keys, no biases.

Left out: YaRN positions beyond the trained length and the sliding windows that the config allows; both are refused.
"""

from __future__ import annotations

from slime_core.modeling import MBridgeSpec
from slime_models import refusals

__all__ = ["Qwen3"]


class Qwen3(MBridgeSpec):
    """Builds Qwen3 dense models and maps their weights both ways."""

    unsupported = staticmethod(refusals.qwen3)
