"""Creates packages that can be imported completely but not used.

Inference servers import the kernels of every model and device at start, though a CPU server runs none of them. In a
package served here every submodule exists and every name can be imported: a capitalised name is an empty class (an
exception, if it ends in ``Error``), any other is a :class:`Missing`, which decorates functions without changing them
and raises when it is called. So code that does need a kernel fails loudly, with the name of the kernel.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["Missing", "serve"]


def serve(package: str) -> Callable[[str], Any]:
    """Make every submodule of ``package`` importable; return the package's ``__getattr__``."""
    sys.meta_path.insert(0, _Finder(package))
    return lambda name: _member(package, name)


class _Empty:
    """Base class of all empty classes, which are only imported, used in annotations, or subclassed."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __init_subclass__(cls, **_: Any) -> None: ...


class _Enumerable(type):
    """Metaclass of an empty class whose members are strings of the same name: ``InterpolationMode.BICUBIC``."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Missing(types.ModuleType):
    """A submodule or a function of a served package."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)

    def __getattr__(self, name: str) -> Any:
        return _member(self.__name__, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], types.FunctionType | type):
            return arguments[0]
        if not arguments and options:
            return self
        raise NotImplementedError(
            f"{self.__name__} was called, but this server runs on a CPU, and slime replaces it by an empty stand-in; "
            "choose settings that do not need it, or a machine with a GPU"
        )

    def __bool__(self) -> bool:
        return False

    def __contains__(self, _: object) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _member(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    full = f"{module}.{name}"
    member = sys.modules.get(full) or _new(module, name)
    setattr(sys.modules[module], name, member)
    return member


def _new(module: str, name: str) -> Any:
    if name[0].isupper():
        bases = (Exception,) if name.endswith("Error") else (_Empty,)
        kind = type if name.endswith("Error") else _Enumerable
        return kind(name, bases, {"__module__": module})
    return sys.modules.setdefault(f"{module}.{name}", Missing(f"{module}.{name}"))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules.get(spec.name) or Missing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...
