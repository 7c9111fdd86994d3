"""The rules of the critic."""

from __future__ import annotations

from slime_core.config.layout_rules import Rule

__all__ = ["CRITIC"]

CRITIC: dict[Rule, str] = {}
"""Rule -> the settings it reads."""
