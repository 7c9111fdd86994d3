"""The hooks of slime-watch."""

from __future__ import annotations

from slime_core import Registration, hookimpl
from slime_watch.advice import Advice


@hookimpl
def slime_register(add: Registration) -> None:
    """Add the tracker that warns."""
    add.tracker("advice", Advice)
