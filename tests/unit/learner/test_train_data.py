"""The train data of a rank as a file: a case by hand, and the columns that passes filled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from slime_core.config.schema import RunConfig
from slime_core.learner import LearnerSettings
from slime_core.learner.micro_batches import idle_micro_batch, make_micro_batches
from slime_core.learner.rank import save_train_data, trained_columns
from slime_core.opaque import Opaque
from slime_core.types import StepPlan, TrainBatch


def shard() -> TrainBatch:
    """Sample 0: prompt 5 14 5, response 7 1. Sample 1: prompt 20 21, response 22. A step each, the second first."""
    return TrainBatch(
        rollout=3,
        tokens_T=np.array([5, 14, 5, 7, 1, 20, 21, 22], np.int32),
        lengths_B=np.array([5, 3]),
        response_lengths_B=np.array([2, 1]),
        loss_mask_U=np.array([1, 0, 1], np.int8),
        loss_weights_B=np.array([0.5, 0.25], np.float32),
        rollout_log_probs_U=np.array([-0.1, -0.2, -0.3], np.float32),
        columns_B={"advantages": np.array([2, -1], np.float32)},
        steps=(StepPlan(((1,),)), StepPlan(((0,),), divisor=2)),
        indices_B=np.array([10, 11]),
        temperature=0.7,
        weight_version_B=np.array([4, -1]),
    )


def settings(**more: int) -> LearnerSettings:
    return LearnerSettings(RunConfig(), Path("model"), "Toy", "clipped", 1, **more)  # type: ignore[arg-type]


def test_columns_stand_in_the_order_of_the_shard_whatever_the_plan() -> None:
    batch = shard()
    steps = make_micro_batches(batch)
    steps[0][0].old_log_probs_U = torch.tensor([-3.0])
    steps[1][0].old_log_probs_U = torch.tensor([-1.0, -2.0], requires_grad=True)
    steps[1].append(idle_micro_batch(steps[1][0]))
    found = trained_columns(batch, steps)
    assert found["tokens_T"].tolist() == [5, 14, 5, 7, 1, 20, 21, 22]
    assert found["advantages_B"].tolist() == [2, -1]
    assert found["trained/advantages_U"].tolist() == [2, 2, -1]
    assert found["trained/weights_U"].tolist() == [0.5, 0, 0.25]
    assert found["trained/mask_U"].tolist() == [1, 0, 1]
    assert found["trained/old_log_probs_U"].tolist() == [-1, -2, -3]
    assert found["trained/rollout_log_probs_U"].tobytes() == batch.rollout_log_probs_U.tobytes()
    assert "trained/ref_log_probs_U" not in found


def test_opaque_inputs_are_in_the_file_and_their_dtypes_next_to_it(tmp_path: Path) -> None:
    bits = np.array([[16256], [16384]], np.int16)  # 1 and 2
    batch = replace(shard(), inputs={"pixels": Opaque(bits, np.array([0, 0]), np.array([2, 0]), "bfloat16")})
    with safe_open(save_train_data(tmp_path / "{rank}", batch, make_micro_batches(batch), settings()), "numpy") as file:
        assert json.loads(file.metadata()["inputs"]) == {"pixels": "bfloat16"}
        assert file.get_tensor("inputs/pixels").tolist() == [[16256], [16384]]
        assert file.get_tensor("inputs/pixels/counts_B").tolist() == [2, 0]


def test_tokens_of_another_rank_are_nan() -> None:
    batch = shard()
    found = trained_columns(batch, make_micro_batches(batch)[:1])
    assert found["trained/mask_U"].tolist()[2] == 1
    assert np.isnan(found["trained/mask_U"][:2]).all()


def test_a_file_holds_the_columns_and_says_whose_they_are(tmp_path: Path) -> None:
    batch = shard()
    path = save_train_data(
        tmp_path / "deep" / "{rollout_id}-{rank}.safetensors",
        batch,
        make_micro_batches(batch),
        settings(rank=1, world_size=2),
    )
    assert path == tmp_path / "deep" / "3-1.safetensors"
    with safe_open(path, "numpy") as file:
        about = file.metadata()
        assert {name: file.get_tensor(name).dtype for name in ("tokens_T", "loss_mask_U")} == {
            "tokens_T": np.int32,
            "loss_mask_U": np.int8,
        }
        assert file.get_tensor("weight_version_B").tolist() == [4, -1]
    assert json.loads(about.pop("steps")) == [
        {"micro_batches": [[1]], "divisor": 1.0, "loss_factor": 1.0},
        {"micro_batches": [[0]], "divisor": 2, "loss_factor": 1.0},
    ]
    assert about == {
        **{"format": "slime train data", "version": "1", "rollout": "3", "rank": "1", "world_size": "2"},
        **{"temperature": "0.7", "inputs": "{}"},
    }


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_train_data(tmp_path / "{rollout_id}", shard(), make_micro_batches(shard()), settings())
    assert list(tmp_path.iterdir()) == []
