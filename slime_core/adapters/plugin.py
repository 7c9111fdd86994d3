"""The hooks of plugin ``paths``: one component for each path setting that stands in for one; imports nothing heavy."""

from __future__ import annotations

__all__: list[str] = []
