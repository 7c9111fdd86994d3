"""A plugin that implements every lifecycle hook, in live runs of two learner ranks."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Finished, slime

pytestmark = pytest.mark.long

PLUGIN = Path(__file__).with_name("watcher.py")

SMALL = (
    *("--actor-num-gpus-per-node", "2", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
    *("--num-steps-per-rollout", "2", "--use-kl-loss", "--save-interval", "2", "--no-save-hf"),
    *("--eval-prompt-data", "none", "--eval-interval", "none", "--progress", "lines", "--lr", "0.0003"),
    *("--sample-transforms", "mask_truncated", "drop_zero_std"),
)


@dataclass(frozen=True)
class Watched:
    """A run that has ended, and what the plugin wrote of it, line by line."""

    run: Finished
    lines: list[dict[str, Any]]

    def saw(self, hook: str) -> list[dict[str, Any]]:
        """What the calls of one hook wrote."""
        named = [line for line in self.lines if line["hook"] == hook]
        return [{name: value for name, value in line.items() if name not in ("hook", "pid")} for line in named]


NAMED = ("--plugin", "grpo", "--plugin", PLUGIN)


def live(run: Path, notes: Path, *words: str | Path) -> Watched:
    """A run of folder ``run`` with the plugin, which writes into the new folder ``notes``."""
    notes.mkdir()
    ended = slime(run, "run", "--watcher.folder", notes, *SMALL, *words)
    assert (notes / "seen.jsonl").exists(), ended.errors + ended.output
    lines = (notes / "seen.jsonl").read_text().splitlines()
    return Watched(ended, [json.loads(line) for line in lines])


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, on_external: tuple[str, str]) -> Watched:
    """Two rollouts of two optimizer steps, and a checkpoint; an observer on rank 0 fails each time."""
    folder = tmp_path_factory.mktemp("lifecycle")
    words = (*NAMED, *on_external, "--num-rollout", "2", "--output-dir", folder / "run")
    watched = live(folder / "run", folder / "first", *words)
    assert watched.run.code == 0, watched.run.errors + watched.run.output
    return watched


@pytest.fixture(scope="module")
def resumed(first: Watched) -> Watched:
    """A copy of the same run, resumed for a third rollout, which a participant on rank 1 ends."""
    run = first.run.folder.with_name("copied")
    shutil.copytree(first.run.folder, run)
    words = (*NAMED, "--load", run, "--output-dir", run, "--num-rollout", "3", "--watcher.breaks", "true")
    return live(run, run.parent / "resumed", *words)


def test_the_driver_and_the_sampler_call_their_hooks(first: Watched) -> None:
    assert first.saw("run_start") == [{"step": 0, "total": 2, "lr": 0.0003}]
    assert first.saw("after_weight_sync") == [{"version": version} for version in range(3)]
    assert first.saw("run_end") == [{"error": None}]
    for row in first.run.rows:
        batches = [line["samples"] for line in first.saw("before_rollout") if line["rollout"] == row["step"]]
        assert batches[0] == [4] * 8
        assert len(batches) == 1 + row["rollout/refills"]
        assert sum(map(len, batches)) == 8 + row.get("rollout/dropped/zero_std", 0)
    assert first.saw("after_rollout") == [{"rollout": rollout, "rewarded": True} for rollout in range(2)]


def test_what_plugin_code_prints_and_logs_is_in_the_log_of_its_process(first: Watched) -> None:
    hooks = {"sampler": "before_rollout", "rank-0": "before_train_step", "rank-1": "before_train_step"}
    for log, hook in hooks.items():
        text = (first.run.folder / "logs" / f"{log}.log").read_text()
        assert f"watcher prints {hook}\n" in text
        assert f" INFO watcher: watcher logs {hook}\n" in text


def test_transforms_drop_what_is_counted_written_and_replaced(first: Watched) -> None:
    for row in first.run.rows:
        samples = first.run.samples(f"train-{row['step']:06d}.jsonl")
        dropped = [sample for sample in samples if sample.get("dropped") == "zero_std"]
        assert len(samples) - len(dropped) == 8 * 4
        assert len(dropped) == row.get("rollout/dropped/zero_std", 0) * 4
        assert row["rollout/zero_std_groups"] == pytest.approx(len(dropped) / len(samples))
        rewards = {sample["group"]: set() for sample in samples if "dropped" not in sample}
        for sample in samples:
            rewards.get(sample["group"], set()).add(sample["reward"])
        assert all(values == {0.0, 1.0} for values in rewards.values())


def test_every_rank_calls_start_passes_and_steps_with_the_weights_of_the_role(first: Watched) -> None:
    starts = sorted(first.saw("learner_start"), key=lambda line: line["rank"])
    assert starts == [{"rank": rank, "world": 2, "chunks": 0} for rank in range(2)]
    for rank in range(2):
        steps = [line for line in first.saw("before_train_step") if line["rank"] == rank]
        assert [(line["rollout"], line["step"]) for line in steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        passes = [line for line in first.saw("before_log_probs") if line["rank"] == rank]
        assert [line["role"] for line in passes] == ["reference", "actor"] * 2
        reference, actor, still_reference, moved_actor = [line["weights"] for line in passes]
        assert reference == actor == still_reference != moved_actor


def test_a_checkpoint_holds_the_state_of_each_place_of_the_ranks_that_of_rank_0(first: Watched) -> None:
    state = json.loads((first.run.folder / "checkpoints" / "step-000002" / "state.json").read_text())
    places = [line["place"] for line in first.saw("checkpoint_state")]
    # Before each of the two rollouts too, for a SIGTERM during it.
    assert sorted(places) == ["driver", "rank", "sampler", "sampler", "sampler"]
    calls = {place: held["watcher"]["calls"] for place, held in state["plugin_states"].items()}
    # Counted by each process: itself included, the last publication and the end of the run not yet.
    rollouts = len(first.saw("before_rollout")) + len(first.saw("after_rollout"))
    assert calls == {"driver": 4, "sampler": rollouts + 3, "rank": 13}
    assert state["cursor"]["source"]["next"] == sum(len(line["samples"]) for line in first.saw("before_rollout"))


def test_a_resume_restores_the_state_of_each_place_on_every_rank(resumed: Watched) -> None:
    restored = resumed.saw("checkpoint_restore")
    held = [(line["place"], line["state"]["calls"]) for line in restored]
    assert [one for one in sorted(held) if one[0] != "sampler"] == [("driver", 4), ("rank", 13), ("rank", 13)]
    (sampler,) = [calls for place, calls in held if place == "sampler"]
    assert sampler >= 5
    assert resumed.saw("run_start") == [{"step": 2, "total": 3, "lr": 0.0003}]


def test_a_resume_by_another_user_imports_nothing_and_says_what_to_name(
    first: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "theirs"
    shutil.copytree(first.run.folder, run)
    ended = slime(run, "run", "--load", run, "--num-rollout", "3", "--watcher.folder", tmp_path)
    assert ended.code == 2
    assert str(run) in ended.errors
    assert "--plugin" in ended.errors
    assert not (tmp_path / "seen.jsonl").exists()


def test_a_participant_that_fails_on_one_rank_ends_the_run_and_says_who_and_where(resumed: Watched) -> None:
    errors = resumed.run.errors
    assert resumed.run.code == 2, errors
    assert "slime: plugin 'watcher' (" in errors
    assert re.search("slime_before_train_step .*learner rank 1 .*ValueError: rank 1 has had enough", errors)
    assert "Traceback" not in errors
    (end,) = resumed.saw("run_end")
    assert "had enough" in end["error"]
    assert [line["version"] for line in resumed.saw("after_weight_sync")] == [2]
    assert not (resumed.run.folder / "checkpoints" / "step-000003").exists()
