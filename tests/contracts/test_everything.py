"""No component of ours is left out of these tests."""

from __future__ import annotations

import ast
from pathlib import Path

import slime_testing as testing
from slime_core.plugins.activation import activate
from slime_core.plugins.registration import Kind

FIRST_PARTY = ("grpo", "ppo", "searchr1", "models", "datasets")


def held() -> set[tuple[Kind, str]]:
    """Every component that a class names in this folder, or in a ``test_contracts.py`` of a plugin."""
    here = Path(__file__).parent
    plugins = here.parents[1] / "plugins"
    classes = [
        node
        for path in (*here.glob("test_*.py"), *plugins.glob("*/tests/test_contracts.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    shared = {node.name: node.bases[0].id for node in classes if not components(node)}
    return {(kind(node.bases[0].id, shared), name) for node in classes for name in components(node)}


def kind(base: str, shared: dict[str, str]) -> Kind:
    """The kind of the suite that a class inherits, perhaps through a class that several share."""
    return kind(shared[base], shared) if base in shared else getattr(testing, base).kind


def components(tested: ast.ClassDef) -> list[str]:
    named = [node for node in tested.body if isinstance(node, ast.Assign) and node.targets[0].id == "component"]
    return [str(node.value.value) for node in named]


def test_every_component_of_ours_is_held_to_its_contract():
    registry = activate(FIRST_PARTY).registry
    ours = {(kind, name) for kind in Kind for name in registry.names(kind)}
    assert sorted(f"{kind} {name}" for kind, name in ours - held()) == []
