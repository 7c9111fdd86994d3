from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from slime_core.config.schema import RunConfig
from slime_core.errors import RunError
from slime_core.learner import LearnerSettings
from slime_core.learner.micro_batches import RowInputs, idle_micro_batch, make_micro_batches
from slime_core.learner.rank import save_train_data, trained_columns
from slime_core.learner.trained_model import NamedSpec
from slime_core.modeling.layout import ParallelLayout
from slime_core.opaque import Opaque, column
from slime_core.types import StepPlan, TrainBatch


def shard(*plans: tuple[tuple[int, ...], ...], **more: Any) -> TrainBatch:
    """Sample 0: prompt 5 14 5, response 7 1. Sample 1: prompt 20 21, response 22."""
    return TrainBatch(
        rollout=3,
        tokens_T=np.array([5, 14, 5, 7, 1, 20, 21, 22], np.int32),
        lengths_B=np.array([5, 3]),
        response_lengths_B=np.array([2, 1]),
        loss_mask_U=np.array([1, 0, 1], np.int8),
        loss_weights_B=np.array([0.5, 0.25], np.float32),
        rollout_log_probs_U=np.array([-0.1, -0.2, -0.3], np.float32),
        columns_B={"advantages": np.array([2, -1], np.float32)},
        steps=tuple(StepPlan(plan) for plan in plans),
        indices_B=np.array([10, 11]),
        temperature=0.7,
        **more,
    )


def test_two_samples_in_one_row_by_hand():
    ((micro,),) = make_micro_batches(shard(((0, 1),)))
    assert micro.tokens_1T.tolist() == [[5, 14, 5, 7, 1, 20, 21, 22]]
    assert micro.position_ids_1T.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert micro.cu_seqlens.tolist() == [0, 5, 8]
    assert micro.max_seqlen == 5
    assert micro.rows_U.tolist() == [2, 3, 6]
    assert micro.targets_U.tolist() == [7, 1, 22]
    assert micro.samples_U.tolist() == [0, 0, 1]
    assert micro.mask_U.tolist() == [1, 0, 1]
    assert micro.weights_U.tolist() == [0.5, 0, 0.25]
    assert micro.advantages_U.tolist() == [2, 2, -1]
    assert micro.rollout_log_probs_U.tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert (micro.num_tokens, micro.temperature) == (8, 0.7)
    assert (micro.old_log_probs_U, micro.ref_log_probs_U) == (None, None)
    assert micro.lengths == [5, 3]
    assert {micro.tokens_1T.dtype, micro.position_ids_1T.dtype, micro.rows_U.dtype} == {torch.int64}
    assert micro.cu_seqlens.dtype == torch.int32
    assert {micro.weights_U.dtype, micro.mask_U.dtype, micro.advantages_U.dtype} == {torch.float32}


def test_the_other_order_moves_everything_along():
    ((micro,),) = make_micro_batches(shard(((1, 0),)))
    assert micro.tokens_1T.tolist() == [[20, 21, 22, 5, 14, 5, 7, 1]]
    assert micro.rows_U.tolist() == [1, 5, 6]
    assert micro.targets_U.tolist() == [22, 7, 1]
    assert micro.samples_U.tolist() == [0, 1, 1]
    assert micro.weights_U.tolist() == [0.25, 0.5, 0]
    assert micro.advantages_U.tolist() == [-1, 2, 2]
    assert micro.rollout_log_probs_U.tolist() == pytest.approx([-0.3, -0.1, -0.2])


def test_micro_batches_and_steps_are_those_of_the_plan():
    (together,) = make_micro_batches(shard(((0,), (1,))))
    first, second = make_micro_batches(shard(((1,),), ((0,),)))
    assert [micro.tokens_1T.tolist() for micro in together] == [[[5, 14, 5, 7, 1]], [[20, 21, 22]]]
    assert [[micro.num_tokens for micro in step] for step in (first, second)] == [[3], [5]]
    assert together[1].rows_U.tolist() == [1]


def test_an_empty_response_takes_no_row_of_the_logits():
    empty = shard(((0, 1),))
    empty.response_lengths_B = np.array([2, 0])
    for name in ("loss_mask_U", "rollout_log_probs_U"):
        setattr(empty, name, np.ones(2, np.float32))
    ((micro,),) = make_micro_batches(empty)
    assert micro.rows_U.tolist() == [2, 3]
    assert micro.samples_U.tolist() == [0, 0]


def test_a_sample_without_a_prompt_is_refused():
    bare = shard(((0, 1),))
    bare.response_lengths_B = np.array([2, 3])
    with pytest.raises(ValueError, match="without a prompt token"):
        make_micro_batches(bare)


# --- Shared rows ------------------------------------------------------------------------------------------------------


def test_a_row_is_padded_for_sequence_parallelism_with_a_sequence_of_its_own():
    ((micro,),) = make_micro_batches(shard(((0, 1),)), layout=ParallelLayout(tensor=3, sequence=True))
    assert micro.tokens_1T.tolist() == [[5, 14, 5, 7, 1, 20, 21, 22, 0]]
    assert micro.position_ids_1T.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0]]
    assert micro.cu_seqlens.tolist() == [0, 5, 8, 9]
    assert (micro.num_samples, micro.rows_U.tolist()) == (2, [2, 3, 6])
    assert micro.lengths == [5, 3]


