"""Data of an engine for each token: requested, read, cut, packed and passed to the loss in the order of tokens."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from slime_core import EngineColumn, Registration
from slime_core.errors import EngineError
from slime_core.generation import Generation, SamplingParams
from slime_core.generation.sampling import joined_columns
from slime_core.learner.micro_batches import make_micro_batches
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, Status
from slime_testing.fake_engine import LOG_PROB, FakeEngine

SAMPLING = SamplingParams(max_new_tokens=4)


def likeliest(meta_info: Any) -> list[list[float]]:
    return [[entry[0] for entry in row[:2]] for row in meta_info["output_top_logprobs"]]


def likeliest_ids(meta_info: Any) -> list[list[int]]:
    return [[entry[1] for entry in row[:3]] for row in meta_info["output_top_logprobs"]]


COLUMNS = {
    "likeliest": EngineColumn({"top_logprobs_num": 2}, likeliest, width=2),
    "ids": EngineColumn({"top_logprobs_num": 3}, likeliest_ids, width=3),
}


async def test_a_request_has_the_largest_value_of_its_fields_and_each_column_is_read() -> None:
    with FakeEngine() as engine:
        async with GenerateClient(engine.url, vocab_size=16, columns=COLUMNS) as client:
            (answer,) = await client.generate([3], sampling=SAMPLING)
        assert engine.bodies[-1]["top_logprobs_num"] == 3
    count = len(answer.token_ids)
    shapes = {name: column.shape for name, column in answer.columns.items()}
    assert shapes == {"likeliest": (count, 2), "ids": (count, 3)}
    assert answer.columns["likeliest"][:, 0].tolist() == pytest.approx([LOG_PROB] * count)
    assert answer.columns["ids"][:, 0].tolist() == list(answer.token_ids)
    assert answer.until(1).columns["ids"].tolist() == [answer.columns["ids"][0].tolist()]


async def test_an_answer_with_another_number_of_entries_is_refused() -> None:
    columns = {"ids": EngineColumn({"top_logprobs_num": 2}, likeliest_ids, width=3)}
    with FakeEngine() as engine:
        async with GenerateClient(engine.url, vocab_size=16, columns=columns) as client:
            with pytest.raises(EngineError):
                await client.generate([3], sampling=SAMPLING)


def column(*values: float) -> dict[str, Any]:
    return {"x": np.array(values, np.float32)[:, None]}


def test_tokens_that_no_engine_sampled_have_zeros() -> None:
    parts = joined_columns([(column(1, 2), 2), ({}, 2), (column(3), 1)])
    assert parts["x"].tolist() == [[1], [2], [0], [0], [3]]
    assert joined_columns([({}, 2)]) == {}


def sample(index: int, *values: float) -> Sample:
    count = len(values)
    return Sample(
        group_index=index,
        index=index,
        tokens=[7] * (3 + index) + list(range(count)),
        response_length=count,
        rollout_log_probs=[-1.0] * count,
        engine_columns=column(*values),
        status=Status.COMPLETED,
    )


def shards(samples: list[Sample], *, ranks: int = 1) -> Any:
    plan = BatchPlan(num_ranks=ranks, max_tokens=64)
    columns = {"x": EngineColumn({}, likeliest, width=1)}
    advantages_B = np.zeros(len(samples), np.float32)
    return make_shards(samples, advantages_B, plan, rollout=0, temperature=1.0, columns=columns)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("context", [1, 2])
def test_every_rank_has_the_entries_of_its_response_tokens(ranks: int, context: int) -> None:
    values = {0: [1.0, 2.0, 3.0], 1: [4.0, 5.0], 2: [6.0], 3: [7.0, 8.0, 9.0]}
    seen = []
    for shard in shards([sample(index, *numbers) for index, numbers in values.items()], ranks=ranks):
        for rank in range(context):
            for (micro,) in make_micro_batches(shard, layout=ParallelLayout(context=context), context_rank=rank):
                indices = shard.indices_B[list(micro.members)]
                # The targets of a sample are 0, 1, 2, ...: the place of the token in its response.
                for place, number, (entry,) in zip(
                    micro.targets_U.tolist(),
                    micro.samples_U.tolist(),
                    micro.engine_columns_U["x"].tolist(),
                    strict=True,
                ):
                    assert entry == values[int(indices[number])][place]
                    seen.append(entry)
    assert sorted(seen) == [float(number) for number in range(1, 10)]


@pytest.mark.parametrize("columns", [{}, column(1.0), {"y": np.zeros((2, 1), np.float32)}])
def test_a_sample_without_a_fitting_column_is_refused(columns: Any) -> None:
    lacking = sample(0, 1.0, 2.0)
    lacking.engine_columns = columns
    with pytest.raises(ValueError, match="sample 0"):
        shards([lacking])


def test_a_sample_in_a_file_has_its_columns() -> None:
    read = Sample.from_dict(sample(0, 1.5, 2.5).to_dict())
    assert read.engine_columns["x"].dtype == np.float32
    assert read.engine_columns["x"].tolist() == [[1.5], [2.5]]


def test_a_response_without_tokens_is_not_read() -> None:
    from slime_core.rollout.engines.responses import read_generation

    row = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
    answer: Generation = read_generation(row, None, None, COLUMNS)
    assert (answer.token_ids, answer.columns["ids"].shape) == (array("i"), (0, 3))


def test_a_loss_and_a_correction_declare_what_they_read() -> None:
    add = Registration()
    add.policy_loss("centered", lambda terms: terms, reads_engine=COLUMNS)
    add.correction("centered", lambda terms: terms)
    assert [component.traits.reads_engine for component in add.components] == [COLUMNS, {}]
