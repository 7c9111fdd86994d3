"""A plugin of pytest: the tests on examples of Hypothesis alone, on ten times as many, and on other ones in every run.

``make test`` runs the same few examples each time, so that none fails by chance; ``make examples`` looks for more. What
it finds is printed with ``@reproduce_failure``, which goes above the test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TIMES = 10

SETTINGS = "_hypothesis_internal_use_settings"
"""Where a test function keeps its settings; Hypothesis allows the decorator once, and the suites have used it."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Widen what runs on examples, and leave out the rest."""
    on_examples = scale_examples(items, TIMES, derandomize=False, database=None, print_blob=True)
    config.hook.pytest_deselected(items=[item for item in items if item not in on_examples])
    items[:] = on_examples


def scale_examples(items: Sequence[pytest.Item], factor: float, **changes: Any) -> list[pytest.Item]:
    """Multiply the number of examples of the tests that run on examples; return these tests."""
    on_examples = [item for item in items if getattr(_function(item), "is_hypothesis_test", False)]
    for function in {_function(item) for item in on_examples}:  # several items of one function if it is parametrised
        before = getattr(function, SETTINGS, None) or settings()
        count = max(1, round(factor * before.max_examples))
        checks = list(HealthCheck)
        setattr(function, SETTINGS, settings(before, max_examples=count, suppress_health_check=checks, **changes))
    return on_examples


def _function(item: pytest.Item) -> Any:
    method = getattr(item, "obj", None)
    return getattr(method, "__func__", method)
