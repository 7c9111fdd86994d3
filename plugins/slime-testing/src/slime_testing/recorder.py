"""A plugin that implements every lifecycle hook and records the calls."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from slime_core import hookimpl
from slime_testing.harness import PLACES, hook_parameters

__all__ = ["HookRecorder"]


class HookRecorder:
    """Records calls of hooks: register an instance with a plugin manager, or call its hooks.

    Example::

        recorder.slime_after_weight_sync(version=3, options=None)
        assert recorder.calls == [("slime_after_weight_sync", {"version": 3, "options": None})]

    Attributes:
        calls: each called hook with its arguments by name, in order.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    @property
    def names(self) -> list[str]:
        """Names of the called hooks, in order."""
        return [name for name, _ in self.calls]


def _recording(name: str) -> Callable[..., None]:
    """Return a method with exactly the hook's parameters: pluggy reads them from the code and passes no others."""
    parameters = hook_parameters(name)
    passed = ", ".join(f"{name!r}: {name}" for name in parameters)
    code = f"def {name}(self, {', '.join(parameters)}):\n    self.calls.append(({name!r}, {{{passed}}}))\n"
    namespace: dict[str, Any] = {}
    exec(compile(code, __file__, "exec"), namespace)
    method: FunctionType = namespace[name]
    method.__doc__ = f"Record a call of {name}."
    return hookimpl(method)


for _name in PLACES:
    setattr(HookRecorder, _name, _recording(_name))
