"""Each command line that is refused is refused with the stored message, which names what was given."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from tests.golden.messages import REPO, STORED, lines

AGAIN = "if this is meant, store it with python -m tests.golden.messages --write, and read the difference"


def parse(text: str) -> dict[str, str]:
    """Command line -> message, of the stored form."""
    return dict(block.split("\n", maxsplit=1) for block in text.rstrip("\n").split("\n\n"))


MESSAGES = parse(STORED.read_text())


def test_messages_equal_the_stored_ones() -> None:
    """In a process of its own, because checks import Megatron, which takes over the process that loads it."""
    command = [sys.executable, "-m", "tests.golden.messages"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr
    found = parse(done.stdout)
    assert found.keys() == MESSAGES.keys(), AGAIN
    assert {line: found[line] for line in MESSAGES if found[line] != MESSAGES[line]} == {}, AGAIN


def test_no_stored_command_is_accepted_or_ends_in_a_traceback() -> None:
    assert [line for line, message in MESSAGES.items() if "is accepted" in message or "Traceback" in message] == []


@pytest.mark.parametrize("line", lines())
def test_a_message_names_what_was_given(line: str) -> None:
    given = [re.sub("^--(no-)?(sglang-)?|=$", "", word) for word in shlex.split(line)]
    message = MESSAGES[line]
    assert any(word in message or word.replace("-", "_") in message for word in given)
