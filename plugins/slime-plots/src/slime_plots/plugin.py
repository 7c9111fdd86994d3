"""The hooks of plugin ``plots``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core import Component, hookimpl

__all__: list[str] = []


@hookimpl
def slime_register_trackers() -> Iterator[Component]:
    yield Component(
        "plots",
        target="slime_plots.tracker:Plots",
        summary="Charts of rewards and evaluations at the end of a run, in the terminal and as curves.svg",
    )
