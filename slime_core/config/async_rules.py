"""The rules of generating while training goes on."""

from __future__ import annotations

from slime_core.config.layout_rules import Rule

__all__ = ["ASYNC"]

ASYNC: dict[Rule, str] = {}
"""Rule -> the settings it reads."""
