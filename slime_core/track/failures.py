"""Errors of observers, which every process sends to the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Failures"]


@dataclass(slots=True)
class Failures:
    """Errors of observers since the last :meth:`take`; survives pickling.

    Example: ``Failures(Counter(plots=1), ["plugin 'plots' (...): slime_after_weight_sync on the driver failed ..."])``.

    Arguments:
        counts: plugin name -> failures.
        warnings: one text per failure, for the user.
    """

    counts: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)

    def add(self, plugin: str, warning: str) -> None:
        """Record a failure of ``plugin``."""
        self.counts[plugin] += 1
        self.warnings.append(warning)

    def merge(self, other: Failures) -> None:
        """Add the failures in ``other``, such as those of another process."""
        self.counts += other.counts
        self.warnings += other.warnings

    def report(self, warn: Callable[[str], None]) -> dict[str, float]:
        """Pass every warning to ``warn``, return the counts as metrics ``plugins/failures/NAME``, and empty this."""
        failures = self.take()
        for warning in failures.warnings:
            warn(warning)
        return {f"plugins/failures/{name}": float(count) for name, count in failures.counts.items()}

    def take(self) -> Failures:
        """Return everything recorded so far, and empty this."""
        failures = Failures(self.counts, self.warnings)
        self.counts = Counter()
        self.warnings = []
        return failures
