"""Checks, from the text of a file named by path, that its imports and names exist, before the run starts anything. Runs
on the driver."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import symtable
from collections.abc import Iterator, Mapping

from slime_compat.names import HELPERS, NAMES, advice_for
from slime_core import FunctionSource
from slime_core.errors import PluginError

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
    """Check from the text, without running it, that every import of the file exists and every used name is defined.

    An import inside ``try`` may fail. A file with ``from module import *`` may read any name.

    Raises:
        PluginError: names the line, and the replacement to write.
    """
    tree = ast.parse(text)
    found = [*_missing_imports(tree), *_missing_attributes(tree), *_undefined(tree, text, source.path)]
    if found:
        line, wrong = min(found)
        raise PluginError(f"{source}: line {line}: {wrong}")


def _missing_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    tried = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for one in node.body
        for inner in ast.walk(one)
    }
    typed = {id(inner) for node in ast.walk(tree) if _is_for_types(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in tried or id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            for name in node.names:
                yield from _missing(node.lineno, name.name, None)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield (
                node.lineno,
                "a file by itself has no neighbours to import; give package.module:function, or one file.",
            )
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                yield from _missing(node.lineno, node.module, name.name)


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
            for one in node.names:
                module = one.name if one.asname else one.name.partition(".")[0]
                yield from [(one.asname or module, module)] if module in NAMES else []
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = ((one.asname or one.name, f"{node.module}.{one.name}") for one in node.names)
            yield from ((name, module) for name, module in found if module in NAMES)


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
    if any(isinstance(node, ast.ImportFrom) and any(one.name == "*" for one in node.names) for node in ast.walk(tree)):
        return
    top = symtable.symtable(text.decode("utf-8", "replace"), path, "exec")
    tables = list(_tables(top))
    defined = {
        one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported() or one.is_namespace()
    }
    defined |= {
        one.get_name()
        for table in tables
        for one in table.get_symbols()
        if one.is_declared_global() and one.is_assigned()
    }
    read = {
        one.get_name()
        for table in tables
        for one in table.get_symbols()
        if one.is_referenced() and (table is top or one.is_global())
    }
    for name in read - defined - ALWAYS:
        lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
        if lines:
            yield min(lines), f"{name!r} is defined nowhere in the file. Define it, or import it."


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
