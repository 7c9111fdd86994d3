"""Who may use the devices now.

When learner and engines have devices of their own, both work at once and lending moves nothing; it still holds the one
rule that every mode shares: one borrower at a time, and the devices come back however the borrower ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Lending"]


class Lending:
    """Lends the devices to one role at a time; with devices of their own for every role nothing has to move."""

    def __init__(self) -> None:
        self.borrower: str | None = None

    @contextmanager
    def lend(self, role: str) -> Iterator[None]:
        """``role`` holds the devices inside the block.

        Raises:
            AssertionError: they are lent already, which is a mistake in the loop.
        """
        assert self.borrower is None, f"the devices are lent to {self.borrower!r}; {role!r} cannot have them too"
        self.borrower = role
        try:
            yield
        finally:
            self.borrower = None
