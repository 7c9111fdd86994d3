"""The families, one file each: architecture, presets, and the sources of their published sizes.

Nothing here imports torch. ``ALL`` lists them in the order of ``slime models list``.
"""

from __future__ import annotations

from importlib import import_module

from slime_models.families.family import Family, Preset, Published

__all__ = ["ALL", "Family", "Preset", "Published", "presets"]

_NAMES = "qwen2_5 qwen3 qwen3_moe llama glm4 glm4_moe glm4_moe_lite deepseek_v3 kimi_k2 moonlight"

ALL: tuple[Family, ...] = tuple(import_module(f"slime_models.families.{name}").FAMILY for name in _NAMES.split())


def presets() -> dict[str, Preset]:
    """Return every preset by its name."""
    return {preset.name: preset for family in ALL for preset in family.presets}
