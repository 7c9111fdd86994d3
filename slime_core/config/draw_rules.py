"""The rules of how tokens are drawn."""

from __future__ import annotations

from slime_core.config.layout_rules import Rule

__all__ = ["DRAWING"]

DRAWING: dict[Rule, str] = {}
"""Rule -> the settings it reads."""
