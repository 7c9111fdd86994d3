"""Modules from a file that a run names by path, and the modules next to it, importable for that file alone.

    find_neighbours   reads the modules that a file imports from its folder, and those that they import
    scoped_builtins   builtins with which the code of a module imports them

A neighbour takes precedence over an installed package of its name, as if Python had been started in the folder, but
not over the standard library.
Neighbours travel as bytes with the file, so every process runs what the driver read. Other files of the folder cannot
be imported, and other code does not find the neighbours.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

__all__ = ["NeighbourCode", "find_neighbours", "import_neighbour", "module_of_bytes", "scoped_builtins"]

NeighbourCode = Mapping[str, tuple[str, bytes]]
"""Dotted name from the folder -> path and bytes of the module's file. The bytes of a folder without ``__init__.py`` are
empty."""


def find_neighbours(file: Path, content: bytes) -> dict[str, tuple[str, bytes]]:
    """Return the modules of the file's folder that ``content`` imports, at its top or in its functions, and those that
    they import. Text that is not Python imports nothing.

    Raises:
        OSError: one of them cannot be read.
    """
    modules: dict[str, tuple[str, bytes]] = {}
    pending = [*_imported(content, "")]
    while pending:
        name = pending.pop()
        is_own = name.partition(".")[0] not in sys.stdlib_module_names and name not in (*modules, file.stem)
        if not is_own or (code := _read(file.parent, name)) is None:
            continue
        modules[name] = code
        package = name if code[0].endswith("__init__.py") else name.rpartition(".")[0]
        pending += _imported(code[1], package)
    return modules


def _imported(content: bytes, package: str) -> Iterator[str]:
    """Yield every name that may be a module: ``a``, ``a.b`` and ``a.b.c`` for ``from a.b import c``."""
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node.module or "", node.level, package)
            names = [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
        else:
            continue
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _absolute(module: str, level: int, package: str) -> str:
    """Return the dotted name from the folder that ``from ..module import`` means inside ``package``."""
    parts = package.split(".") if package else []
    base = parts[: len(parts) - (level - 1)] if level > 1 else parts
    return ".".join([*(base if level else []), *([module] if module else [])])


def _read(folder: Path, name: str) -> tuple[str, bytes] | None:
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    place = folder.joinpath(*name.split("."))
    for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
        if path.is_file():
            return str(path), path.read_bytes()
    is_plain_folder = place.is_dir() and any(place.glob("*.py")) and not _is_installed(name)
    return (str(place / "__init__.py"), b"") if is_plain_folder else None


def _is_installed(name: str) -> bool:
    """Return whether a package of this name is installed, which Python prefers to a folder without ``__init__.py``."""
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def scoped_builtins(owner: str, code: NeighbourCode, package: str = "") -> dict[str, Any]:
    """Return builtins for a module whose imports may name the modules in ``code``.

    Arguments:
        owner: name of the module of the file, unique in the process; prefix of the names of its neighbours.
        package: the dotted name that a relative import in the module starts from.
    """
    return {**vars(builtins), "__import__": _scoped_import(owner, code, package)}


def _scoped_import(owner: str, code: NeighbourCode, package: str) -> Callable[..., Any]:
    def scoped(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        target = _absolute(name, level, package)
        if not level and target.partition(".")[0] not in code:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        names = [f"{target}.{attribute}".lstrip(".") for attribute in fromlist or ()]
        if not target:  # from . import neighbour
            module = ModuleType(owner)
            vars(module).update({name: import_neighbour(owner, code, name) for name in names})
            return module
        module = import_neighbour(owner, code, target)
        for name in names:
            if name in code:
                import_neighbour(owner, code, name)
        return module if fromlist else import_neighbour(owner, code, target.partition(".")[0])

    return scoped


def import_neighbour(owner: str, code: NeighbourCode, name: str) -> ModuleType:
    """Import the neighbour ``name``, once in a process, after the packages that contain it.

    Raises:
        ModuleNotFoundError: ``code`` does not have it.
        Exception: any, from running it.
    """
    parent_name, _, own_name = name.rpartition(".")
    parent = import_neighbour(owner, code, parent_name) if parent_name else None
    unique = f"{owner}.{name}"
    if unique in sys.modules:
        return sys.modules[unique]
    if name not in code:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    path, content = code[name]
    is_package = Path(path).name == "__init__.py"
    module = ModuleType(unique)
    module.__file__ = path
    vars(module)["__builtins__"] = scoped_builtins(owner, code, name if is_package else parent_name)
    sys.modules[unique] = module
    try:
        exec(compile(content, path, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[unique]
        raise
    if parent is not None:
        setattr(parent, own_name, module)
    return module


class _BytesLoader(InspectLoader):
    """Runs a module from bytes. Tracebacks show the path that the bytes were read from."""

    def __init__(self, content: bytes, path: str) -> None:
        self._content = content
        self._path = path

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._content)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._content, self._path, "exec", dont_inherit=True)

    def is_package(self, fullname: str) -> bool:
        return False


def module_of_bytes(name: str, content: bytes, *, path: str, neighbours: NeighbourCode) -> ModuleType:
    """Return the module that a file's bytes make, imported once in a process.

    Arguments:
        name: of the module, made from a hash of the bytes.
        path: of the file, for tracebacks.
        neighbours: the modules of the file's folder that it may import.

    Raises:
        Exception: any, from running it.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_loader(name, _BytesLoader(content, path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = path  # pydantic reads the docstrings of options from the source
    inspect.modulesbyfile.pop(os.path.abspath(path), None)  # the file may be imported under another name too
    if neighbours:
        vars(module)["__builtins__"] = scoped_builtins(name, neighbours)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
