"""A plugin of pytest: the tests on examples of Hypothesis alone, on ten times as many, and on other ones in every run.

``make test`` runs the same few examples each time, so that none fails by chance; ``make examples`` looks for more. What
it finds is printed with ``@reproduce_failure``, which goes above the test.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TIMES = 10

OWN = "_hypothesis_internal_use_settings"
"""Where a test function keeps its settings; Hypothesis allows the decorator once, and the suites have used it."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Widens what runs on examples, and leaves out the rest."""
    on_examples = [item for item in items if getattr(_function(item), "is_hypothesis_test", False)]
    for function in {_function(item) for item in on_examples}:  # several items of one function where it is parametrised
        _widen(function)
    config.hook.pytest_deselected(items=[item for item in items if item not in on_examples])
    items[:] = on_examples


def _function(item: pytest.Item) -> Any:
    method = getattr(item, "obj", None)
    return getattr(method, "__func__", method)


def _widen(function: Any) -> None:
    own = getattr(function, OWN, None) or settings()
    more = settings(
        own,
        max_examples=TIMES * own.max_examples,
        derandomize=False,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    setattr(function, OWN, more)
