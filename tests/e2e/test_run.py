"""The output and the files of a run on the real engines."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slime_core.config.load import load
from slime_core.config.model_config import forward_flops
from slime_core.config.schema import ARITHMETIC
from slime_core.plugins.activation import activate
from slime_core.plugins.manifest import Manifest, attach
from tests.e2e.conftest import ONE_ANSWER, Finished, slime

PROMISED = {
    *("step", "rollout/raw_reward", "rollout/response_len/mean", "rollout/truncated_ratio", "train/loss"),
    *("train/pg_loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff", "perf/rollout_time"),
    *("perf/train_time", "perf/log_probs_time", "perf/actor_train_time", "perf/actor_train_tflops"),
    *("perf/rank_memory/mean", "perf/rank_memory/max", "perf/rank_memory_reserved/max", "perf/machine_cpu"),
    *("perf/machine_memory", "perf/update_weights_time", "perf/step_time", "perf/tokens_per_gpu_per_sec"),
}


def test_every_step_has_a_row_with_the_promised_metrics(trained: Finished) -> None:
    rows = trained.rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row.keys() >= PROMISED for row in rows[:4])
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_the_speed_of_training_is_three_forward_passes_over_the_samples(trained: Finished) -> None:
    samples = trained.samples("train-000000.jsonl")
    templates = {len(one["tokens"]) - one["response_length"] - len(one["prompt"]) for one in samples if "tokens" in one}
    (template,) = templates  # the tokenizer has a token for each character
    flops = forward_flops(json.loads((ARITHMETIC / "model" / "config.json").read_text()))
    work = 3 * sum(flops.of(template + len(one["prompt"]) + one["response_length"]) for one in samples)
    row = trained.rows[0]
    assert row["perf/actor_train_tflops"] * row["perf/actor_train_time"] == pytest.approx(work / 1e12)
    assert row["perf/log_probs_time"] + row["perf/actor_train_time"] <= row["perf/train_time"]


def test_every_process_says_what_it_did_when(trained: Finished) -> None:
    spans = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in (trained.folder / "timeline").iterdir()
    }
    assert {one["name"] for one in spans["driver"]} >= {"start", "rollout", "train", "save", "update_weights", "eval"}
    assert spans.keys() == {"driver", "sampler", "learner-0"}
    for process, name, within in (
        ("sampler", "generate", "rollout"),
        ("learner-0", "actor_train", "train"),
        ("learner-0", "publish", "update_weights"),
    ):
        for inner in (one for one in spans[process] if one["name"] == name):
            (outer,) = (one for one in spans["driver"] if (one["name"], one["step"]) == (within, inner["step"]))
            assert outer["start"] - 0.05 <= inner["start"]
            assert inner["start"] + inner["seconds"] <= outer["start"] + outer["seconds"] + 0.05


def test_evaluation_stands_in_the_row_of_the_weights_it_measured(trained: Finished) -> None:
    evaluated = {row["step"]: row["eval/arithmetic"] for row in trained.rows if "eval/arithmetic" in row}
    assert sorted(evaluated) == [0, 2, 4]
    assert evaluated[0] == pytest.approx(0.394, abs=ONE_ANSWER)  # of the embedded checkpoint
    assert {"eval/arithmetic/carries=1", "eval/arithmetic/digits=1+1"} <= trained.rows[0].keys()


def test_trainer_and_engine_agree_on_log_probs_in_fp32(trained: Finished) -> None:
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in trained.rows[:4])
    assert all(row["train/train_rollout_logprob_max_diff"] < 1e-3 for row in trained.rows[:4])


def test_every_sample_carries_the_version_of_the_weights_that_made_it(trained: Finished) -> None:
    for step in range(4):
        samples = trained.samples(f"train-{step:06d}.jsonl")
        assert len(samples) == 256
        assert {tuple(sample["weight_versions"]) for sample in samples} == {(str(step),)}


def test_rewards_are_what_the_samples_say(trained: Finished) -> None:
    samples = trained.samples("train-000000.jsonl")
    assert all(sample["reward"] == float(sample["response"] == sample["label"]) for sample in samples)
    mean = sum(sample["reward"] for sample in samples) / len(samples)
    assert trained.rows[0]["rollout/raw_reward"] == pytest.approx(mean)


def test_the_written_config_repeats_the_run(trained: Finished) -> None:
    active = activate(["datasets", "grpo", "models"])
    again = load(["--config", str(trained.folder / "config.toml")], plugin_options=active.registry.options)
    assert again.config.rollout.num_rollout == 4
    assert again.config.run.seed == 3
    assert again.config.run.plugins == ("grpo",)
    assert again.config.algorithm.advantage_estimator == "grpo"


def test_the_manifest_names_the_plugins_that_ran(trained: Finished) -> None:
    manifest = Manifest.from_json((trained.folder / "plugins.json").read_text())
    assert {entry.name for entry in manifest.plugins} == {"core", "datasets", "grpo", "models"}
    assert {plugin.name for plugin in attach(manifest).plugins} == {"core", "datasets", "grpo", "models"}


def test_a_run_leaves_tensorboard_events_logs_kernels_and_whole_checkpoints(trained: Finished) -> None:
    folder = trained.folder
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert (folder / "logs" / "engine-0.log").stat().st_size > 0
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000004"]
    kernels = json.loads((folder / "kernels.json").read_text())
    assert (kernels["layers"], kernels["attention"], kernels["logits"]) == ("local", "sdpa", "float32")


def test_eval_of_a_run_gives_the_same_accuracy_again_and_measures_sets_with_settings_of_their_own(
    trained: Finished, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n}+1", "label": str(n + 1)} for n in range(6)]
    rows += [{"prompt": "5+5", "label": "10", "metadata": {"sampling_params": {"max_new_tokens": 1}}}]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = f"name = 'sums', path = '{tmp_path}/sums.jsonl', n_samples_per_eval_prompt = 4, temperature = 1.0, top_k = 3"
    again = slime(tmp_path, "eval", trained.folder, "--eval-datasets", own, "--output-dir", tmp_path)
    assert again.code == 0, again.errors
    scores = json.loads((tmp_path / "scores.json").read_text())["metrics"]
    assert f"eval/arithmetic: {scores['eval/arithmetic']:.4f}" in again.output
    assert scores["eval/arithmetic"] == scores["eval/arithmetic-pass@1"]
    assert scores["eval/arithmetic"] == pytest.approx(trained.rows[-1]["eval/arithmetic"], abs=ONE_ANSWER)
    assert 0 < scores["eval/sums-pass@1"] == scores["eval/sums"] <= scores["eval/sums-pass@4"] <= 1
    samples = tmp_path.joinpath("samples", "eval-sums-000000.jsonl").read_text().splitlines()
    short = [json.loads(line) for line in samples][-4:]
    assert len(samples) == 28
    assert [(one["prompt"], one["response_length"]) for one in short] == [("5+5", 1)] * 4
