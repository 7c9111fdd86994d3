"""Checks whether a function named by path accepts the arguments that it will get.

Functions are checked twice: on the driver from their text, before the run starts anything and without running it; and
after their import, in the process that calls them. Definitions that the text does not show (decorated or imported
functions) are checked only the second time.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Definition", "Form", "choose", "defined", "definitions", "first_fit", "mistake"]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Definition:
    """The definition of a function or a class.

    Arguments:
        name: name of the function or class.
        signature: signature of the function, or of the constructor without ``self``.
        is_async: True: it is an ``async def``.
        methods: methods of a class, by name, without ``self``; None if it is a function.
        is_complete: False: it has base classes that the text does not show, so it may have more methods.
    """

    name: str
    signature: inspect.Signature
    is_async: bool = False
    methods: Mapping[str, Definition] | None = None
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class Form:
    """One way to call a function.

    Example: ``Form("async fn(args, sample)", passed=("args", "sample"), is_async=True)``.

    Arguments:
        text: the form as error messages show it.
        passed: positional arguments; a parameter may have another name, unless this name means another argument.
        offered: arguments passed by name, if the function names them.
        keywords: arguments always passed by name.
        foreign: parameter names that belong to another form.
        is_async: whether it must be async; None means either.
        methods: method -> its form; if set, it must be a class, and the other fields describe its constructor.
        is_preferred: if several functions of a file fit, the only one with this form is chosen.
    """

    text: str
    passed: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    foreign: frozenset[str] = frozenset()
    is_async: bool | None = None
    methods: Mapping[str, Form] = field(default_factory=dict)
    is_preferred: bool = False


# --- Definitions -----------------------------------------------------------------------------------------------------


def definitions(text: bytes, path: str) -> dict[str, Definition | None]:
    """Return the public names that a module's text defines or imports at top level; None if the text does not show it.

    Raises:
        SyntaxError: the text is not Python.
    """
    names: dict[str, Definition | None] = {}
    for node in ast.parse(text, path).body:
        for name, definition in _named(node):
            if not name.startswith("_"):
                names[name] = definition
    return names


def defined(value: Any) -> Definition:
    """Return the definition of an imported function or class."""
    methods = None
    if inspect.isclass(value):
        functions = inspect.getmembers(value, inspect.isfunction)
        methods = {name: _without_self(defined(function)) for name, function in functions}
    name = getattr(value, "__name__", type(value).__name__)
    # A callable object is async if its class has an async __call__.
    is_async = any(map(inspect.iscoroutinefunction, (inspect.unwrap(value), type(value).__call__)))
    return Definition(name, inspect.signature(value), is_async, methods)


def _named(node: ast.stmt) -> Iterable[tuple[str, Definition | None]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name, None if node.decorator_list else _function(node)
    elif isinstance(node, ast.ClassDef):
        yield node.name, None if node.decorator_list or node.keywords else _class(node)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((name.asname or name.name.partition(".")[0], None) for name in node.names)
    else:
        targets = [
            target for target in ast.walk(node) if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
        ]
        yield from ((target.id, None) for target in targets)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Definition:
    return Definition(node.name, _signature(node.args), isinstance(node, ast.AsyncFunctionDef))


def _class(node: ast.ClassDef) -> Definition:
    functions = [method for method in node.body if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)]
    methods = {method.name: _without_self(_function(method)) for method in functions if not method.decorator_list}
    constructor = methods["__init__"].signature if "__init__" in methods else inspect.Signature()
    return Definition(node.name, constructor, methods=methods, is_complete=not node.bases)


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature of a function, with None as every default and without annotations."""
    bare = copy.deepcopy(arguments)
    bare.defaults = [ast.Constant(None) for _ in bare.defaults]
    bare.kw_defaults = [default and ast.Constant(None) for default in bare.kw_defaults]
    for argument in (node for node in ast.walk(bare) if isinstance(node, ast.arg)):
        argument.annotation = None
    stub = ast.fix_missing_locations(ast.Expression(ast.Lambda(bare, ast.Constant(None))))
    return inspect.signature(eval(compile(stub, "<signature>", "eval")))  # without any code of the user


