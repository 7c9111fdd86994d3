"""Checks, from their text, that the functions of ``--agent`` and ``--tools`` exist and can be called.

Runs on the driver, before anything starts. The functions are imported later, in the process that calls them.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from slime_core.errors import PluginError, nearest
from slime_core.provisional import FunctionSource

__all__ = ["check_code"]

AGENT_ARGUMENTS = ("base_url", "api_key", "model")
"""The arguments of an agent that are passed by name, after the task."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def check_code(code: Mapping[str, Sequence[FunctionSource]]) -> None:
    """Check the functions of both options. Decorated and imported functions are checked when they are imported.

    Raises:
        PluginError: a file is not Python, a name is missing, or a function does not take its arguments.
    """
    for source in code.get("agent", ()):
        _check_agent(source, _node(source))
    for source in code.get("tools", ()):
        _check_tool(source, _node(source))


def _check_agent(source: FunctionSource, node: ast.AST | None) -> None:
    accepted = f"accepted: fn(task, {', '.join(AGENT_ARGUMENTS)}), async or not"
    _refuse_constant(source, node, accepted)
    if isinstance(node, _FUNCTIONS) and not node.decorator_list:
        signature = _signature(node.args)
        try:
            signature.bind("task", **dict.fromkeys(AGENT_ARGUMENTS))
        except TypeError as mistake:
            raise PluginError(f"{source}: {node.name}{signature} cannot be called: {mistake}; {accepted}.") from None
        if any(isinstance(part, ast.Yield | ast.YieldFrom) for part in _inside(node)):
            raise PluginError(f"{source}: {node.name} is a generator; {accepted}.")


def _check_tool(source: FunctionSource, node: ast.AST | None) -> None:
    accepted = "accepted: a function whose arguments are given by name, or a list of them"
    _refuse_constant(source, node, accepted)
    if isinstance(node, _FUNCTIONS) and not node.decorator_list:
        positional = [argument.arg for argument in node.args.posonlyargs]
        positional += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
        if positional:
            raise PluginError(f"{source}: {node.name} takes {', '.join(positional)} by position; {accepted}.")


def _refuse_constant(source: FunctionSource, node: ast.AST | None, accepted: str) -> None:
    if isinstance(node, ast.Constant | ast.Dict | ast.JoinedStr):
        raise PluginError(f"{source}: this is {ast.unparse(node):.80}; {accepted}.")


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature of a function, with None as every default and without annotations."""
    bare = copy.deepcopy(arguments)
    bare.defaults = [ast.Constant(None) for _ in bare.defaults]
    bare.kw_defaults = [default and ast.Constant(None) for default in bare.kw_defaults]
    for argument in (node for node in ast.walk(bare) if isinstance(node, ast.arg)):
        argument.annotation = None
    stub = ast.fix_missing_locations(ast.Expression(ast.Lambda(bare, ast.Constant(None))))
    return inspect.signature(eval(compile(stub, "<signature>", "eval")))  # without any code of the user


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a function, without those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*_FUNCTIONS, ast.Lambda)):
            yield child
            yield from _inside(child)


def _node(source: FunctionSource) -> ast.AST | None:
    """Return the definition or the assigned value that ``source`` names; None if the text does not show it."""
    text = source.content if source.content is not None else _text_of_module(source.code.module)
    if text is None:
        return None
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError) as error:
        raise PluginError(f"{source}: this is not Python: {error}. Correct the file.") from error
    names = dict(_names(body))
    if source.attribute is None:
        public = [node for name, node in names.items() if _is_definition(node) and not name.startswith("_")]
        return public[0] if len(public) == 1 else None
    if source.attribute not in names and not {"*", "__getattr__"} & names.keys():
        defined = ", ".join(sorted(names)) or "nothing"
        near = nearest(source.attribute, names)
        raise PluginError(f"{source}: there is no {source.attribute!r} in it{near}; it defines {defined}.")
    return names.get(source.attribute)


def _is_definition(node: ast.AST | None) -> bool:
    return isinstance(node, (*_FUNCTIONS, ast.ClassDef))


def _names(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield the names that statements define, each with its definition or value; None if unknown."""
    for node in body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        else:  # the text does not show which branch defines a name
            yield from ((name, None) for part in ast.walk(node) for name in _defined_by(part))


def _defined_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (name.asname or name.name.partition(".")[0] for name in node.names)


def _text_of_module(module: str) -> bytes | None:
    """Return the text of a module without importing its packages; None if it is not a file below its package."""
    first, *others = module.split(".")
    spec = importlib.util.find_spec(first)
    for name in others:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    origin = None if spec is None else spec.origin
    return Path(origin).read_bytes() if origin is not None and origin.endswith(".py") else None
