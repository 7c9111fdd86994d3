from __future__ import annotations

import asyncio

import pytest

from slime_core.errors import PluginError, RunError
from slime_core.plugins.loading import boundary


def test_a_failure_leaves_with_owner_action_cause_and_next_step():
    with pytest.raises(PluginError) as failure, boundary("plugin 'x'", "scoring", next_step="Fix it."):
        raise KeyError("label")
    assert str(failure.value) == "plugin 'x': scoring failed with KeyError: 'label'\nFix it."
    assert isinstance(failure.value.__cause__, KeyError)


def test_while_running_it_leaves_as_the_error_that_the_caller_chose():
    with (
        pytest.raises(RunError, match="plugin 'x': scoring failed with ValueError: no"),
        boundary("plugin 'x'", "scoring", error=RunError),
    ):
        raise ValueError("no")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_a_cancellation_passes_through(kind):
    with pytest.raises(kind), boundary("plugin 'x'", "scoring"):
        raise kind


class Skipped(BaseException):
    """Like what ``pytest.skip`` raises."""


@pytest.mark.parametrize("kind", [SystemExit, Skipped])
def test_any_other_exception_leaves_as_our_error(kind):
    with (
        pytest.raises(PluginError, match=f"plugin 'x': importing it failed with {kind.__name__}: no"),
        boundary("plugin 'x'", "importing it"),
    ):
        raise kind("no")


def test_success_passes_through():
    with boundary("plugin 'x'", "scoring"):
        done = True
    assert done


def test_on_request_it_says_where_the_failure_was_raised():
    with pytest.raises(PluginError) as failure, boundary("plugin 'x'", "scoring", locate=True):
        raise ValueError("no")
    line = failure.value.__cause__.__traceback__.tb_next.tb_lineno
    assert str(failure.value) == f"plugin 'x': scoring failed with ValueError: no ({__file__}:{line})"


def test_a_failure_inside_another_boundary_is_located_once():
    with (
        pytest.raises(PluginError) as failure,
        boundary("plugin 'x'", "its hook", locate=True),
        boundary("mine.py:f", "calling it", locate=True),
    ):
        raise ValueError("no")
    line = failure.value.__cause__.__cause__.__traceback__.tb_next.tb_lineno
    expected = f"mine.py:f: calling it failed with ValueError: no ({__file__}:{line})"
    assert str(failure.value) == f"plugin 'x': its hook failed with PluginError: {expected}"


def test_an_error_that_may_pass_comes_out_as_it_is():
    with pytest.raises(RunError, match=r"^too long$"), boundary("plugin 'x'", "scoring", passes=(RunError,)):
        raise RunError("too long")
    with (
        pytest.raises(PluginError, match="scoring failed with ValueError"),
        boundary("x", "scoring", passes=(RunError,)),
    ):
        raise ValueError("no")
