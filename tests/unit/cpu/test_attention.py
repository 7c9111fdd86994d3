"""The batched attention of a CPU server computes what SGLang's loop computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.cpu.serve import server_environment

CASES = Path(__file__).with_name("attention_cases.py")


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-W", "ignore", str(CASES)]
    done = subprocess.run(command, env={**os.environ, **server_environment()}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return json.loads(done.stdout)


def test_batched_attention_equals_the_loop_over_sequences(found):
    assert len(found["differences"]) == 10
    assert {name: value for name, value in found["differences"].items() if not value < 2e-6} == {}


def test_sequences_of_one_length_take_one_call_and_none_is_left_out(found):
    assert found["calls"] == 1
    assert found["every"]
