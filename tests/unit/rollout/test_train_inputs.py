"""Images and routes of samples become columns of shards: every row stays with its sample, in every division."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
import torch

from slime_core.errors import EngineError
from slime_core.learner.micro_batches import make_micro_batches
from slime_core.modeling.layout import ParallelLayout
from slime_core.opaque import part
from slime_core.rollout.engines import responses
from slime_core.rollout.engines.responses import read_answer, read_generation
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, Status, TrainBatch


def sample(index: int, inputs: Any = None) -> Sample:
    return Sample(
        group_index=index // 4,
        index=index,
        tokens=[7] * 20 + [index],
        response_length=1,
        rollout_log_probs=[-1.0],
        status=Status.COMPLETED,
        multimodal_train_inputs=inputs,
    )


def shards(
    samples: list[Sample], *, ranks: int = 1, max_tokens: int = 64, share: bool = True, **more: Any
) -> list[TrainBatch]:
    plan = BatchPlan(num_ranks=ranks, max_tokens=max_tokens, share_prompts=share)
    return make_shards(samples, np.zeros(len(samples), np.float32), plan, rollout=0, temperature=1.0, **more)


def seen(index: int) -> Sample:
    """Sample 3 has three rows of 3 and a grid; every third one has nothing."""
    inputs = {"pixels": torch.full((index, 2), float(index)), "grid": np.array([[index, 1, 2]], np.int32)}
    return sample(index, inputs if index % 3 else None)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 50, 1000])
def test_a_row_is_handed_what_its_samples_carry_in_its_order(ranks: int, max_tokens: int) -> None:
    members = []
    for shard in shards([seen(index) for index in range(8)], ranks=ranks, max_tokens=max_tokens):
        for micro in (micro for step in make_micro_batches(shard) for micro in step):
            indices = [int(shard.indices_B[member]) for member in micro.members]
            tensors = micro.inputs.tensors("cpu")
            rows = [index for index in indices if index % 3]
            assert tensors["pixels"].dtype is torch.float32
            assert tensors["pixels"].tolist() == [[index, index] for index in rows for _ in range(index)]
            assert (tensors["grid"].dtype, tensors["grid"].shape) == (torch.int32, (len(rows), 3))
            assert tensors["grid"][:, 0].tolist() == rows
            members += indices
    assert sorted(members) == list(range(8))


def test_a_shard_whose_samples_carry_nothing_has_the_columns_of_the_others() -> None:
    samples = [sample(0, {"pixels": np.ones((2, 5))}), sample(1)]
    other = next(shard for shard in shards(samples, ranks=2) if shard.indices_B.tolist() == [1])
    assert part(other.inputs["pixels"], 0).shape == (0, 5)
    assert make_micro_batches(other)[0][0].inputs.tensors("cpu")["pixels"].shape == (0, 5)


def test_prompts_are_shared_only_where_no_sample_carries_routes_or_images() -> None:
    (text,) = shards([sample(index) for index in range(4)])
    assert text.prefix_lengths_B is not None
    assert (text.prefix_lengths_B.tolist(), text.inputs) == ([0, 20, 20, 20], {})
    (images,) = shards([sample(index, {"pixels": np.full((1, 2), index)}) for index in range(4)])
    assert images.prefix_order_B is None


def test_the_images_of_a_group_travel_once() -> None:
    pixels = torch.rand(3, 4)
    (shard,) = shards([sample(index, {"pixels": pixels.clone()}) for index in range(4)])
    assert shard.inputs["pixels"].values.shape == (3, 4)
    (micro, *_), *_ = make_micro_batches(shard, max_tokens=1)
    assert micro.inputs.tensors("cpu")["pixels"].shape[0] == 3 * len(shard.steps[0].micro_batches[0])


@pytest.mark.parametrize(
    "inputs",
    [
        [1],
        {1: np.ones(1)},
        {"pixels": "cat.png"},
        {"pixels": [[1], [2, 3]]},
        {"pixels": np.ones((1, 3))},
        {"pixels": np.ones((1, 3), np.float32)},
    ],
)
def test_malformed_or_differing_inputs_are_refused(inputs: object) -> None:
    with pytest.raises(ValueError, match="sample 7: multimodal_train_inputs: "):
        shards([sample(0, {"pixels": torch.zeros(1, 2)}), sample(7, inputs)])


def answer(routes: bytes | None) -> dict[str, Any]:
    """Three tokens of an engine."""
    log_probs = [[-0.5, 7, None], [-0.25, 5, None], [-1.0, 1, None]]
    meta: dict[str, Any] = {"output_token_logprobs": log_probs, "finish_reason": {"type": "stop"}}
    if routes is not None:
        meta["routed_experts"] = base64.b64encode(routes).decode()
    return {"output_ids": [7, 5, 1], "meta_info": meta}


def read(routes: bytes | None) -> Any:
    return read_generation(read_answer(json.dumps(answer(routes)).encode())[0], (3, 2)).routed_experts


@pytest.mark.parametrize(("largest", "dtype"), [(127, np.int8), (128, np.int16), (383, np.int16)])
def test_routes_have_the_smallest_type_that_holds_every_number_and_minus_1(largest: int, dtype: type) -> None:
    sent = np.array([*range(23), largest], np.int32)
    routes = read(sent.tobytes())
    assert (routes.dtype, routes.tolist()) == (dtype, sent.reshape(4, 3, 2).tolist())


def test_routes_of_several_responses_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "PIECE", 16)
    sent = [np.array(numbers, np.int32) for numbers in (range(7), [1, 2, 3, 127, 5, 6, 300], [], range(6))]
    rows = [{"output_ids": [], "text": '"routed_experts":"AA', **answer(routes.tobytes())} for routes in sent]
    answers = read_answer(json.dumps(rows).encode())
    routes = [row["meta_info"]["routed_experts"] for row in answers]
    assert [array.tolist() for array in routes] == [array.tolist() for array in sent]
    assert [array.dtype for array in routes] == [np.int8, np.int16, np.int8, np.int8]
    assert [row["text"] for row in answers] == ['"routed_experts":"AA'] * 4


@pytest.mark.parametrize("text", ["AAA", "AAAA", "????????????????", "A" * 16 + "=" * 4])
def test_what_are_no_routes_fails_the_attempt(text: str) -> None:
    row = answer(b"")
    row["meta_info"]["routed_experts"] = text
    with pytest.raises(ValueError, match="no JSON"):
        read_answer(json.dumps(row).encode())


@pytest.mark.parametrize(
    ("sent", "names"), [(None, "--enable-return-routed-experts"), (np.zeros(25, np.int32).tobytes(), "25 .* 3 .* 2 ")]
)
def test_no_routes_and_those_of_another_model_are_an_error(sent: bytes | None, names: str) -> None:
    with pytest.raises(EngineError, match=names):
        read(sent)


def routed(index: int, *, prompt: int, response: int, **fields: Any) -> Sample:
    """Of one layer with two experts a token: token 2 of sample 3 took experts 32 and 33."""
    count = prompt + response
    routes = [[[10 * index + i, 10 * index + i + 1]] for i in range(count - 1)]
    values = {"tokens": [5] * count, "response_length": response, "rollout_log_probs": [-1.0] * response}
    return Sample(index=index, **{"rollout_routed_experts": np.array(routes, np.int16), **values, **fields})


def routes_of(*samples: Sample) -> TrainBatch:
    (shard,) = shards(list(samples), share=False, with_routes=True)
    return shard


@pytest.mark.parametrize("second", [np.int8, np.int16])
def test_a_shard_has_the_type_of_its_widest_sample(second: type) -> None:
    routes: list[Any] = [np.full((3, 1, 2), 1 + place, dtype) for place, dtype in enumerate([np.int8, second])]
    samples = [routed(place, prompt=2, response=2, rollout_routed_experts=one) for place, one in enumerate(routes)]
    routes_TLK = routes_of(*samples).routes_TLK
    assert routes_TLK is not None
    assert routes_TLK.dtype == second
    assert routes_TLK[:, 0, 0].tolist() == [1, 1, 1, -1, 2, 2, 2, -1]


@pytest.mark.parametrize("routes", [None, np.zeros((3, 1, 2)), np.zeros((2, 2)), np.zeros((2, 2, 2))])
def test_a_sample_without_fitting_routes_is_refused(routes: Any) -> None:
    with pytest.raises(ValueError, match="sample 4: use_rollout_routing_replay "):
        routes_of(routed(1, prompt=1, response=1), routed(4, prompt=2, response=1, rollout_routed_experts=routes))


def test_a_context_parallel_rank_has_the_routes_of_its_share_and_padding_has_none() -> None:
    batch = routes_of(routed(1, prompt=2, response=1))
    shares = [make_micro_batches(batch, layout=ParallelLayout(context=2), context_rank=rank)[0][0] for rank in (0, 1)]
    assert [share.given_routes_TLK[:, 0, 0].tolist() for share in shares] == [[10, -1], [11, -1]]  # type: ignore[index]


def test_a_prompt_that_stands_once_has_the_routes_of_its_first_sample() -> None:
    samples = [routed(index, prompt=16, response=2) for index in (1, 2)]
    samples[1].tokens = [*samples[1].tokens[:16], 6, 6]
    (batch,) = shards(samples, with_routes=True)
    ((row,),) = make_micro_batches(batch, share=True)
    assert row.num_tokens == 20
    first, second = (10, 20) if batch.steps[0].micro_batches[0] == (0, 1) else (20, 10)
    assert row.given_routes_TLK is not None
    assert row.given_routes_TLK[:, 0, 0].tolist() == [*range(first, first + 17), -1, second + 16, -1]
