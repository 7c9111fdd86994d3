"""What slime-watch adds to slime."""

from __future__ import annotations

from slime_core import Registration, hookimpl


@hookimpl
def slime_register(add: Registration) -> None:
    """Add nothing yet."""