def test_padding_longer_than_every_sample_sets_the_longest_length():
    ((micro,),) = make_micro_batches(shard(((1,),)), layout=ParallelLayout(context=4))
    assert (micro.num_tokens, micro.max_seqlen) == (2, 5)


def test_context_parallel_ranks_hold_every_response_token_once():
    layout = ParallelLayout(context=2)
    ((first,),), ((second,),) = (
        make_micro_batches(shard(((0, 1),)), layout=layout, context_rank=rank) for rank in range(2)
    )
    assert first.tokens_1T.tolist() == [[5, 14, 21, 22]]
    assert second.tokens_1T.tolist() == [[5, 7, 1, 20]]
    assert second.position_ids_1T.tolist() == [[2, 3, 4, 0]]
    assert (first.rows_U.tolist(), second.rows_U.tolist()) == ([2], [0, 1])
    assert (first.targets_U.tolist(), second.targets_U.tolist()) == ([22], [7, 1])
    assert (first.samples_U.tolist(), second.samples_U.tolist()) == ([1], [0, 0])
    assert (first.weights_U.tolist(), second.weights_U.tolist()) == ([0.25], [0.5, 0])
    assert first.cu_seqlens.tolist() == second.cu_seqlens.tolist() == [0, 5, 8]


def test_an_idle_micro_batch_trains_nothing():
    ((micro,),) = make_micro_batches(shard(((0, 1),)))
    spare = idle_micro_batch(micro)
    assert spare.tokens_1T is micro.tokens_1T
    assert spare.mask_U.tolist() == spare.weights_U.tolist() == [0, 0, 0]
    assert micro.weights_U.tolist() == [0.5, 0, 0.25]


# --- Inputs of the model ----------------------------------------------------------------------------------------------

PIXELS = {"pixels": column([np.array([[1.0], [2.0]]), np.array([[3.0]])])}


def test_rows_stand_in_the_order_of_the_samples_in_their_row() -> None:
    assert RowInputs(PIXELS, (1, 0)).tensors("cpu")["pixels"].tolist() == [[3], [1], [2]]
    assert RowInputs(PIXELS, (0,)).tensors("cpu")["pixels"].tolist() == [[1], [2]]


def test_a_model_gets_the_inputs_that_it_declares_on_ranks_that_share_no_row() -> None:
    NamedSpec(None, "spec", {"pixels", "grid"}).require_inputs({"pixels"})
    NamedSpec(None, "spec", {"pixels"}).require_inputs(set(), context=2)
    with pytest.raises(RunError, match=r"'seeing' .* pixels;"):
        NamedSpec(None, "model spec 'seeing' of plugin 'mine' 1.0", {"pixels"}).require_inputs({"sound", "pixels"})
    with pytest.raises(RunError, match=r" pixels .*context_parallel_size = 2"):
        NamedSpec(None, "spec", {"pixels"}).require_inputs({"pixels"}, context=2)


# --- The train data of a rank as a file -------------------------------------------------------------------------------


def settings(**more: int) -> LearnerSettings:
    return LearnerSettings(RunConfig(), Path("model"), "Toy", "clipped", 1, **more)  # type: ignore[arg-type]


def test_columns_stand_in_the_order_of_the_shard_whatever_the_plan() -> None:
    batch = shard(((1,),), ((0,),))
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


def test_opaque_inputs_are_in_the_file(tmp_path: Path) -> None:
    pixels = Opaque(np.array([[1], [2]], np.int16), np.array([0, 0]), np.array([2, 0]))
    batch = shard(((1,),), inputs={"pixels": pixels})
    with safe_open(save_train_data(tmp_path / "{rank}", batch, make_micro_batches(batch), settings()), "numpy") as file:
        assert file.get_tensor("inputs/pixels").tolist() == [[1], [2]]
        assert file.get_tensor("inputs/pixels/counts_B").tolist() == [2, 0]


def test_tokens_of_another_rank_are_nan() -> None:
    batch = shard(((1,),), ((0,),))
    found = trained_columns(batch, make_micro_batches(batch)[:1])
    assert found["trained/mask_U"].tolist()[2] == 1
    assert np.isnan(found["trained/mask_U"][:2]).all()


def test_a_file_holds_the_columns_and_says_whose_they_are(tmp_path: Path) -> None:
    batch = shard(((1,),), ((0,),), weight_version_B=np.array([4, -1]))
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
        {"micro_batches": [[0]], "divisor": 1.0, "loss_factor": 1.0},
    ]
    assert about == {
        **{"format": "slime train data", "version": "1", "rollout": "3", "rank": "1", "world_size": "2"},
        "temperature": "0.7",
    }


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_train_data(tmp_path / "{rollout_id}", shard(((0,),)), make_micro_batches(shard(((0,),))), settings())
    assert list(tmp_path.iterdir()) == []
