"""Parts of the galleries: a plugin that is right, and the same with one thing broken, caught by one property."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REGISTER = """
from slime_core import hookimpl

@hookimpl
def slime_register(add):
    add.{}
"""


@pytest.fixture
def suite_of(tmp_path: Path) -> Callable[..., Any]:
    """A subclass of a suite for a plugin with this source, which adds the component ``mine``."""

    def make(suite: Any, source: str, added: str = "", **attributes: Any) -> Any:
        path = tmp_path / "mine.py"
        path.write_text(source + (REGISTER.format(added) if added else ""), encoding="utf-8")
        named = {"component": "mine"} if hasattr(suite, "component") else {}
        return type("TestMine", (suite,), {**named, "plugin": str(path), "__module__": suite.__module__, **attributes})

    return make


@pytest.fixture
def holds(suite_of: Callable[..., Any]) -> Callable[..., None]:
    """Require that every property of the suite holds."""
    from slime_testing.suite import properties

    def require_all(suite: Any, source: str, added: str = "", **attributes: Any) -> None:
        tested = suite_of(suite, source, added, **attributes)
        for name in properties(suite):
            getattr(tested(), name)()

    return require_all


@pytest.fixture
def violation(suite_of: Callable[..., Any]) -> Callable[..., str]:
    """Require that a property fails once a text is replaced, and return its message. A case is old text, new text, name
    of the property, and the class of the plugin's error if the property fails because of one."""
    from slime_testing.suite import PropertyViolation

    def violate(suite: Any, source: str, added: str, case: tuple[str, ...], **attributes: Any) -> str:
        old, new, name, *error = case
        text = source + (REGISTER.format(added) if added else "")
        assert old in text, f"the source has no {old!r}"
        tested = suite_of(suite, text.replace(old, new), **attributes)
        with pytest.raises(PropertyViolation) as failure:
            getattr(tested(), f"test_{name}")()
        message = str(failure.value)
        assert (" failed with " in message) == bool(error), message
        assert all(f" failed with {each}" in message for each in error), message
        return message

    return violate
