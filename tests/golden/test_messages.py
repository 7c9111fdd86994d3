"""Each command line that is refused is refused with the stored message, which names what was given."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from tests.golden.messages import REPO, STORED, lines

AGAIN = "if this is meant, store it with python -m tests.golden.messages --write, and read the difference"


def said(text: str) -> dict[str, str]:
    """Command line -> message, of the stored form."""
    return dict(block.split("\n", maxsplit=1) for block in text.rstrip("\n").split("\n\n"))


SAID = said(STORED.read_text())


def test_what_is_said_is_what_is_stored() -> None:
    """In a process of its own, because checks import Megatron, which takes over the process that loads it."""
    command = [sys.executable, "-m", "tests.golden.messages"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = said(done.stdout)
    assert found.keys() == SAID.keys(), AGAIN
    assert {line: found[line] for line in SAID if found[line] != SAID[line]} == {}, AGAIN


def test_nothing_stored_is_accepted_and_nothing_is_an_accident() -> None:
    assert [line for line, message in SAID.items() if "is accepted" in message or "Traceback" in message] == []


@pytest.mark.parametrize("line", lines())
def test_a_message_names_what_was_given(line: str) -> None:
    given = [re.sub("^--(no-)?(sglang-)?|=$", "", word) for word in shlex.split(line)]
    message = SAID[line]
    assert any(word in message or word.replace("-", "_") in message for word in given)
