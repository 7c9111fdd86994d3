"""Plugin ``convert``: the command ``slime convert``; imports nothing heavy."""

from __future__ import annotations

from slime_core import Registration, hookimpl

__all__: list[str] = []


@hookimpl
def slime_register(add: Registration) -> None:
    add.command("convert", "slime_convert.command:main")
