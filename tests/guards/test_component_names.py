"""The core branches on traits: no line of it asks whether a component has a certain name.

Looked for are comparisons (``==``, ``!=``, ``in``), cases of ``match``, lookups by a literal key, tables keyed by
names, and tests of how a name starts or ends, wherever a literal is the name of a component that ships.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import slime_core
from slime_core.plugins.activation import activate
from slime_core.plugins.registration import Kind

CORE = Path(slime_core.__file__).parent
EXEMPT = ("builtin", "testing", "cpu/stand_ins")
"""Where components live, and what tests them."""

SHIPPED = ["grpo", "ppo", "searchr1", "models"]

OTHER_MEANINGS = {
    ("config/engines.py", "random"): "a policy of sglang-router",
}
"""(file, word) -> what the word means there, where it is no component's name."""

ASKS = {"get", "startswith", "endswith", "index", "count", "removeprefix", "pop"}


@cache
def names() -> frozenset[str]:
    registry = activate(SHIPPED).registry
    return frozenset(name for kind in Kind for name in registry.names(kind))


def literals(node: ast.AST | None) -> Iterator[str]:
    """The strings of a literal, or of a display of literals."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            for part in parts:
                yield from literals(part)
        case ast.Dict(keys=keys):
            for key in keys:
                yield from literals(key)
        case ast.Call(func=ast.Name(id="frozenset" | "set" | "tuple" | "list"), args=[display]):
            yield from literals(display)


def compared(node: ast.AST) -> Iterator[str]:
    """The strings that ``node`` compares something with."""
    match node:
        case ast.Compare(left=left, comparators=others):
            for side in (left, *others):
                yield from literals(side)
        case ast.MatchValue(value=value):
            yield from literals(value)
        case ast.Subscript(slice=key):
            yield from literals(key)
        case ast.Dict():
            yield from literals(node)
        case ast.Call(func=ast.Attribute(attr=attribute), args=[first, *_]) if attribute in ASKS:
            yield from literals(first)


def comparisons(source: str) -> list[tuple[int, str]]:
    """Line and name of every comparison with a component's name."""
    nodes = [
        node for node in ast.walk(ast.parse(source)) if hasattr(node, "lineno") or isinstance(node, ast.MatchValue)
    ]
    return sorted({(node.lineno, word) for node in nodes for word in compared(node) if word in names()})


def test_no_line_of_the_core_asks_for_a_component_s_name():
    found = []
    for path in CORE.rglob("*.py"):
        place = path.relative_to(CORE).as_posix()
        if not place.startswith(EXEMPT):
            found += [
                f"{place}:{line}: {word!r}"
                for line, word in comparisons(path.read_text("utf-8"))
                if (place, word) not in OTHER_MEANINGS
            ]
    assert found == [], "let the component say it in its traits"


def test_no_other_meaning_is_left_over():
    for (place, word), meaning in OTHER_MEANINGS.items():
        assert word in {found for _, found in comparisons((CORE / place).read_text("utf-8"))}, meaning


def test_the_names_are_those_that_ship():
    assert {"grpo", "reinforce_plus_plus_baseline", "clipped", "single_turn", "search_r1", "qwen3"} <= names()
