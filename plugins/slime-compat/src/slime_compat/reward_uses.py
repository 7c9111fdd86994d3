"""Whether a reward function is called with what its text takes: one sample, or the samples of a group.

A function may call its parameter what it likes, so its name does not tell; what it does with it may. A text that does
both, or hands it on, is left to the run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from slime_compat.check import chosen_text
from slime_compat.signatures import Form
from slime_core import FunctionSource
from slime_core.errors import PluginError

__all__ = ["check_reward_uses"]

GO_OVER = frozenset(
    {"all", "any", "enumerate", "iter", "len", "list", "map", "max", "min", "reversed", "sorted", "zip"}
)
"""Built-ins that accept a list and no sample."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_reward_uses(sources: Sequence[FunctionSource], forms: Sequence[Form], *, group_rm: bool) -> None:
    """Returns if nothing in the text of the reward functions speaks against how they will be called; runs none of it.

    Raises:
        PluginError: with ``group_rm``, one reads fields of a sample off the list that it gets; without, one goes over
            the sample that it gets as over a list.
    """
    for source in sources:
        for function, name in _functions(source, forms):
            uses = set(_uses(function, name))
            if group_rm and uses and None not in uses and "" not in uses:
                raise PluginError(
                    f"{source}: with --group-rm, {function.name} is called with the list of a group's samples, and it "
                    f"reads {name}.{min(map(str, uses))}, which a list has not; accepted: async fn(args, samples, "
                    "**kwargs) that returns a list, one reward each. Leave --group-rm out to have it called once a "
                    "sample."
                )
            if not group_rm and name != "samples" and uses == {""}:
                raise PluginError(
                    f"{source}: {function.name} is called once a sample, and it goes over {name} as over a list; "
                    "accepted: async fn(args, sample, **kwargs) that returns one reward. Call the parameter samples, "
                    "or add --group-rm, to have it called with the samples of a group."
                )


def _functions(source: FunctionSource, forms: Sequence[Form]) -> Iterator[tuple[Function, str]]:
    """The function that will be called, and what it calls its second parameter; nothing where the text hides it."""
    text, chosen = chosen_text(source, forms)
    for node in [] if text is None else ast.parse(text).body:
        if isinstance(node, Function) and node.name == chosen and not node.decorator_list:
            named = [*node.args.posonlyargs, *node.args.args]
            if len(named) > 1:
                yield node, named[1].arg


def _uses(function: Function, name: str) -> Iterator[str | None]:
    """What the body does with the parameter: reads a field that a list has not (its name), goes over it as over a list
    (``""``), or anything else (None)."""
    known: dict[int, str] = {}
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name() as used, attr=attr) if not hasattr(list, attr):
                known[id(used)] = attr
            case (
                ast.For(iter=used) | ast.AsyncFor(iter=used) | ast.comprehension(iter=used) | ast.Subscript(value=used)
            ):
                known[id(used)] = ""
            case ast.Call(func=ast.Name(id=called), args=arguments) if called in GO_OVER:
                known |= {id(one): "" for one in arguments}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == name:
            yield known.get(id(node))
