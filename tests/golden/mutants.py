"""Applies the mutants of ``capabilities.toml`` to a copy of the tree: the test of each capability has to fail.

    python -m tests.golden.mutants                  all rows; some train or start processes
    python -m tests.golden.mutants --quick          those without ``slow = true``
    python -m tests.golden.mutants --only NAME ...  rows whose name contains one of these texts

Prints a line a row and returns 1 if a test passed in spite of its mutant, or could not be run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("capabilities.toml")
LIMIT_S, SLOW_LIMIT_S = 240, 900
"""For one test, and for one that trains; where a mutant makes a quick one wait for ever, it is noticed then."""
FAILED = 1
"""pytest's exit code where tests ran and some failed; 4 and 5 mean that there was no such test."""


@dataclass(frozen=True)
class Row:
    """A capability; paths are relative to the repository."""

    name: str
    test: str
    file: str
    old: str
    new: str
    slow: bool = False

    def place(self, root: Path) -> Path:
        """The file with the old text: the named one, or if it has moved the only one that holds the text.

        Raises:
            LookupError: no file holds the text exactly once, or several do.
        """
        named = root / self.file
        if named.exists() and named.read_text().count(self.old) == 1:
            return named
        found = [path for path in _sources(root) if path.read_text().count(self.old) == 1]
        if len(found) != 1:
            raise LookupError(f"{self.name}: {len(found)} files hold {self.old!r} once; name it and its file again")
        return found[0]

    def node(self, root: Path) -> str:
        """The test as pytest names it; of a moved file, the only test of that name.

        Raises:
            LookupError: there is none, or there are several.
        """
        path, _, function = self.test.partition("::")
        wanted = f"def {function.partition('[')[0]}("
        if (root / path).exists() and (not function or wanted in (root / path).read_text()):
            return self.test
        tests = [path for folder in ("tests", "plugins") for path in sorted((root / folder).rglob("test_*.py"))]
        found = [one for one in tests if function and wanted in one.read_text()]
        if len(found) != 1:
            raise LookupError(f"{self.name}: {len(found)} files have a test {function}; name it again")
        return f"{found[0].relative_to(root)}::{function}"


def rows() -> list[Row]:
    """All rows of the table."""
    return [Row(name, **row) for name, row in tomllib.loads(TABLE.read_text()).items()]


def _sources(root: Path) -> Iterator[Path]:
    yield from sorted((root / "slime_core").rglob("*.py"))
    yield from sorted((root / "plugins").glob("*/src/**/*.py"))


def verdict(row: Row) -> str:
    """Empty if the test fails under the mutant, and otherwise what happened."""
    with tempfile.TemporaryDirectory(prefix="slime-mutant-") as folder:
        root = Path(folder) / "tree"
        skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "outputs", "dist", "build")
        shutil.copytree(REPO, root, symlinks=True, ignore=skipped)
        mutated = row.place(root)
        mutated.write_text(mutated.read_text().replace(row.old, row.new))
        sources = [root, *sorted((root / "plugins").glob("*/src"))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources)), "PYTHONDONTWRITEBYTECODE": "1"}
        limit_s = SLOW_LIMIT_S if row.slow else LIMIT_S
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", str(limit_s), row.node(root)]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == FAILED:
        return ""
    return "the test passed" if done.returncode == 0 else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.mutants")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", default=[""])
    chosen = parser.parse_args()
    wanted = [row for row in rows() if any(text in row.name for text in chosen.only)]
    survivors = 0
    for row in wanted:
        if chosen.quick and row.slow:
            print(f"{row.name}: left out, slow", flush=True)
            continue
        found = verdict(row)
        survivors += bool(found)
        print(f"{row.name}: {found or 'noticed'}", flush=True)
    print(f"{survivors} of {len(wanted)} not noticed")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
