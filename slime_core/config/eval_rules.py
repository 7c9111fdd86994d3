"""The rules of evaluations."""

from __future__ import annotations

from slime_core.config.layout_rules import Rule

__all__ = ["EVALUATION"]

EVALUATION: dict[Rule, str] = {}
"""Rule -> the settings it reads."""
