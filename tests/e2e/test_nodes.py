"""A run whose worker processes have another plugin than the driver: two environments on one machine, real Ray."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
import sys
sys.path.insert(0, sys.argv[1])
from slime_core.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
HOOKS = """
from slime_core import Component, hookimpl
@hookimpl
def slime_register_reward_models():
    yield Component("length", target="acme_toy.code:Length")
"""
CODE = "class Length: pass\n"


def site(folder: Path, *, version: str = "1.0", code: str = CODE) -> Path:
    """A folder with distribution acme-toy, as an installer leaves it."""
    info = folder / f"acme_toy-{version}.dist-info"
    for path in (info, folder / "acme_toy"):
        path.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-toy\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[slime]\ntoy = acme_toy.plugin\n")
    (folder / "acme_toy" / "__init__.py").touch()
    (folder / "acme_toy" / "plugin.py").write_text(HOOKS)
    (folder / "acme_toy" / "code.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    ("version", "code", "differs"),
    [("2.0", CODE, "version"), ("1.0", "class Length: changed = True\n", "content of acme_toy/code.py")],
)
def test_workers_of_another_environment_are_refused_before_an_engine_starts(
    tmp_path: Path, version: str, code: str, differs: str
):
    driver = site(tmp_path / "driver")
    workers = site(tmp_path / "workers", version=version, code=code)
    words = ("run", "--plugin", "grpo", "--plugin", "toy", "--device", "cpu", "--output-dir", tmp_path / "run")
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER, *map(str, [driver, *words])],
        env={**os.environ, "PYTHONPATH": str(workers)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = ended.stderr.splitlines()
    assert lines[0] == "slime: 1 of 1 nodes cannot run the driver's plugins; nothing was started."
    assert lines[1].split() == ["node", "plugin", "driver", "found", "there", "differs", "in"]
    node, plugin, _, wanted, _, _, found, _, *what = lines[2].replace("(127.0.0.1)", "").split()
    assert (node, plugin, wanted, found, " ".join(what)) == (socket.gethostname(), "toy", "1.0", version, differs)
    assert lines[3].startswith("Install the same on every node")
    assert len(lines) == 4
    assert ended.returncode == 2
    assert not (tmp_path / "run").exists()
