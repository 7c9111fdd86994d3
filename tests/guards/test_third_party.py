"""Eight packages of a third party are typed strictly and sound.

``tests/third_party`` holds their sources, which import what plugins may import and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.third_party_site import PACKAGES, ROOT, install


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the eight wheels installed."""
    assert len(PACKAGES) == 8
    return install(tmp_path_factory.mktemp("site"))


def test_what_is_installed_is_typed_strictly(site: Path) -> None:
    installed = [word for package in PACKAGES for word in ("-p", package.name.replace("-", "_"))]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *installed],
        cwd=ROOT,  # `make types` has left its cache there
        env=os.environ | {"MYPYPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "in 12 source files" in checked.stdout


@pytest.mark.parametrize("name", ["baseline", "softloss", "gentle", "lastdigit", "turns", "sums", "notes", "gain"])
def test_an_installed_plugin_is_sound(name: str, site: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "slime_core", "plugins", "check", name]
    around = os.environ | {"PYTHONPATH": str(site)}
    checked = subprocess.run(words, cwd=tmp_path, env=around, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert name in checked.stdout
