"""The gallery: first-party components with one thing broken, each to be caught by the property that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def suite_of(tmp_path: Path) -> Callable[..., Any]:
    """A subclass of a suite for the component ``mine`` of a plugin with this source."""

    def make(suite: Any, source: str, **attributes: Any) -> Any:
        path = tmp_path / "mine.py"
        path.write_text(source, encoding="utf-8")
        named = {"component": "mine"} if hasattr(suite, "component") else {}
        return type("TestMine", (suite,), {**named, "plugin": str(path), "__module__": suite.__module__, **attributes})

    return make


@pytest.fixture
def violation(suite_of: Callable[..., Any]) -> Callable[..., str]:
    """Require that one property does not hold for a plugin with this source, and return its message; ``error`` is the
    class of the plugin's error, if the property fails because of one."""
    from slime_testing.suite import PropertyViolation

    def found(suite: Any, source: str, name: str, error: str = "", **attributes: Any) -> str:
        tested = suite_of(suite, source, **attributes)
        with pytest.raises(PropertyViolation) as failure:
            getattr(tested(), f"test_{name}")()
        message = str(failure.value)
        assert (f" failed with {error}" in message) == bool(error), message
        return message

    return found


@pytest.fixture
def first_party() -> Callable[[str, str], str]:
    """The source of a file of this repository, with a registration at its end."""

    def read(path: str, registration: str) -> str:
        return (ROOT / path).read_text(encoding="utf-8") + registration

    return read


@pytest.fixture
def broken() -> Callable[[str, str, str], str]:
    """A source with one thing replaced."""

    def replace(source: str, old: str, new: str) -> str:
        assert source.count(old) >= 1, f"the gallery is older than what it breaks: there is no {old!r}"
        return source.replace(old, new)

    return replace
