"""A run whose learner, sampler or Ray dies restarts itself, and accounts for every prompt group."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.conftest import Finished, require_ledger, running, slime
from tests.processes import children, left_of, words

STEPS = 2

GATE = """
import os, time
from pathlib import Path
from slime_core import hookimpl

def hold(stage):
    folder = Path(__file__).parent
    (folder / f"at-{stage}").write_text(str(os.getpid()))
    while (folder / f"hold-{stage}").exists():
        time.sleep(0.02)

@hookimpl
def slime_sampler_start(sampler):
    hold("start")

@hookimpl
def slime_before_train_step(step):
    if step.rollout == 1:
        hold("training")
"""
"""A plugin that waits at the start, and before the second step, while the file ``hold-STAGE`` is next to it."""


def test_a_run_survives_the_death_of_a_rank_of_ray_and_of_its_driver(tmp_path: Path) -> None:
    folder, gates = tmp_path / "run", {stage: tmp_path / f"hold-{stage}" for stage in ("start", "training")}
    (tmp_path / "gate.py").write_text(GATE)
    seen: dict[str, str] = {}

    def reached() -> dict[str, str]:
        """Stage -> the process that came to it last."""
        places = {stage: tmp_path / f"at-{stage}" for stage in gates}
        return {stage: place.read_text() for stage, place in places.items() if place.exists()}

    gates["training"].touch()
    sizes = ("--seed", "3", "--num-rollout", str(STEPS), "--save-interval", "1")
    with running(folder, "--plugin", tmp_path / "gate.py", *sizes) as run:

        def wait_at(stage: str) -> None:
            """Returns when the run waits at ``stage``, after an earlier start of it did."""
            run.wait_until(lambda: reached().get(stage, "") not in ("", seen.get(stage)))
            seen.update(reached())

        # A rank dies before it trains the second step, Ray as soon as the run has started again.
        for number, (stage, victim) in enumerate([("training", "ray::LearnerActor"), ("start", "raylet/raylet")], 1):
            wait_at(stage)
            before = run.family()
            gates["start"].touch()
            (process,) = children(victim, of=before)
            run.wait_until((folder / "checkpoints" / "step-000001").exists)  # it is written in the background
            process.kill()
            run.wait_until(lambda n=number: run.output.count("slime: restart ") == n)
            assert left_of(*before) == []
            gates["training"].unlink(missing_ok=True)
        wait_at("start")
        run.wait_until(lambda: children("sglang::scheduler", of=run.family()))
        started = run.family()
        names = " ".join(" ".join(words(process)) for process in started)
        assert "ray::DashboardAgent" in names
        assert "ray::RuntimeEnvAgent" in names
        run.process.kill()
        assert left_of(*started) == []
    restarts = re.findall(r"slime: restart (\d) of 3 .* (step-\d+)\. ", run.output)
    assert restarts == [("1", "step-000001"), ("2", "step-000001")]
    assert re.search("learner rank 0: .* died", run.output)
    assert re.search("Ray died: .*raylet", run.output)
    gates["start"].unlink()
    named = ("--plugin", "grpo", tmp_path / "gate.py")  # a run folder runs no code that is not named again
    more: Finished = slime(folder, "run", "--load", folder, "--progress", "lines", *named)
    assert more.code == 0, more.errors
    assert [row["step"] for row in more.rows] == list(range(STEPS))
    require_ledger(folder)
