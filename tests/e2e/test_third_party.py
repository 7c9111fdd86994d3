"""Seven packages of a third party train together and are resumed; ``tests/guards/test_third_party.py`` checks each."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import NO_EVAL, Finished, slime, weights
from tests.third_party_site import install

FLAGS = (
    "--advantage-estimator fixed_baseline --baseline.level 0.25 --policy-loss soft_clip --acme-width 0.2 "
    "--corrections gentle --acme-power 0.7 --rm-type last_digit --generate-function second_try "
    "--data-source endless_sums --plugin notes --rollout-batch-size 6 --n-samples-per-prompt 4 --seed 5 "
    "--num-steps-per-rollout 2 --save-interval 1"
)
RUN = FLAGS.split()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels installed."""
    return install(tmp_path_factory.mktemp("site"))


def run_in(site: Path, folder: Path, *words: str | Path) -> Finished:
    run = slime(folder, "run", *words, "--output-dir", folder, cwd=folder.parent, PYTHONPATH=str(site))
    assert run.code == 0, run.output + run.errors
    return run


@pytest.fixture(scope="module")
def whole(site: Path, on_external: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Three rollouts in one run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return run_in(site, folder, *RUN, "--num-rollout", "3", *NO_EVAL, *on_external)


@pytest.fixture(scope="module")
def resumed(site: Path, whole: Finished, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The same run resumed after its second rollout."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(whole.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000003")
    (folder / "samples" / "train-000002.jsonl").unlink()
    return run_in(site, folder, "--load", folder)


def notes(run: Finished) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "notes.jsonl").read_text().splitlines()]


def test_naming_components_activates_all_that_they_need_with_their_flags(whole: Finished, resumed: Finished) -> None:
    manifest = json.loads((whole.folder / "plugins.json").read_text())["plugins"]
    names = {entry["name"] for entry in manifest}
    assert names >= {"baseline", "softloss", "gentle", "lastdigit", "turns", "sums", "notes"}
    for run in (whole, resumed):
        settings = tomllib.loads((run.folder / "config.toml").read_text())
        assert (settings["softloss"], settings["gentle"]) == ({"width": 0.2}, {"power": 0.7})


def test_every_component_does_its_part(whole: Finished) -> None:
    rows = [row for row in whole.rows if "train/loss" in row]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all({"train/soft_ratio", "train/gentle"} <= row.keys() and row["train/grad_norm"] > 0 for row in rows)
    samples = whole.samples("train-000000.jsonl")
    assert all(eval(sample["prompt"]) == int(sample["label"]) for sample in samples)
    assert {sample["reward"] for sample in samples} <= {0.0, 0.5, 1.0}
    assert any("+" in sample["response"] for sample in samples)


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


def test_a_resumed_run_continues_with_the_prompts_that_come_next(whole: Finished, resumed: Finished) -> None:
    for rollout in range(3):
        file = f"train-{rollout:06d}.jsonl"
        prompts = [[sample["prompt"] for sample in run.samples(file)] for run in (whole, resumed)]
        assert sorted(prompts[0]) == sorted(prompts[1])
    assert [line["start"] for line in notes(resumed) if "start" in line] == [0, 2]
    assert weights(resumed.checkpoint(3) / "hf")
