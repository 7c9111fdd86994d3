"""Checks from the text of a reward function whether it expects one sample, or the samples of a group.

The name of the parameter does not decide, because functions may use any name; its uses may. A text that uses it both
ways, or passes it on, is not judged.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from slime_core.errors import PluginError
from slime_core.provisional import FunctionSource

__all__ = ["check_reward_uses"]

GO_OVER = frozenset(
    {"all", "any", "enumerate", "iter", "len", "list", "map", "max", "min", "reversed", "sorted", "zip"}
)
"""Built-ins that accept a list but no sample."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_reward_uses(source: FunctionSource, text: bytes | None, name: str | None, *, group_rm: bool) -> None:
    """Check from the text of the reward function that it matches how it will be called.

    Arguments:
        text: text of its file; None if unreadable.
        name: its name; None if unclear from the text.

    Raises:
        PluginError: with ``group_rm``, the function reads fields of a sample from the list that it gets; without, it
            iterates over the sample that it gets.
    """
    for function, parameter in _functions(text, name):
        uses = set(_uses(function, parameter))
        if group_rm and uses and None not in uses and "" not in uses:
            raise PluginError(
                f"{source}: with --group-rm, {function.name} is called with the list of a group's samples, and it "
                f"reads {parameter}.{min(map(str, uses))}, which a list has not; accepted: async fn(args, samples, "
                "**kwargs) that returns a list, one reward each. Leave --group-rm out to have it called once "
                "per sample."
            )
        if not group_rm and parameter != "samples" and uses == {""}:
            raise PluginError(
                f"{source}: {function.name} is called once per sample, and it iterates over {parameter} as over a "
                "list; accepted: async fn(args, sample, **kwargs) that returns one reward. Call the parameter "
                "samples, or add --group-rm, to have it called with the samples of a group."
            )


def _functions(text: bytes | None, name: str | None) -> Iterator[tuple[Function, str]]:
    """Yield the function and the name of its second parameter; nothing if the text does not show them."""
    for node in [] if text is None else ast.parse(text).body:
        if isinstance(node, Function) and node.name == name and not node.decorator_list:
            parameters = [*node.args.posonlyargs, *node.args.args]
            if len(parameters) > 1:
                yield node, parameters[1].arg


def _uses(function: Function, name: str) -> Iterator[str | None]:
    """Yield each use of the parameter: the name of a field that lists do not have, ``""`` for a use as a list, or None
    for anything else."""
    reads: dict[int, str] = {}
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name() as used, attr=attr) if not hasattr(list, attr):
                reads[id(used)] = attr
            case (
                ast.For(iter=used) | ast.AsyncFor(iter=used) | ast.comprehension(iter=used) | ast.Subscript(value=used)
            ):
                reads[id(used)] = ""
            case ast.Call(func=ast.Name(id=called), args=arguments) if called in GO_OVER:
                reads |= {id(argument): "" for argument in arguments}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name:
            yield reads.get(id(node))
