"""A package as ``slime plugins new`` writes it, installed from its wheel, trains on the real engines."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from slime_testing.scaffold import Scaffold
from tests.e2e.conftest import LIMIT_S, NO_EVAL, command


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package of the author's guide."""
    subprocess.run(command("plugins", "new", "advantage-estimator", "my-algo"), cwd=tmp_path, check=True)
    return tmp_path / "slime-my-algo"


def test_the_command_of_a_generated_readme_trains_the_embedded_model(package: Path, tmp_path: Path):
    site, output = tmp_path / "site", tmp_path / "run"
    build = ["hatchling", "build", "--target", "wheel"]
    subprocess.run([sys.executable, "-m", *build], cwd=package, check=True, capture_output=True)
    install = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site]
    subprocess.run([sys.executable, "-m", *install, *(package / "dist").glob("*.whl")], check=True)
    (words,) = Scaffold("advantage-estimator", "my-algo").commands
    assert words in (package / "README.md").read_text()
    ended = subprocess.run(
        command(*words.split()[1:], "--output-dir", output, *NO_EVAL, "--progress", "lines"),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    manifest = json.loads((output / "plugins.json").read_text())["plugins"]
    assert [entry["plugin"] for entry in manifest] == ["core", "my-algo", "models"]
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [0, 1]
    # The mean advantage is minus the loss: of rewards minus medians it is not 0, as it is where means are taken off.
    samples = [json.loads(line) for line in (output / "samples/train-000000.jsonl").read_text().splitlines()]
    assert rows[0]["train/loss"] == pytest.approx(-mean_advantage(samples), abs=1e-5)
    assert rows[0]["train/grad_norm"] > 0


def mean_advantage(samples: list[dict[str, float]]) -> float:
    """The mean of reward minus median of the group, in plain Python."""
    groups: dict[float, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample["group"], []).append(sample["reward"])
    centred = [reward - statistics.median(rewards) for rewards in groups.values() for reward in rewards]
    return sum(centred) / len(centred)
