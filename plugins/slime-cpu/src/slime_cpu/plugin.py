"""What slime-cpu adds to slime."""

from __future__ import annotations

from slime_core import Registration, hookimpl


@hookimpl
def slime_register(add: Registration) -> None:
    """Add the device ``cpu``."""
    add.device("slime_cpu.device")
