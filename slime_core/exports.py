"""Public names that are imported when they are first used, so that ``slime --help`` loads few modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module


def import_on_use(package: str, names: Sequence[str], homes: Sequence[str]) -> Callable[[str], object]:
    """Return a ``__getattr__`` for the module ``package``.

    Arguments:
        names: the names that the module exports.
        homes: the modules that define them, those that import fastest first.
    """

    def getattr_of_package(name: str) -> object:
        for home in homes if name in names else ():
            module = import_module(home)
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_of_package
