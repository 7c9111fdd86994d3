"""The experts that an engine took: from its answer into the shards of the learner."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from slime_core.errors import EngineError
from slime_core.learner.micro_batches import make_micro_batches
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.engines import responses
from slime_core.rollout.engines.responses import read_answer, read_generation
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, TrainBatch


def answer(routes: bytes | None) -> dict[str, Any]:
    """Three tokens of an engine."""
    meta: dict[str, Any] = {
        "output_token_logprobs": [[-0.5, 7, None], [-0.25, 5, None], [-1.0, 1, None]],
        "finish_reason": {"type": "stop"},
    }
    if routes is not None:
        meta["routed_experts"] = base64.b64encode(routes).decode()
    return {"output_ids": [7, 5, 1], "meta_info": meta}


def received(routes: bytes | None) -> Any:
    """The same as the client has it."""
    return read_answer(json.dumps(answer(routes)).encode())[0]


def test_routes_are_read_token_by_token_layer_by_layer():
    sent = np.arange(24, dtype=np.int32)
    found = read_generation(received(sent.tobytes()), (3, 2)).routed_experts
    assert found.dtype == np.int8
    assert found.tolist() == sent.reshape(4, 3, 2).tolist()


@pytest.mark.parametrize(("largest", "dtype"), [(127, np.int8), (128, np.int16), (383, np.int16)])
def test_routes_have_the_smallest_type_that_holds_every_number_and_minus_1(largest: int, dtype: type) -> None:
    sent = np.array([0, largest] * 3, np.int32)
    found = read_generation(received(sent.tobytes()), (3, 2)).routed_experts
    assert (found.dtype, int(found.max())) == (dtype, largest)


@pytest.mark.parametrize(("dtypes", "found"), [((np.int8, np.int8), np.int8), ((np.int8, np.int16), np.int16)])
def test_a_shard_has_the_type_of_its_widest_sample(dtypes: tuple[type, type], found: type) -> None:
    routes = [np.full((3, 1, 2), 1 + place, dtype) for place, dtype in enumerate(dtypes)]
    samples = [sample(place, prompt=2, response=2, rollout_routed_experts=one) for place, one in enumerate(routes)]
    routes_TLK = shard(*samples).routes_TLK
    assert routes_TLK is not None
    assert routes_TLK.dtype == found
    assert routes_TLK[:, 0, 0].tolist() == [1, 1, 1, -1, 2, 2, 2, -1]


def test_routes_that_were_not_requested_are_dropped():
    assert read_generation(received(None), None).routed_experts is None


def test_routes_of_several_responses_are_read_in_pieces(monkeypatch) -> None:
    monkeypatch.setattr(responses, "PIECE", 16)
    sent = [np.array(numbers, np.int32) for numbers in (range(7), [1, 2, 3, 127, 5, 6, 300], [], range(6))]
    rows = [{"output_ids": [], "text": '"routed_experts":"AA', **answer(one.tobytes())} for one in sent]
    found = [row["meta_info"]["routed_experts"] for row in read_answer(json.dumps(rows).encode())]
    assert [one.tolist() for one in found] == [one.tolist() for one in sent]
    assert [one.dtype for one in found] == [np.int8, np.int16, np.int8, np.int8]
    assert [row["text"] for row in read_answer(json.dumps(rows).encode())] == ['"routed_experts":"AA'] * 4


@pytest.mark.parametrize("text", ["AAA", "AAAA", "????????????????", "A" * 16 + "=" * 4])
def test_what_are_no_routes_fails_the_attempt(text: str) -> None:
    row = answer(b"")
    row["meta_info"]["routed_experts"] = text
    with pytest.raises(ValueError, match="no JSON"):
        read_answer(json.dumps(row).encode())


@pytest.mark.parametrize(
    ("sent", "names"),
    [(None, "--enable-return-routed-experts"), (np.zeros(25, np.int32).tobytes(), "25 .* 3 layers x 2 experts")],
)
def test_no_routes_and_those_of_another_model_are_an_error(sent: bytes | None, names: str):
    with pytest.raises(EngineError, match=names):
        read_generation(received(sent), (3, 2))


def sample(index: int, *, prompt: int, response: int, **fields: Any) -> Sample:
    """Of one layer with two experts a token: token 2 of sample 3 took experts 32 and 33."""
    count = prompt + response
    routes = [[[10 * index + i, 10 * index + i + 1]] for i in range(count - 1)]
    return Sample(
        index=index,
        tokens=[5] * count,
        response_length=response,
        rollout_log_probs=[-1.0] * response,
        **{"rollout_routed_experts": np.array(routes, np.int16), **fields},
    )


def shard(*samples: Sample) -> TrainBatch:
    shape = {"num_ranks": 1, "num_steps": 1, "max_tokens": 64}
    (found,) = make_shards(
        samples,
        np.zeros(len(samples), np.float32),
        BatchPlan(**shape),
        rollout=0,
        temperature=1.0,
        with_routes=True,
    )
    return found


def test_the_last_token_of_a_sample_has_no_route():
    found = shard(sample(1, prompt=2, response=1), sample(2, prompt=1, response=1)).routes_TLK
    assert found.tolist() == [[[10, 11]], [[11, 12]], [[-1, -1]], [[20, 21]], [[-1, -1]]]


@pytest.mark.parametrize(
    ("routes", "found"),
    [
        (None, "none"),
        (np.zeros((3, 1, 2)), r"\[3, 1, 2\]"),
        (np.zeros((2, 2)), r"\[2, 2\]"),
        (np.zeros((2, 2, 2)), r"\[2, 2, 2\]"),
    ],
)
def test_a_sample_without_fitting_routes_is_refused(routes, found):
    message = (
        r"sample 4: use_rollout_routing_replay needs the experts of its 3 tokens but the last, an array \[2, layers, "
        rf"experts a token\], alike in all samples; found {found}. A generate function copies routed_experts"
    )
    with pytest.raises(ValueError, match=message):
        shard(sample(1, prompt=1, response=1), sample(4, prompt=2, response=1, rollout_routed_experts=routes))


def test_routes_lie_where_their_tokens_lie():
    batch = shard(sample(1, prompt=2, response=1), sample(2, prompt=1, response=1))
    ((row,),) = make_micro_batches(batch)
    members = batch.steps[0].micro_batches[0]
    firsts = [10 if member == 0 else 20 for member in members]
    starts = [int(row.cu_seqlens[i]) for i in range(2)]
    assert [int(row.given_routes_TLK[start, 0, 0]) for start in starts] == firsts


def test_a_context_parallel_rank_has_the_routes_of_its_share_and_padding_has_none():
    batch = shard(sample(1, prompt=2, response=1))
    shares = [make_micro_batches(batch, layout=ParallelLayout(context=2), context_rank=rank)[0][0] for rank in (0, 1)]
    assert [share.given_routes_TLK[:, 0, 0].tolist() for share in shares] == [[10, -1], [11, -1]]


def test_without_routes_a_row_has_none():
    batch = shard(sample(1, prompt=2, response=1))
    batch.routes_TLK = None
    assert make_micro_batches(batch)[0][0].given_routes_TLK is None


def test_a_sample_is_written_and_read_with_its_routes():
    written = sample(1, prompt=2, response=1).to_dict()
    assert written["rollout_routed_experts"] == [[[10, 11]], [[11, 12]]]
    assert Sample.from_dict(written).rollout_routed_experts == [[[10, 11]], [[11, 12]]]


def test_a_prompt_that_stands_once_has_the_routes_of_its_first_sample():
    samples = [sample(1, prompt=16, response=2), sample(2, prompt=16, response=2)]
    samples[1].tokens = [*samples[1].tokens[:16], 6, 6]
    (batch,) = make_shards(
        samples,
        np.zeros(2, np.float32),
        BatchPlan(num_ranks=1, max_tokens=64, share_prompts=True),
        rollout=0,
        temperature=1.0,
        with_routes=True,
    )
    ((row,),) = make_micro_batches(batch, share=True)
    assert row.num_tokens == 20
    first, second = (10, 20) if batch.steps[0].micro_batches[0] == (0, 1) else (20, 10)
    found = row.given_routes_TLK[:, 0, 0].tolist()
    assert found == [*range(first, first + 17), -1, second + 16, -1]
