from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import InvalidVersion, Version

from slime_core.errors import PluginError, RunError
from slime_core.user_code.failures import boundary, place_of


def line_of(failure: BaseException | None) -> int:
    """The line of the test that raised the exception."""
    assert failure is not None
    assert failure.__traceback__ is not None
    assert failure.__traceback__.tb_next is not None
    return failure.__traceback__.tb_next.tb_lineno


def test_a_failure_leaves_with_owner_action_cause_and_next_step() -> None:
    with (
        pytest.raises(PluginError, match=r"'x': scoring .*KeyError: 'label'\nFix it") as failure,
        boundary("plugin 'x'", "scoring", next_step="Fix it."),
    ):
        raise KeyError("label")
    assert isinstance(failure.value.__cause__, KeyError)


def test_while_running_it_leaves_as_the_error_that_the_caller_chose() -> None:
    with pytest.raises(RunError, match=r"'x'.*ValueError: no"), boundary("plugin 'x'", "scoring", error=RunError):
        raise ValueError("no")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_a_cancellation_passes_through(kind: type[BaseException]) -> None:
    with pytest.raises(kind), boundary("plugin 'x'", "scoring"):
        raise kind


class Skipped(BaseException):
    """Like what ``pytest.skip`` raises."""


@pytest.mark.parametrize("kind", [SystemExit, Skipped])
def test_any_other_exception_leaves_as_our_error(kind: type[BaseException]) -> None:
    with pytest.raises(PluginError, match=rf"'x'.*{kind.__name__}: no"), boundary("plugin 'x'", "importing it"):
        raise kind("no")


def test_on_request_it_says_where_the_failure_was_raised() -> None:
    with pytest.raises(PluginError) as failure, boundary("plugin 'x'", "scoring", locate=True):
        raise ValueError("no")
    line = line_of(failure.value.__cause__)
    function = test_on_request_it_says_where_the_failure_was_raised.__name__
    assert str(failure.value).endswith(f"ValueError: no ({__file__}:{line}, in {function})")


USERS = """
import json
import textwrap

def parse(text):
    return json.loads(text)

def fill(text):
    return textwrap.fill(text, width=0)

def call(function):
    return function()

class Reward:
    def score(self, text):
        return call(lambda: parse(text))
"""


@pytest.mark.parametrize(
    ("call", "place"),
    [("parse('{')", "6, in parse"), ("fill('a b')", "9, in fill"), ("Reward().score('{')", "6, in parse")],
)
def test_the_place_is_the_innermost_line_of_the_users_file(tmp_path: Path, call: str, place: str) -> None:
    path = tmp_path / "mine.py"
    names: dict[str, object] = {}
    exec(compile(USERS, str(path), "exec"), names)
    with pytest.raises(PluginError, match=f"mine.py:{place}"), boundary("plugin 'x'", "scoring", locate=True):
        eval(call, names)


def test_the_place_in_a_library_is_that_of_the_package_that_was_called() -> None:
    with pytest.raises(InvalidVersion) as failure:
        Version("no version")
    called = failure.value.with_traceback(failure.tb.tb_next)
    assert re.fullmatch(r"\(.*packaging/version\.py:\d+, in .*\)", place_of(called))


def test_the_message_names_the_log_that_has_the_traceback(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "sampler.log"
    code = (
        "from pathlib import Path; from slime_core.user_code.failures import boundary; "
        "from slime_core.runtime.actors import keep_output; keep_output(Path('LOG'))\n"
        "try:\n    with boundary('x', 'scoring', locate=True): {}['gone']\nexcept Exception as e: print(e)"
    ).replace("LOG", str(log))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert str(log) in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "KeyError: 'gone'" in log.read_text().split("Traceback")[1]


def test_a_failure_inside_another_boundary_is_located_once() -> None:
    with (
        pytest.raises(PluginError) as failure,
        boundary("plugin 'x'", "its hook", locate=True),
        boundary("mine.py:f", "calling it", locate=True),
    ):
        raise ValueError("no")
    assert failure.value.__cause__ is not None
    line = line_of(failure.value.__cause__.__cause__)
    assert re.findall(r"'x'|mine\.py:f|boundary\.py:\d+", str(failure.value)) == [
        "'x'",
        "mine.py:f",
        f"boundary.py:{line}",
    ]


def test_an_error_that_may_pass_comes_out_as_it_is() -> None:
    with pytest.raises(RunError, match=r"^too long$"), boundary("plugin 'x'", "scoring", passes=(RunError,)):
        raise RunError("too long")
    with pytest.raises(PluginError, match="ValueError"), boundary("x", "scoring", passes=(RunError,)):
        raise ValueError("no")
