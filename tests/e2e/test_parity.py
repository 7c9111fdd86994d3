"""The parity gate in a whole run, on by default; runs that pass it are in test_layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.e2e.conftest import slime

pytestmark = pytest.mark.long

SMALL = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--skip-eval-before-train", "--save-interval", "1")

MISTAKEN = '''
"""Forgets the versions of rollout 0, does everything right in rollout 1, and cools rollout 2 down on its own."""

from dataclasses import replace

from slime_core import hookimpl
from slime_core.builtin.rollout import SingleTurn


@hookimpl
def slime_register(add):
    add.generate_function("mistaken", Mistaken, scope="group", summary="Mistaken")


class Mistaken(SingleTurn):
    async def __call__(self, context, samples, sampling):
        rollout = samples[0].index // 64
        used = replace(sampling, temperature=0.5) if rollout == 2 else sampling
        finished = await super().__call__(context, samples, used)
        return [replace(sample, weight_versions=[]) for sample in finished] if rollout == 0 else finished
'''


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_run_whose_engines_sample_otherwise_than_the_learner_assumes_ends_before_it_trains(
    tmp_path: Path, on_external: tuple[str, str]
) -> None:
    plugin, folder = tmp_path / "mistaken.py", tmp_path / "run"
    plugin.write_text(MISTAKEN)
    words = ("--generate-function", "mistaken", "--num-rollout", "5", "--progress", "lines", "--output-dir", folder)
    words = (*words, "--actor-num-gpus-per-node", "2", *on_external)
    run = slime(folder, "run", "--plugin", "grpo", "--plugin", plugin, *words, *SMALL)
    assert run.code == 1
    assert "rollout 2: " in run.errors
    assert "--rollout-temperature" in run.errors
    assert "Traceback" not in run.errors + run.output
    assert (run.errors + run.output).count("could not be checked") == 1
    assert [row["parity/tokens"] > 0 for row in run.rows] == [False, True]
    assert ["parity/mean" in row for row in run.rows] == [False, True]
    assert checkpoints(folder) == ["step-000001", "step-000002"]
    files = {number: folder / "parity" / f"2-{number}.safetensors" for number in (0, 1)}
    differences = {number: worst_difference(file) for number, file in files.items()}
    worst = max(differences, key=lambda number: differences[number][0])
    _, index, learner, engine = differences[worst]
    assert str(files[worst]) in run.errors
    sampled = map(json.loads, (folder / "samples" / "train-000002.jsonl").read_text().splitlines())
    group = next(sample["group"] for sample in sampled if sample["index"] == index)
    assert f"sample {index} of group {group}, " in run.errors
    assert f"learner {learner:.6g}, engine {engine:.6g}" in run.errors


def worst_difference(file: Path) -> tuple[float, int, float, float]:
    """Largest difference that a rank compared, the sample's index, the learner's log-probability and the engine's."""
    saved = load_file(file)
    learner_U, engine_U = saved["trained/learner_log_probs_U"], saved["rollout_log_probs_U"]
    difference_U = abs(learner_U - engine_U)
    at = difference_U.argmax()
    samples_U = saved["indices_B"].repeat(saved["response_lengths_B"])
    return float(difference_U[at]), int(samples_U[at]), float(learner_U[at]), float(engine_U[at])
