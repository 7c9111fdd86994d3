"""The rules of where prompts come from."""

from __future__ import annotations

from slime_core.config.layout_rules import Rule

__all__ = ["DATA"]

DATA: dict[Rule, str] = {}
"""Rule -> the settings it reads."""
