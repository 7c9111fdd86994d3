"""Prompts by their number in the run: number ``n`` is the same prompt however often, and after whatever restart.

``held`` has all rows in memory, shuffled by epoch. Plugin ``datasets`` reads rows as they are needed, and mixes
streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from slime_core.prompts.rows import PromptRow
from slime_core.types import JsonValue

__all__ = ["Stream"]


class Stream(Protocol):
    """Prompts by their number."""

    def at(self, number: int) -> PromptRow:
        """Prompt ``number`` of the run."""
        ...

    def prepare(self, stop: int) -> None:
        """Make ready what comes before prompt ``stop``."""
        ...

    def identity(self) -> dict[str, JsonValue]:
        """All that decides what a number means."""
        ...

    def state(self, numbers: Sequence[int]) -> dict[str, JsonValue]:
        """What else :meth:`restore` needs; with it, ``numbers`` are found fast."""
        ...

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Continue from where ``state`` was taken."""
        ...

    def __len__(self) -> int:
        """Prompts of one pass."""
        ...
