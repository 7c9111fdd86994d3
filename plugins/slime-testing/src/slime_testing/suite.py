"""The base class of all suites: the tested component, and properties that each subclass gets a copy of.

A property is a method ``test_...``; one that takes examples is marked with :func:`given`. Each subclass gets a
copy, because Hypothesis refuses a function that two classes share.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import hypothesis
from hypothesis.strategies import SearchStrategy

from slime_core import RunView
from slime_core.errors import PluginError
from slime_testing.harness import Kind, Plugin
from slime_testing.subject import Subject, default_run, find

__all__ = ["EXAMPLES", "ComponentSuite", "NotTested", "PropertyViolation", "given", "properties", "require"]

EXAMPLES = 25
"""Number of examples of one property; they are the same in every run."""

_MARK = "_slime_examples"
Property = TypeVar("Property", bound=Callable[..., None])


class PropertyViolation(AssertionError):
    """The component violates its contract; the message describes the violation."""


class NotTested(PropertyViolation):
    """The examples cannot show whether the component follows its contract; the message names what is missing."""


def require(holds: bool, otherwise: str) -> None:
    """Raise ``otherwise`` unless ``holds``.

    Raises:
        PropertyViolation: ``holds`` is False; the message is ``otherwise``.
    """
    if not holds:
        raise PropertyViolation(otherwise)


def given(*, max_examples: int = EXAMPLES, **strategies: SearchStrategy[Any]) -> Callable[[Property], Property]:
    """Mark a property that must hold for every example of the strategies, by parameter name."""

    def mark(function: Property) -> Property:
        setattr(function, _MARK, (max_examples, strategies))
        return function

    return mark


def properties(suite: type) -> list[str]:
    """Return the names of the suite's properties, in the order of their definitions."""
    written: dict[str, None] = {}
    for base in reversed(suite.__mro__):
        written.update(dict.fromkeys(name for name in vars(base) if name.startswith("test_")))
    return list(written)


class Suite:
    """Gives each subclass a copy of every property with examples."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in properties(cls):
            function = inspect.getattr_static(cls, name)
            raw = getattr(function, "_slime_raw", function)
            if hasattr(raw, _MARK):
                setattr(cls, name, _runnable(raw, cls))


class ComponentSuite(Suite):
    """Tests one component.

    Attributes:
        component: name of the component.
        plugin: its plugin, as a word of ``--plugin``; None means the installed plugin that offers the component.
        options: the plugin's options; None means its defaults.
    """

    kind: ClassVar[Kind]
    component: ClassVar[str] = ""
    plugin: ClassVar[str | Plugin | None] = None
    options: ClassVar[Any] = None
    _subject: ClassVar[Subject]

    @classmethod
    def subject(cls) -> Subject:
        """Return the component under test, found once.

        Raises:
            PluginError: the class names no component, or no plugin offers it.
        """
        if "_subject" not in vars(cls):
            cls._subject = _find_subject(cls)
        return cls._subject

    @classmethod
    def make(cls, run: RunView | None = None) -> Any:
        """Build the component as a run does.

        Arguments:
            run: the view of the run; None means a run with every setting at its default.
        """
        subject = cls.subject()
        build = subject.active.build
        return build(cls.kind, subject.component.name, options=subject.options, run=run or default_run(subject))

    @classmethod
    def traits(cls) -> Any:
        """The component's traits."""
        return cls.subject().component.traits


def _find_subject(suite: type[ComponentSuite]) -> Subject:
    if not suite.component:
        raise PluginError(f"{suite.__name__} names no component; write: component = 'NAME'")
    near = Path(inspect.getsourcefile(suite) or ".")
    return find(suite.kind, suite.component, plugin=suite.plugin, options=suite.options, near=near)


def _runnable(raw: Callable[..., None], owner: type) -> Any:
    max_examples, strategies = getattr(raw, _MARK)
    copy = types.FunctionType(raw.__code__, raw.__globals__, raw.__name__, raw.__defaults__, raw.__closure__)
    functools.update_wrapper(copy, raw)
    del copy.__wrapped__  # type: ignore[attr-defined]  # pytest would look through it and request fixtures
    copy.__qualname__ = f"{owner.__qualname__}.{raw.__name__}"
    settings = hypothesis.settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
    )
    runnable = settings(hypothesis.given(**strategies)(copy))
    runnable._slime_raw = raw  # type: ignore[attr-defined]
    return runnable
