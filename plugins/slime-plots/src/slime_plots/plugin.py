"""Plugin ``plots``: a tracker and three commands; imports nothing heavy."""

from __future__ import annotations

from slime_core import Registration, hookimpl
from slime_plots.tracker import Plots

__all__: list[str] = []


@hookimpl
def slime_register(add: Registration) -> None:
    add.tracker("plots", Plots)
    add.command("plot", "slime_plots.command:main")
    add.command("samples", "slime_plots.tokens:main")
    add.command("report", "slime_plots.report:main")