def _without_self(method: Definition) -> Definition:
    parameters = list(method.signature.parameters.values())[1:]
    return Definition(method.name, inspect.Signature(parameters), method.is_async)


# --- Matching --------------------------------------------------------------------------------------------------------


def first_fit(definition: Definition, forms: Sequence[Form]) -> Form | None:
    """Return the first of ``forms`` in which ``definition`` can be called; None if there is none."""
    return next((form for form in forms if mistake(definition, form) is None), None)


def choose(candidates: Mapping[str, Definition], forms: Sequence[Form]) -> list[str]:
    """Return the functions and classes of a module that fit: by the names of their parameters, else by their number.

    If several fit by name and exactly one has the preferred form, only that one is returned.
    """
    fitting = {
        name: form for name, definition in candidates.items() if (form := first_fit(definition, forms)) is not None
    }
    exact = [name for name, form in fitting.items() if _is_exact(candidates[name], form)]
    preferred = [name for name in exact if fitting[name].is_preferred]
    return (preferred if len(preferred) == 1 else exact) or list(fitting)


def mistake(definition: Definition, form: Form) -> str | None:
    """Return the reason why ``definition`` cannot be called as ``form``; None if it can."""
    if form.methods:
        return _class_mistake(definition, form)
    if definition.methods is not None:
        return "it is a class"
    if form.is_async and not definition.is_async:
        return "it is not async"
    if form.is_async is False and definition.is_async:
        return "it is async"
    return _parameter_mistake(definition.signature, form)


def _class_mistake(definition: Definition, form: Form) -> str | None:
    if definition.methods is None:
        return "it is a function"
    for name, method in form.methods.items():
        if name not in definition.methods:
            if definition.is_complete:
                return f"it has no method {name}"
            continue
        problem = mistake(definition.methods[name], method)
        if problem is not None:
            return f"its method {name}: {problem}"
    return _parameter_mistake(definition.signature, form) if definition.is_complete else None


def _parameter_mistake(signature: inspect.Signature, form: Form) -> str | None:
    placed = [parameter for parameter in signature.parameters.values() if parameter.kind in _POSITIONAL]
    misnamed = _misplaced([parameter.name for parameter in placed], form)
    if misnamed is not None:
        return misnamed
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if len(placed) < len(form.passed) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return f"it takes {len(placed)} of the {len(form.passed)} arguments ({', '.join(form.passed)})"
    by_name = {*form.offered, *form.keywords}
    spare = [
        *placed[len(form.passed) :],
        *(parameter for parameter in signature.parameters.values() if parameter.kind is parameter.KEYWORD_ONLY),
    ]
    for parameter in spare:
        if parameter.name not in by_name and parameter.default is inspect.Parameter.empty:
            return f"its parameter {parameter.name!r} is never passed and has no default"
    missing = [name for name in form.keywords if name not in signature.parameters]
    if missing and inspect.Parameter.VAR_KEYWORD not in kinds:
        return f"it does not take {', '.join(missing)}"
    return None


def _misplaced(names: Sequence[str], form: Form) -> str | None:
    """Return a message if a parameter with a known name is at the wrong place; None if not."""
    for place, name in enumerate(names):
        expected = form.passed[place] if place < len(form.passed) else None
        if name in form.foreign:
            return f"it takes {name!r}"
        if name in form.passed and name != expected:
            return f"its parameter {place + 1} is {name!r}, where {expected or 'nothing'} is passed"
        if name in form.offered and expected is not None:
            return f"its parameter {place + 1} is {name!r}, where {expected} is passed"
    return None


def _is_exact(definition: Definition, form: Form) -> bool:
    if definition.methods is not None:
        return True
    names = [parameter.name for parameter in definition.signature.parameters.values() if parameter.kind in _POSITIONAL]
    return tuple(names[: len(form.passed)]) == form.passed
