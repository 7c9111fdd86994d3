"""Representative messages, whole; ``pytest tests/golden/test_messages.py --snapshot-update`` stores those of today.

Read the difference before you commit it: other tests assert what a message names, and only these how it reads.
"""

from __future__ import annotations

import json
import subprocess
import sys

from syrupy.assertion import SnapshotAssertion

from tests.golden.messages import REPO


def test_messages_read_as_stored(snapshot: SnapshotAssertion) -> None:
    """In a process of its own, because checks import Megatron, which takes over the process that loads it."""
    command = [sys.executable, "-m", "tests.golden.messages"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr
    assert "\n\n".join(f"# {mistake}\n{text}" for mistake, text in json.loads(done.stdout).items()) == snapshot
