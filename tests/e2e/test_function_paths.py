"""A run of two learner ranks and two engines at learning rate 0, trained by functions that are named by path."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from slime_core.config.embedded import ARITHMETIC
from tests.answering import Answering
from tests.e2e.conftest import NO_EVAL, Finished, train, weights

CODE = """
import json
from pathlib import Path

import torch


def note(args, what, *more):
    with (Path(args.output_dir) / f"calls-{args.rank}.jsonl").open("a") as file:
        print(json.dumps([what, *more]), file=file)


def started(args):
    note(args, "start", args.world_size, args.bonus)


def before_log_probs(args, model, store_prefix):
    note(args, "log_probs", store_prefix, len(model))


def before_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    note(args, "step", rollout_id, step_id)


def advantages(args, rollout_data):
    note(args, "advantages", sorted(rollout_data))
    pairs = zip(rollout_data["rewards"], rollout_data["loss_masks"])
    rollout_data["advantages"] = [torch.full_like(mask, reward) for reward, mask in pairs]
    rollout_data["returns"] = rollout_data["advantages"]


def postprocess(args, rollout_id, rollout_data):
    lengths = rollout_data["response_lengths"]
    note(args, "postprocess", rollout_id, len(lengths), sorted(rollout_data))
    assert [len(one) for one in rollout_data["log_probs"]] == lengths
    found = {round(value, 4) for one in rollout_data["advantages"] for value in one.tolist()}
    note(args, "found", sorted(found))
    rollout_data["advantages"] = [one + args.bonus for one in rollout_data["advantages"]]
    rollout_data["loss_masks"][0][:] = 0


def weigh(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    return pg_loss * ratio.clamp(max=2.0), loss_masks, {"tis": ratio}


def written(args, version_dir, rollout_engines):
    names = sorted(path.name for path in Path(version_dir).iterdir())
    note(args, "written", Path(version_dir).name, "model.safetensors" in names, len(rollout_engines))
"""


TOKEN = "e2e-t0ken-of-a-service"


@pytest.fixture(scope="module")
def service() -> Iterator[Answering]:
    """Rewards what equals the label, for whoever has the token."""
    with Answering(lambda asked: float(asked["response"].strip() == asked["label"])) as service:
        yield service


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, service: Answering) -> Finished:
    home = tmp_path_factory.mktemp("paths")
    code, settings = home / "mine.py", home / "mine.yaml"
    code.write_text(CODE)
    settings.write_text("bonus: 0.5\n")
    paths = {
        "custom-megatron-init-path": "started",
        "custom-megatron-before-log-prob-hook-path": "before_log_probs",
        "custom-megatron-before-train-step-hook-path": "before_step",
        "custom-advantage-function-path": "advantages",
        "rollout-data-postprocess-path": "postprocess",
        "custom-tis-function-path": "weigh",
        "custom-update-weight-post-write-path": "written",
    }
    words = [word for name, function in paths.items() for word in (f"--{name}", f"{code}:{function}")]
    shape = "--num-rollout 2 --num-steps-per-rollout 2 --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --lr 0"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("E2E_RM_TOKEN", TOKEN)
        return train(
            home / "run",
            *words,
            *shape.split(),
            *["--use-kl-loss", "--kl-loss-coef", "0.1", "--kl-loss-type", "k3"],
            *["--update-weight-transport", "disk", *NO_EVAL],
            *["--rm-type", "remote_rm", "--rm-url", service.url, "--rm-token-env", "E2E_RM_TOKEN"],
            "--custom-config-path",
            settings,
        )


def calls(run: Finished, rank: int) -> list[list[Any]]:
    return [json.loads(line) for line in (run.folder / f"calls-{rank}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_function_is_called_on_every_rank_in_the_order_of_a_run(run, rank):
    once = ["log_probs", "log_probs", "advantages", "postprocess", "found", "step", "step", "written"]
    assert [call[0] for call in calls(run, rank)] == ["start", "written", *once, *once]


def test_functions_are_handed_what_slime_hands_over(run):
    found = calls(run, 1)
    assert found[0] == ["start", 2, 0.5]
    assert [call[1:] for call in found if call[0] == "log_probs"] == [["ref_", 1], ["", 1]] * 2
    assert [call[1:] for call in found if call[0] == "step"] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert [call[1:] for call in found if call[0] == "written"] == [[f"version-{n}", True, 2] for n in range(3)]
    (rollout, samples, columns) = next(call[1:] for call in found if call[0] == "postprocess")
    assert (rollout, samples) == (0, 128)
    assert {"tokens", "loss_masks", "advantages", "log_probs", "ref_log_probs", "rollout_log_probs"} <= {*columns}
    advantages = next(call[1] for call in found if call[0] == "advantages")
    assert {"tokens", "loss_masks", "rewards", "log_probs", "kl", "rollout_log_probs"} <= {*advantages}
    assert {value for call in found if call[0] == "found" for value in call[1]} == {0.0, 1.0}  # rewards as they are


def test_what_they_return_is_trained_and_reported(run):
    assert Counter(row["step"] for row in run.rows if "train/tis" in row) == {0: 1, 1: 1}
    for row in run.rows:
        # Trainer and engine agree on the CPU, so each ratio is 1; each rank leaves one of the 256 samples out.
        assert row["train/tis"] == pytest.approx(254 / 256, rel=1e-5)


def test_the_record_holds_the_functions(run):
    functions = json.loads((run.folder / "plugins.json").read_text())["functions"]
    assert {row["plugin"] for row in functions} >= {"custom_tis_function_path", "rollout_data_postprocess_path"}
    assert "paths" in run.output.splitlines()[0]


def test_learning_rate_zero_leaves_the_weights_bit_for_bit(run):
    assert weights(run.folder / "checkpoints" / "step-000002" / "hf") == weights(ARITHMETIC / "model")
    assert [row["train/kl_loss"] for row in run.rows] == [0.0, 0.0]
    assert all(row["train/train_rollout_logprob_max_diff"] < 1e-3 for row in run.rows)
    assert all((run.folder / "logs" / f"engine-{number}.log").exists() for number in (0, 1))


def test_the_secret_of_a_service_stands_in_nothing_that_a_run_writes_or_says(run, service):
    assert set(service.authorized) == {f"Bearer {TOKEN}"}
    assert [path for path in run.folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()] == []
    assert TOKEN not in run.output + run.errors
