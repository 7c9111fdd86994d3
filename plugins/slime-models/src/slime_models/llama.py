"""Llama dense models (Llama 2, 2307.09288; SmolLM2, 2502.02737): grouped-query attention, gated SiLU, no biases.

Left out: scaled rotary positions (Llama 3.1 and later, 2407.21783), which :class:`MBridgeSpec` refuses, and biases.
"""

from __future__ import annotations

from slime_core.modeling import MBridgeSpec
from slime_models import refusals

__all__ = ["Llama"]


class Llama(MBridgeSpec):
    """Builds Llama dense models and maps their weights both ways."""

    unsupported = staticmethod(refusals.llama)
