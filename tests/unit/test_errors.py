from __future__ import annotations

import inspect
import pickle
import re

import pytest

from slime_core import errors
from slime_core.errors import Mistake, RunError, SlimeError, UserError, config_error

CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, SlimeError)}
LINE = re.compile(r"^    (?P<indent>[│├└─ ]*)(?P<name>[A-Z]\w+) ")


def tree_of_docstring() -> dict[str, str | None]:
    """Name -> name of the parent, read from the docstring."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := LINE.match(line):
            depth = len(match["indent"])
            above = [(indent, name) for indent, name in above if indent < depth]
            parents[match["name"]] = above[-1][1] if above else None
            above.append((depth, match["name"]))
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    real = {name: kind.__bases__[0].__name__ for name, kind in CLASSES.items()}
    assert tree_of_docstring() == {**real, "SlimeError": None}


def test_every_error_is_exported():
    assert sorted(errors.__all__) == errors.__all__
    assert set(errors.__all__) == set(CLASSES)


@pytest.mark.parametrize("kind", CLASSES.values())
def test_an_error_survives_pickling_with_its_message(kind):
    message = "what was given\nwhat was found: ü"
    restored = pickle.loads(pickle.dumps(kind(message)))
    assert type(restored) is kind
    assert str(restored) == message


@pytest.mark.parametrize("kind", [kind for kind in CLASSES.values() if kind is not SlimeError])
def test_mistakes_exit_with_2_and_failures_with_1(kind):
    assert kind.exit_code == (2 if issubclass(kind, UserError) else 1)
    assert issubclass(kind, UserError) != issubclass(kind, RunError)


def test_leaves_are_also_builtin_errors():
    leaves = [kind for kind in CLASSES.values() if kind not in (SlimeError, UserError)]
    assert all(issubclass(kind, ValueError if issubclass(kind, UserError) else RuntimeError) for kind in leaves)


def test_the_mistakes_of_a_config_error_survive_pickling_each_once():
    late = Mistake("lr: 3", "lr", ending=lambda: " is high")
    error = config_error([late, late, Mistake("--lrr is unknown")])
    assert error.mistakes == (Mistake("lr: 3 is high", "lr"), Mistake("--lrr is unknown"))
    assert error.keys == {"lr"}
    restored = pickle.loads(pickle.dumps(error))
    assert (str(restored), restored.mistakes) == (str(error), error.mistakes)
