"""The set-up of an actor's process: garbage collection, and the file of its output."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from pathlib import Path

from slime_core.runtime.actors import uncollected


def test_garbage_is_looked_for_after_the_block_and_no_more_in_what_it_made() -> None:
    try:
        with uncollected():
            asleep, made = not gc.isenabled(), [[]]
        assert (asleep, gc.isenabled()) == (True, True)
        assert not any(one is made for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_an_actor_may_look_for_garbage_less_often() -> None:
    before = gc.get_threshold()
    try:
        with uncollected():
            pass
        assert gc.get_threshold() == before
        with uncollected(allocations=5_000):
            pass
        assert gc.get_threshold()[0] == 5_000
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


PRINTS = """
import logging, pathlib, sys
from slime_core.runtime.actors import keep_output

keep_output(pathlib.Path(sys.argv[1]))
print("on stdout")
print("on stderr", file=sys.stderr)
logging.getLogger("mine").info("as information")
logging.getLogger("mine").warning("as a warning")
"""


def prints(log: Path) -> tuple[str, str]:
    """What a process prints that keeps its output in ``log``."""
    ended = subprocess.run([sys.executable, "-c", PRINTS, log], capture_output=True, text=True, check=True)
    return ended.stdout, ended.stderr


def test_output_and_logs_of_a_process_are_copied_into_its_file(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "sampler.log"
    stdout, stderr = prints(log)
    assert stdout == "on stdout\n"
    assert stderr.startswith("on stderr\n")
    assert " WARNING mine: as a warning" in stderr
    assert "information" not in stderr
    first, second, *records = log.read_text().splitlines()
    assert (first, second) == ("on stdout", "on stderr")
    assert [record.split(" ", 2)[2] for record in records] == [
        "INFO mine: as information",
        "WARNING mine: as a warning",
    ]
    prints(log)
    assert len(log.read_text().splitlines()) == 8


def test_a_log_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stdout, stderr = prints(tmp_path / "file" / "sampler.log")
    assert stdout == "on stdout\n"
    assert re.match(rf"warning: {tmp_path}/file/sampler\.log .*\(\[Errno ", stderr)
