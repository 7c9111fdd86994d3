"""The commands of slime-testing: ``slime plugins new`` and ``slime plugins check``."""

from __future__ import annotations

from slime_core import Registration, hookimpl


@hookimpl
def slime_register(add: Registration) -> None:
    """Add the commands."""
    add.command("plugins new", "slime_testing.scaffold:main")
    add.command("plugins check", "slime_testing.checkup:main")
