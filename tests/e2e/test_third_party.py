"""Seven packages of a third party, outside the repository's own: built, typed strictly, run together and resumed.

``tests/third_party`` holds their sources; they import what plugins may import and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import LIMIT_S, NO_EVAL, Finished, command, weights

REPO = Path(__file__).parents[2]
CACHE = REPO / ".mypy_cache" / "third-party"
PACKAGES = sorted(path.parent for path in (REPO / "tests" / "third_party").glob("*/pyproject.toml"))
FLAGS = (
    "--advantage-estimator fixed_baseline --baseline.level 0.25 --policy-loss soft_clip --acme-width 0.2 "
    "--corrections gentle --acme-power 0.7 --rm-type last_digit --generate-function second_try "
    "--data-source endless_sums --plugin notes --rollout-batch-size 6 --n-samples-per-prompt 4 --seed 5 "
    "--num-steps-per-rollout 2 --save-interval 1"
)
RUN = FLAGS.split()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the seven wheels installed."""
    dist, site = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("site")
    for package in PACKAGES:
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(dist)]
        subprocess.run(build, cwd=package, check=True, capture_output=True)
    wheels = sorted(map(str, dist.glob("*.whl")))
    assert len(wheels) == 7
    install = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", *install, *wheels], check=True)
    return site


def slime(site: Path, folder: Path, *words: str | Path) -> Finished:
    ended = subprocess.run(
        command(*words),
        cwd=folder.parent,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return Finished(ended.returncode, ended.stdout, ended.stderr, folder)


@pytest.fixture(scope="module")
def whole(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Three rollouts in one run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return slime(site, folder, "run", *RUN, "--num-rollout", "3", *NO_EVAL, "--output-dir", folder)


@pytest.fixture(scope="module")
def resumed(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two rollouts, and a third one after a resume."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    slime(site, folder, "run", *RUN, "--num-rollout", "2", *NO_EVAL, "--output-dir", folder)
    return slime(site, folder, "run", "--load", folder, "--num-rollout", "3")


def notes(run: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "notes.jsonl").read_text().splitlines()]


def test_what_is_installed_is_typed_strictly(site: Path, tmp_path: Path) -> None:
    installed = [word for package in PACKAGES for word in ("-p", package.name.replace("-", "_"))]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(CACHE), *installed],
        cwd=tmp_path,  # the author's settings are none
        env=os.environ | {"MYPYPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "in 9 source files" in checked.stdout


@pytest.mark.parametrize("name", ["baseline", "softloss", "gentle", "lastdigit", "turns", "sums", "notes"])
def test_an_installed_plugin_is_sound(name: str, site: Path, tmp_path: Path) -> None:
    assert name in slime(site, tmp_path / "none", "plugins", "check", name).output


def test_naming_components_activates_all_that_they_need(whole: Finished) -> None:
    manifest = json.loads((whole.folder / "plugins.json").read_text())["plugins"]
    names = {entry["plugin"] for entry in manifest}
    assert names >= {"baseline", "softloss", "gentle", "lastdigit", "turns", "sums", "notes"}


def test_every_component_does_its_part(whole: Finished) -> None:
    rows = [row for row in whole.rows if "train/loss" in row]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all({"train/soft_ratio", "train/gentle"} <= row.keys() and row["train/grad_norm"] > 0 for row in rows)
    samples = whole.samples("train-000000.jsonl")
    assert all(eval(sample["prompt"]) == int(sample["label"]) for sample in samples)
    assert {sample["reward"] for sample in samples} <= {0.0, 0.5, 1.0}
    assert any("+" in sample["response"] for sample in samples)


def test_their_own_flags_are_read_and_kept(whole: Finished, resumed: Finished) -> None:
    for run in (whole, resumed):
        settings = tomllib.loads((run.folder / "config.toml").read_text())
        assert (settings["softloss"], settings["gentle"]) == ({"width": 0.2}, {"power": 0.7})


def test_the_tracker_writes_metrics_and_samples_into_the_run_folder(whole: Finished) -> None:
    lines = notes(whole)
    assert lines[0] == {"start": 0}
    assert [line["step"] for line in lines if line.get("loss") is not None] == [0, 1, 2]
    written = {line["step"]: line["samples"] for line in lines if "samples" in line}
    for step in range(3):
        rows = whole.samples(f"train-{step:06d}.jsonl")
        assert written[step] == [[row["prompt"], row["response"], row["reward"]] for row in rows]
        assert len(rows) == 24
    assert lines[-1] == {"end": True}


def test_a_resumed_run_goes_on_with_the_prompts_that_come_next(whole: Finished, resumed: Finished) -> None:
    for rollout in range(3):
        file = f"train-{rollout:06d}.jsonl"
        prompts = [[sample["prompt"] for sample in run.samples(file)] for run in (whole, resumed)]
        assert sorted(prompts[0]) == sorted(prompts[1])
    assert [line["start"] for line in notes(resumed) if "start" in line] == [0, 2]
    assert weights(resumed.folder / "checkpoints" / "step-000003" / "hf")
