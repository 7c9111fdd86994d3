"""Model inputs of samples become columns of shards: every row stays with its sample, in every division."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_core.learner.micro_batches import make_micro_batches
from slime_core.opaque import part
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, Status, TrainBatch


def sample(index: int, inputs: object = None) -> Sample:
    return Sample(
        group_index=index // 4,
        index=index,
        tokens=[7] * 20 + [index],
        response_length=1,
        rollout_log_probs=[-1.0],
        status=Status.COMPLETED,
        multimodal_train_inputs=inputs,
    )


def shards(samples: list[Sample], *, ranks: int = 1, max_tokens: int = 64) -> list[TrainBatch]:
    plan = BatchPlan(num_ranks=ranks, max_tokens=max_tokens, share_prompts=True)
    return make_shards(samples, np.zeros(len(samples), np.float32), plan, rollout=0, temperature=1.0)


def seen(index: int) -> Sample:
    """Sample 3 has three rows of 3 and a grid; every third one has nothing."""
    given = {"pixels": torch.full((index, 2), index).bfloat16(), "grid": np.array([[index, 1, 2]], np.int32)}
    return sample(index, given if index % 3 else None)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 50, 1000])
def test_a_row_is_handed_what_its_samples_carry_in_its_order(ranks: int, max_tokens: int) -> None:
    found = []
    for shard in shards([seen(index) for index in range(8)], ranks=ranks, max_tokens=max_tokens):
        for micro in (micro for step in make_micro_batches(shard) for micro in step):
            indices = [int(shard.indices_B[member]) for member in micro.members]
            tensors = micro.inputs.tensors("cpu")
            rows = [index for index in indices if index % 3]
            assert tensors["pixels"].dtype is torch.bfloat16
            assert tensors["pixels"].tolist() == [[index, index] for index in rows for _ in range(index)]
            assert tensors["grid"].dtype is torch.int32
            assert tensors["grid"].shape == (len(rows), 3)
            assert tensors["grid"][:, 0].tolist() == rows
            found += indices
    assert sorted(found) == list(range(8))


def test_a_shard_whose_samples_carry_nothing_has_the_columns_of_the_others() -> None:
    samples = [sample(0, {"pixels": np.ones((2, 5))}), sample(1)]
    other = next(shard for shard in shards(samples, ranks=2) if shard.indices_B.tolist() == [1])
    assert part(other.inputs["pixels"], 0).shape == (0, 5)
    assert make_micro_batches(other)[0][0].inputs.tensors("cpu")["pixels"].shape == (0, 5)


def test_a_rollout_that_carries_nothing_has_no_columns() -> None:
    for nothing in (None, {}, {"pixels": None}):
        (shard,) = shards([sample(0, nothing), sample(1)])
        assert shard.inputs == {}
        assert not make_micro_batches(shard)[0][0].inputs


def test_prompts_are_shared_only_where_no_sample_carries_routes_or_images() -> None:
    (text,) = shards([sample(index) for index in range(4)])
    assert text.prefix_lengths_B.tolist() == [0, 20, 20, 20]
    (images,) = shards([sample(index, {"pixels": np.full((1, 2), index)}) for index in range(4)])
    assert images.prefix_order_B is None


def test_the_images_of_a_group_travel_once() -> None:
    pixels = torch.rand(3, 4)
    (shard,) = shards([sample(index, {"pixels": pixels.clone()}) for index in range(4)])
    assert shard.inputs["pixels"].values.shape == (3, 4)
    assert make_micro_batches(shard, max_tokens=1)[0][0].inputs.tensors("cpu")["pixels"].shape[0] == 3 * len(
        shard.steps[0].micro_batches[0]
    )


ACCEPTED = "; accepted: a table of names and arrays or tensors of numbers, [n, ...], alike but for n in all samples"


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        ([1], r"\[1\]"),
        ({1: np.ones(1)}, r"{1: array\(\[1\.\]\)}"),
        ({"pixels": "cat.png"}, r"pixels: .*\[\] of str224"),
        ({"pixels": [[1], [2, 3]]}, "pixels: "),
        ({"pixels": np.ones((1, 3))}, r"pixels of float64 \[n, 3\], .*float32 \[n, 2\]"),
        ({"pixels": np.ones((1, 3), np.float32)}, r"pixels of float32 \[n, 3\], .*float32 \[n, 2\]"),
    ],
)
def test_malformed_or_differing_inputs_are_refused(inputs: object, found: str) -> None:
    with pytest.raises(ValueError, match=f"sample 7: multimodal_train_inputs: {found}") as caught:
        shards([sample(0, {"pixels": torch.zeros(1, 2)}), sample(7, inputs)])
    assert str(caught.value).endswith(ACCEPTED)
