"""The rules of running one half of the loop alone."""

from __future__ import annotations

from slime_core.config.layout_rules import Rule

__all__ = ["DEBUG"]

DEBUG: dict[Rule, str] = {}
"""Rule -> the settings it reads."""
