"""The files of the core that handle one sample from ``next_groups`` to ``optimizer.step``, as docs/one-sample.md lists
them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import BRIEF, LIMIT_S, command

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "one-sample.md"
ASIDE = ("types/", "ops/", "errors.py")
"""Records, array maths and errors: a reader knows them, or looks them up."""


def trace(folder: Path) -> dict[str, str]:
    """File of the core -> its first function that handled a sample, in order, until the first optimizer step."""
    where = folder / "trace"
    where.mkdir()
    hook = str(Path(__file__).with_name("sample_trace"))
    path = os.pathsep.join([hook, *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ("run", "--plugin", "grpo", "--output-dir", folder / "run", "--num-rollout", "1", "--progress", "lines")
    subprocess.run(
        command(*words, *BRIEF),
        env={**os.environ, "PYTHONPATH": path, "SLIME_SAMPLE_TRACE": str(where)},
        check=True,
        timeout=LIMIT_S,
    )
    lines = sorted(
        (int(stamp), file, function)
        for path in where.iterdir()
        for stamp, file, function in (line.split("\t") for line in path.read_text().splitlines())
    )
    last = max(stamp for stamp, _, function in lines if function == "optimizer.step")
    found: dict[str, str] = {}
    for stamp, file, function in lines:
        if stamp <= last and not file.startswith(ASIDE):
            found.setdefault(file, function)
    return found


def test_the_page_lists_the_files_that_one_sample_crosses(tmp_path: Path) -> None:
    found = trace(tmp_path)
    for file, function in found.items():
        print(f"{file:40} {function}")
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`", PAGE.read_text(), re.MULTILINE)
    assert set(found) == set(listed)
    assert len(listed) == len(set(listed))
    assert f"{len(listed)} files" in PAGE.read_text()
