"""Builds the packages of ``tests/third_party`` and installs their wheels into a folder, as a user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["PACKAGES", "ROOT", "install"]

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in (ROOT / "tests" / "third_party").glob("*/pyproject.toml"))
BUILD = """
import os, sys
from hatchling import build
wheels, *packages = sys.argv[1:]
for package in packages:
    os.chdir(package)
    build.build_wheel(wheels)
"""


def install(folder: Path) -> Path:
    """Installs all packages into ``folder / "site"``; returns that folder, which goes on ``PYTHONPATH``."""
    wheels, site = folder / "wheels", folder / "site"
    wheels.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, wheels, *PACKAGES], check=True, capture_output=True)
    words = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--target", site, *sorted(wheels.glob("*.whl"))]
    subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)
    return site
