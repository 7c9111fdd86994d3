"""Checks that the target of a component has the methods of its contract, and can be built and called.

The contracts are read from the Protocols in :mod:`slime_core.contracts`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime_core import contracts
from slime_core.errors import PluginError
from slime_core.plugins.discovery import Plugin
from slime_core.plugins.registration import Component, Kind
from slime_core.user_code.failures import boundary

_CONTRACTS: dict[tuple[Kind, str | None], type] = {
    (Kind.ADVANTAGE_ESTIMATOR, "sample"): contracts.AdvantageEstimator,
    (Kind.ADVANTAGE_ESTIMATOR, "token"): contracts.TokenAdvantageEstimator,
    (Kind.POLICY_LOSS, None): contracts.PolicyLoss,
    (Kind.CORRECTION, None): contracts.Correction,
    (Kind.REWARD_MODEL, "sample"): contracts.RewardModel,
    (Kind.REWARD_MODEL, "group"): contracts.RewardModel,
    (Kind.SAMPLE_TRANSFORM, "group"): contracts.GroupTransform,
    (Kind.SAMPLE_TRANSFORM, "rollout"): contracts.RolloutTransform,
    (Kind.GENERATE_FUNCTION, "sample"): contracts.GenerateFunction,
    (Kind.GENERATE_FUNCTION, "group"): contracts.GroupGenerateFunction,
    (Kind.DATA_SOURCE, None): contracts.DataSource,
    (Kind.ROLLOUT_SOURCE, None): contracts.RolloutSource,
    (Kind.MODEL_SPEC, None): contracts.ModelSpec,
    (Kind.TRACKER, None): contracts.Tracker,
}

PASSED = ("options", "run")
"""The parameters that a class or a function may name to receive the plugin's options and the run."""

_MISSING = object()


def contract_of(component: Component) -> type:
    """Return the Protocol that the component's target implements; it follows from the kind and the scope."""
    return _CONTRACTS[component.kind, getattr(component.traits, "scope", None)]


def methods_of(contract: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of a Protocol by name, in its order, without inherited ones."""
    members = {name: member for name, member in vars(contract).items() if inspect.isfunction(member)}
    return {name: member for name, member in members.items() if member.__qualname__ == f"{contract.__name__}.{name}"}


def passed_by_name(target: Any) -> list[str]:
    """Return which of :data:`PASSED` the class or function names."""
    try:
        return [name for name in PASSED if name in inspect.signature(target).parameters]
    except (TypeError, ValueError):  # written in C, without a signature
        return []


def check_fit(component: Component, plugin: Plugin, target: Any) -> None:
    """Raise PluginError if ``target`` cannot be built and called as the component's contract says.

    Raises:
        PluginError: names the plugin, the component, all mistakes, and the contract.
    """
    with boundary(plugin, f"checking {component.place}"):
        mistakes = list(misfits(component, target))
    if mistakes:
        listed = "".join(f"\n  - {mistake}" for mistake in mistakes)
        raise PluginError(
            f"{plugin}: {component.place} is not a {component.kind.words} (component {component.name!r}):{listed}\n"
            f"The contract is slime_core.{contract_of(component).__name__}."
        )


def misfits(component: Component, target: Any) -> Iterator[str]:
    """Yield a text for each part of ``target`` that does not fit the contract; builds and calls nothing."""
    contract = contract_of(component)
    methods = methods_of(contract)
    if not inspect.isclass(target):
        (name, expected), *more = methods.items()
        if more or not callable(target):
            yield f"it is of type {type(target).__name__}; give a class with the methods {', '.join(methods)}"
        else:
            yield from _misfit_of_call(target.__name__, expected, target, has_self=False)
        return
    if inspect.isabstract(target):
        yield f"it is abstract; it lacks {', '.join(sorted(getattr(target, '__abstractmethods__', ())))}"
        return
    if problem := _unbindable(target, (), passed_by_name(target)):
        yield f"its constructor may name {' and '.join(PASSED)} only: {problem}"
    for name, expected in methods.items():
        # getattr would return the metaclass's __call__, which every class has.
        owners = (base for base in target.__mro__ if base is not contract and base is not object)
        method = next((vars(base)[name] for base in owners if name in vars(base)), _MISSING)
        if method is _MISSING:
            yield f"it has no method {name}"
            continue
        is_bound = isinstance(method, classmethod) or inspect.isfunction(method)
        method = method.__func__ if isinstance(method, staticmethod | classmethod) else method
        if callable(method):
            yield from _misfit_of_call(name, expected, method, has_self=is_bound)
        else:
            yield f"{name} is of type {type(method).__name__}, not a method"


def _misfit_of_call(name: str, expected: Callable[..., Any], method: Any, *, has_self: bool) -> Iterator[str]:
    function = inspect.unwrap(method)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)
    if inspect.iscoroutinefunction(expected) and not is_async:
        yield f"{name} is not async; write it with async def"
    if not inspect.iscoroutinefunction(expected) and (is_async or inspect.isasyncgenfunction(function)):
        yield f"{name} is async; write it with plain def"
    parameters = list(inspect.signature(expected).parameters.values())[1:]
    keywords = [entry.name for entry in parameters if entry.kind is inspect.Parameter.KEYWORD_ONLY]
    positional = ["self"] * has_self + [entry.name for entry in parameters if entry.name not in keywords]
    passed = [] if has_self else passed_by_name(method)
    if problem := _unbindable(method, positional, [*keywords, *passed]):
        call = ", ".join([*(entry for entry in positional if entry != "self"), *(f"{entry}=" for entry in keywords)])
        yield f"{name} is called as {name}({call}): {problem}"


def _unbindable(function: Callable[..., Any], positional: Any, keywords: Any) -> str:
    """Return why ``function`` cannot be called with these arguments; empty if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, without a signature
        return ""
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as mistake:
        return str(mistake)
    return ""


def summary_of(component: Component) -> str:
    """Return the summary that the plugin gave, or the first line of the target's docstring; imports no target."""
    if component.text is not None:
        return component.text
    is_path = isinstance(component.target, str)
    doc = _written_doc(str(component.target)) if is_path else inspect.getdoc(component.target)
    return (doc or "").strip().partition("\n")[0]


def _written_doc(path: str) -> str | None:
    """Return the docstring of ``package.module:attribute`` from the text of the module; None if there is none."""
    module, _, attribute = path.partition(":")
    try:
        spec = importlib.util.find_spec(module)
        tree = ast.parse(Path(str(spec and spec.origin)).read_bytes())
    except (ImportError, OSError, SyntaxError, ValueError):
        return None
    definitions = (
        node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return next((ast.get_docstring(node) for node in definitions if node.name == attribute), None)
