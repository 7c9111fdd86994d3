"""One half of the loop alone, on the real engines: what a live run saved is trained again, twice, to the same bits."""

from __future__ import annotations

import json
from typing import Any

import pytest
from safetensors import safe_open

from tests.e2e.conftest import NO_EVAL, Finished, train

# Three runs before the first test begins.
pytestmark = pytest.mark.timeout(900)

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
    beside = folder.parent
    words = ("--save-debug-rollout-data", beside / "{rollout_id}.jsonl")
    return train(folder, *SMALL, *NO_EVAL, *KL, *words, "--save-debug-train-data", folder / "{rollout_id}-{rank}.st")


@pytest.fixture(scope="module")
def again(live: Finished) -> tuple[Finished, Finished]:
    """The learner alone on the rollouts of the live run, two times."""
    files = live.folder.parent / "{rollout_id}.jsonl"

    def start(name: str) -> Finished:
        folder = live.folder.parent / name
        saved = ("--save-debug-train-data", folder / "{rollout_id}-{rank}.st")
        return train(folder, *SMALL, *KL, "--load-debug-rollout-data", files, *saved)

    return start("first"), start("second")


def test_the_same_rollouts_are_trained_to_the_same_bits(live: Finished, again: tuple[Finished, Finished]) -> None:
    name = "checkpoints/step-000002/hf/model.safetensors"
    weights = [saved_by(run, name) for run in (live, *again)]
    assert weights[1] == weights[2]
    assert weights[0] == weights[1]
    assert trained(again[0]) == trained(again[1]) == trained(live)
    assert all(len(row) > 5 for row in trained(live))


def test_saved_rollouts_become_the_very_shards_of_the_live_run(
    live: Finished, again: tuple[Finished, Finished]
) -> None:
    for name in ("0-0.st", "1-0.st"):
        found = [columns(run, name) for run in (live, *again)]
        assert found[0].keys() >= {"tokens_T", "trained/advantages_U", "trained/ref_log_probs_U", "metadata"}
        assert found[0] == found[1] == found[2]


def test_training_alone_starts_no_engine_and_ends_where_the_live_run_ended(
    live: Finished, again: tuple[Finished, Finished]
) -> None:
    assert {path.name for path in (live.folder / "logs").iterdir()} >= {"engine-0.log", "router.log"}
    assert [path.name for path in (again[0].folder / "logs").iterdir()] == []
    assert "no engine and no router is started" in again[0].output
    states = [json.loads(saved_by(run, "checkpoints/step-000002/state.json")) for run in (live, again[0])]
    assert states[0]["cursor"] == states[1]["cursor"] != {}
    assert [row["rollout/raw_reward"] for row in again[0].rows] == [row["rollout/raw_reward"] for row in live.rows]
    assert not any(name.startswith("parity/") for row in again[0].rows for name in row)
