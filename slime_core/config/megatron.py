"""``[megatron]``: Megatron's own flags as a run gave them, and the fields of Megatron's configs that they set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime_core.config.megatron_flags import megatron_flags
from slime_core.config.section import EngineSection

__all__ = ["MegatronConfig"]


class MegatronConfig(EngineSection):
    """Megatron's own flags, under Megatron's names."""

    @property
    def transformer(self) -> dict[str, Any]:
        """Fields to set in TransformerConfig."""
        return dict(self._fields("transformer"))

    @property
    def optimizer(self) -> dict[str, Any]:
        """Fields to set in OptimizerConfig."""
        return dict(self._fields("optimizer"))

    def _fields(self, home: str) -> Iterator[tuple[str, Any]]:
        for name, value in self.given:
            flag = megatron_flags()[name]
            if flag.home != home:
                continue
            if flag.value is None:
                yield flag.field, list(value) if isinstance(value, tuple) else value
            elif value:
                yield flag.field, flag.value
