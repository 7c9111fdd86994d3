"""Plugin ``doctor``: the command ``slime doctor``; imports nothing heavy."""

from __future__ import annotations

from slime_core import Registration, hookimpl

__all__: list[str] = []


@hookimpl
def slime_register(add: Registration) -> None:
    add.command("doctor", "slime_doctor.command:main")
