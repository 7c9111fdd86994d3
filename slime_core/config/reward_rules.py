"""The rules of rewards."""

from __future__ import annotations

from slime_core.config.layout_rules import Rule

__all__ = ["REWARDS"]

REWARDS: dict[Rule, str] = {}
"""Rule -> the settings it reads."""
