from __future__ import annotations

import inspect
import re
from pathlib import Path

import slime_core.components
import slime_core.plugins
import slime_core.user_code
from slime_core.contracts import Place
from slime_core.plugins import hooks

PACKAGES = (slime_core.plugins, slime_core.components, slime_core.user_code)


def test_every_hook_is_listed_once_and_has_a_docstring() -> None:
    specs = {name for name, value in vars(hooks).items() if name.startswith("slime_") and inspect.isfunction(value)}
    assert sorted(hooks.HOOKS) == sorted(specs)
    assert all(getattr(hooks, name).__doc__ for name in hooks.HOOKS)


def test_stable_hooks_observers_and_generators_are_hooks() -> None:
    assert all(places and set(places) <= set(Place) for places in hooks.PLACES.values())


def test_every_hook_but_slime_register_gets_options() -> None:
    without = [name for name in hooks.HOOKS if "options" not in inspect.signature(getattr(hooks, name)).parameters]
    assert without == ["slime_register"]


def test_only_boundary_catches_everything() -> None:
    catching = re.compile(r"except\s*(Exception|BaseException|\(Exception)|except\s*:")
    files = [path for package in PACKAGES for path in Path(str(package.__file__)).parent.glob("*.py")]
    counts = {path.name: len(catching.findall(path.read_text())) for path in files}
    # discovery.py: metadata that cannot be read. failures.py has the boundary. neighbours.py removes half-made modules
    # from sys.modules.
    assert {name: count for name, count in counts.items() if count} == {
        "discovery.py": 1,
        "failures.py": 1,
        "neighbours.py": 2,
    }
