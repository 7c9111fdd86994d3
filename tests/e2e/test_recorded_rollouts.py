"""Generation or training alone, on the real engines: rollouts that a live run saved are trained to the same bits.

The live run publishes nothing, so that its engine and its learner part."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from slime_core.config.schema import ARITHMETIC
from tests.e2e.conftest import LIMIT_S, Finished, command, train, weights
from tests.recorded_runs import FLAGS, rows, tensors, write_rollouts

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]

SMALL = ("--num-rollout", "2", "--rollout-batch-size", "16", "--num-steps-per-rollout", "2", "--seed", "5")
KL = ("--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3")


def saved_by(run: Finished, name: str) -> bytes:
    return (run.folder / name).read_bytes()


def trained(run: Finished) -> list[dict[str, Any]]:
    """What the learner reports of every step."""
    return [{name: value for name, value in row.items() if name.startswith("train/")} for row in run.rows]


def columns(run: Finished, name: str) -> dict[str, Any]:
    """Every column bit for bit, and the packing; a header lists its entries in any order."""
    with safe_open(run.folder / name, "numpy") as file:
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        return {"metadata": file.metadata()} | {key: (str(one.dtype), one.tobytes()) for key, one in arrays.items()}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("halves") / "live"
    unpublished = ("--update-weights-interval", "0", "--eval-interval", "2")
    rollouts = ("--save-debug-rollout-data", folder.parent / "{rollout_id}.jsonl")
    shards = ("--save-debug-train-data", folder / "{rollout_id}-{rank}.st")
    return train(folder, *SMALL, *KL, *unpublished, *rollouts, *shards)


@pytest.fixture(scope="module")
def again(live: Finished) -> Finished:
    """The learner alone on the rollouts of the live run."""
    folder, files = live.folder.parent / "again", live.folder.parent / "{rollout_id}.jsonl"
    saved = ("--save-debug-train-data", folder / "{rollout_id}-{rank}.st")
    return train(folder, *SMALL, *KL, "--load-debug-rollout-data", files, *saved)


def test_without_weight_updates_the_engine_serves_what_it_started_with(live: Finished) -> None:
    scores = [row["eval/arithmetic"] for row in live.rows if "eval/arithmetic" in row]
    assert len(scores) == 2
    assert scores[0] == scores[1]
    assert {tuple(sample["weight_versions"]) for sample in live.samples("train-000001.jsonl")} == {("0",)}
    assert weights(live.checkpoint(2) / "hf") != weights(ARITHMETIC / "model")
    # The learner has moved away from the weights that sampled: the metric that watches for it says so.
    assert live.rows[1]["train/train_rollout_logprob_abs_diff"] > 1e-4


def test_the_same_rollouts_become_the_same_shards_and_are_trained_to_the_same_bits(
    live: Finished, again: Finished
) -> None:
    for name in ("0-0.st", "1-0.st"):
        saved = columns(live, name)
        assert saved.keys() >= {"tokens_T", "trained/advantages_U", "trained/ref_log_probs_U", "metadata"}
        assert saved == columns(again, name)
    name = "checkpoints/step-000002/hf/model.safetensors"
    assert saved_by(live, name) == saved_by(again, name)
    assert trained(live)[:2] == trained(again)
    assert all(len(row) > 5 for row in trained(again))


def test_training_alone_starts_no_engine_and_ends_where_the_live_run_ended(live: Finished, again: Finished) -> None:
    assert {path.name for path in (live.folder / "logs").iterdir()} >= {"engine-0.log", "router.log"}
    assert {path.name for path in (again.folder / "logs").iterdir()} == {"rank-0.log", "sampler.log"}
    assert live.cursor(2) == again.cursor(2) != {}
    assert [row["rollout/raw_reward"] for row in again.rows] == [row["rollout/raw_reward"] for row in live.rows[:2]]
    assert not any(name.startswith("parity/") for row in again.rows for name in row)


def test_a_run_that_is_killed_while_it_saves_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Moments of the optimizer and rows of metrics too; `make saves` kills 50 times."""
    words = [sys.executable, "-m", "campaigns.saves", tmp_path, "--kills", "3"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def can_mount() -> bool:
    found = shutil.which("unshare")
    mount = ("unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt")
    return found is not None and not subprocess.run(mount, capture_output=True, check=False).returncode


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces, for a small file system of its own")
def test_a_run_goes_on_with_a_full_disk_and_fails_at_its_last_save(tmp_path: Path) -> None:
    """A file system that has room for the first of three checkpoints."""
    run, files = tmp_path / "run", tmp_path / "kept"
    rollouts = write_rollouts(tmp_path / "rollouts", 3)
    words = [*FLAGS, "--load-debug-rollout-data", rollouts, "--num-rollout", "3", "--output-dir", run]
    script = (
        f"mkdir -p {run}/checkpoints && mount -t tmpfs -o size=4m tmpfs {run}/checkpoints || exit 99\n"
        f'"$@"; code=$?; cp -a {run}/checkpoints {files}; exit $code'
    )
    shell = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*shell, *command("run", *words)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1, done.stderr + done.stdout
    assert [path.name for path in files.iterdir()] == ["step-000001"]
    (warned,) = [line for line in done.stdout.splitlines() if "is not saved" in line]
    assert "warning: step 2 is not saved: " in warned
    assert "No space left on device (" in warned
    assert f" {run}/checkpoints/step-000001 " in warned
    assert "step 3, " in done.stderr
    assert "Traceback" not in done.stderr
    assert [row["step"] for row in rows(run)] == [0, 1]
    assert len(tensors(files / "step-000001" / "torch_dist")) > 30
