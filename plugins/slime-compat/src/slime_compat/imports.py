"""Checks, from the text of a file named by path, that its imports and names exist, before the run starts anything. Runs
on the driver."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import symtable
from collections.abc import Collection, Iterator, Mapping

from slime_compat.names import HELPERS, NAMES, advice_for
from slime_core.errors import PluginError
from slime_core.provisional import FunctionSource

__all__ = ["check_names"]

ALWAYS = {
    *dir(builtins),
    *HELPERS,
    "__file__",
    "__name__",
    "__doc__",
    "__builtins__",
    "__spec__",
    "__loader__",
    "__package__",
}
"""Names that every module has without defining them."""


def check_names(source: FunctionSource, text: bytes) -> None:
    """Check from the text, without running it, that every import of the file and of its neighbours exists, and that
    every name that the file uses is defined.

    An import may fail inside a ``try`` that handles this, and in a branch of a function. A file with ``from module
    import *`` may read any name.

    Raises:
        PluginError: names the line, and the replacement to write.
    """
    tree, neighbours = ast.parse(text), source.neighbours
    mistakes = [*_missing_imports(tree, neighbours), *_missing_attributes(tree), *_undefined(tree, text, source.path)]
    if mistakes:
        line, mistake = min(mistakes)
        raise PluginError(f"{source}: line {line}: {mistake}")
    for neighbour in neighbours.values():
        file = neighbour.distribution
        try:
            tree = ast.parse(neighbour.content)
        except (SyntaxError, ValueError) as error:
            raise PluginError(f"{source}: {file}: this is not Python: {error}. Correct the file.") from error
        for line, mistake in sorted([*_missing_imports(tree, neighbours), *_missing_attributes(tree)]):
            raise PluginError(f"{source}: {file}, line {line}: {mistake}")


def _missing_imports(tree: ast.Module, neighbours: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield line and mistake of each import that must work and cannot."""
    tried = {id(inner) for statement in _optional(tree) for inner in ast.walk(statement)}
    typed = {id(inner) for node in ast.walk(tree) if _is_for_types(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in tried or id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] not in neighbours:
                    yield from _missing(node.lineno, name.name, None)
        elif isinstance(node, ast.ImportFrom) and node.level:
            first = (node.module or node.names[0].name).partition(".")[0]
            if not any(first in name.split(".") for name in neighbours):
                yield node.lineno, f"there is no module {first!r} next to the file. Add it, or leave the import out."
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names if node.module.partition(".")[0] not in neighbours else ():
                yield from _missing(node.lineno, node.module, name.name)


def _optional(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield statements whose imports may fail: of a ``try`` that continues after a failed import, and of an ``if`` in
    a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(map(_handles_missing, node.handlers)):
            yield from node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.If))


def _handles_missing(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    caught = {ast.unparse(kind) if kind is not None else "BaseException" for kind in kinds}
    is_caught = not caught.isdisjoint(("ImportError", "ModuleNotFoundError", "Exception", "BaseException"))
    return is_caught and not any(isinstance(statement, ast.Raise) for statement in handler.body)


def _missing_attributes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield attributes such as ``rm_hub.async_rm`` that a module of slime does not have here."""
    modules = dict(_slime_modules(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        owner = _module_of(node.value, modules)
        if owner is not None and node.attr not in NAMES[owner] and f"{owner}.{node.attr}" not in NAMES:
            yield node.lineno, f"{node.attr} of {owner} has no counterpart here. {advice_for(owner, node.attr)}"


def _slime_modules(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield name in the file -> the module of slime that it is bound to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = alias.name if alias.asname else alias.name.partition(".")[0]
                yield from [(alias.asname or module, module)] if module in NAMES else []
        elif isinstance(node, ast.ImportFrom) and not node.level:
            pairs = ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
            yield from ((name, module) for name, module in pairs if module in NAMES)


def _module_of(node: ast.expr, modules: Mapping[str, str]) -> str | None:
    """Return the module of slime that an expression denotes: ``slime.rollout`` after ``import slime.rollout``."""
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    module = f"{_module_of(node.value, modules)}.{node.attr}"
    return module if module in NAMES else None


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _missing(line: int, module: str, name: str | None) -> Iterator[tuple[int, str]]:
    package = module.partition(".")[0]
    if package == "slime":
        is_there = module in NAMES and (name in (None, *NAMES[module]) or f"{module}.{name}" in NAMES)
        if not is_there:
            shown = module if name is None else f"{name} of {module}"
            yield line, f"{shown} has no counterpart here. {advice_for(module, name)}"
    elif importlib.util.find_spec(package) is None:
        yield line, f"there is no package {package!r} here. Install it, or leave the import out."


def _undefined(tree: ast.Module, text: bytes, path: str) -> Iterator[tuple[int, str]]:
    if any(
        isinstance(node, ast.ImportFrom) and any(symbol.name == "*" for symbol in node.names) for node in ast.walk(tree)
    ):
        return
    top = symtable.symtable(text.decode("utf-8", "replace"), path, "exec")
    tables = list(_tables(top))
    defined = {
        symbol.get_name()
        for symbol in top.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    defined |= {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if symbol.is_declared_global() and symbol.is_assigned()
    }
    read = {
        symbol.get_name()
        for table in tables
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (table is top or symbol.is_global())
    }
    for name in read - defined - ALWAYS:
        lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
        if lines:
            yield min(lines), f"{name!r} is defined nowhere in the file. Define it, or import it."


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
