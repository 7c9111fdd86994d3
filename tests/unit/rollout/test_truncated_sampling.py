"""The tokens that top-p, top-k and min-p keep: by hand, against transformers, and in the shards of the learner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slime_core.errors import EngineError, RequestRefused
from slime_core.generation import SamplingParams, joined, keep
from slime_core.learner.micro_batches import make_micro_batches as cut_batch
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.responses import Truncation, read_mask, truncate
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, TrainBatch
from slime_testing.fake_engine import FakeEngine

HALF, QUARTER, EIGHTH = math.log(0.5), math.log(0.25), math.log(0.125)
TOP = [[HALF, 7, None], [QUARTER, 2, None], [EIGHTH, 9, None]]


def found(
    cut: Truncation, *, sampled: int = 7, log_prob: float = HALF, top: Sequence[Any] = TOP
) -> tuple[list[int], float]:
    kept, log_probs = truncate([sampled], [log_prob], [top], cut)
    assert list(kept.offsets) == [0, len(kept.token_ids)]
    return list(kept.token_ids), log_probs[0]


@pytest.mark.parametrize(
    ("cut", "ids", "mass"),
    [
        (Truncation(2), [7, 2], 0.75),
        (Truncation(3, top_p=0.6), [7, 2], 0.75),
        # transformers would divide by what top-k left first, and then keep one token of 2/3 only.
        (Truncation(2, top_p=0.6), [7, 2], 0.75),
        (Truncation(3, top_p=0.4), [7], 0.5),
        (Truncation(3, min_p=0.3), [7, 2], 0.75),
        (Truncation(3, top_p=0.76), [7, 2, 9], 0.875),
        (Truncation(3, min_p=0.1, top_p=0.3), [7], 0.5),
    ],
)
def test_the_kept_tokens_share_the_probability_mass(cut: Truncation, ids: list[int], mass: float) -> None:
    assert found(cut) == (ids, pytest.approx(math.log(0.5 / mass), abs=1e-6))


REPORTED = {"output_token_sampling_mask": [[7, 2], [9]], "output_token_sampling_logprobs": [-0.25, 0.0]}


def test_a_reported_mask_is_what_each_token_was_sampled_from() -> None:
    kept, log_probs = read_mask([2, 9], REPORTED)
    assert (list(kept.token_ids), list(kept.offsets), list(log_probs)) == ([7, 2, 9], [0, 2, 3], [-0.25, 0.0])
    kept, log_probs = read_mask([], {})  # aborted before its first token
    assert (list(kept.token_ids), list(kept.offsets), list(log_probs)) == ([], [0], [])


@pytest.mark.parametrize(
    ("ids", "meta"),
    [
        ([2], REPORTED),
        ([2, 9], {}),
        ([2, 9], {**REPORTED, "output_token_sampling_logprobs": [-0.25]}),
        ([9, 9], REPORTED),
    ],
    ids=["more masks than tokens", "no mask", "too few log-probabilities", "a token outside"],
)
def test_a_reported_mask_that_does_not_match_its_tokens_is_an_error(ids: list[int], meta: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        read_mask(ids, meta)


@pytest.mark.parametrize(
    ("sampling", "extra", "is_masked"),
    [
        (SamplingParams(top_p=0.9), None, True),
        (SamplingParams(top_k=8), None, True),
        (SamplingParams(top_k=9), None, False),
        (SamplingParams(top_k=1), None, True),
        (SamplingParams(top_p=0.9), {"custom_logit_processor": "code"}, False),
        (SamplingParams(), None, False),
        (SamplingParams(top_p=0.9, max_kept=None), None, False),
    ],
)
async def test_masks_are_requested_from_engines_that_report_them(
    sampling: SamplingParams, extra: Any, is_masked: bool
) -> None:
    sampling = replace(sampling, max_kept=None if sampling.max_kept is None else 8, max_new_tokens=8)
    with FakeEngine() as engine:
        for engines in ([engine.url], []):
            options: Any = {"engines": engines, "masks_up_to": 8, "vocab_size": 16}
            async with GenerateClient(engine.url, **options) as client:
                (answer,) = await client.generate([3], sampling=sampling, extra=extra)
            body = engine.bodies[-1]
            assert body.get("return_sampling_mask", False) == (is_masked and bool(engines))
            assert not (body.get("return_sampling_mask") and body.get("top_logprobs_num"))
            cuts = sampling.max_kept is not None and (sampling.top_p < 1 or sampling.top_k > 0)
            assert (answer.kept is not None) == cuts


def test_a_token_at_the_border_is_kept_because_it_was_sampled() -> None:
    tie = [[HALF, 7, None], [EIGHTH, 2, None]]
    ids, log_prob = found(Truncation(2), sampled=9, log_prob=EIGHTH, top=tie)
    assert (ids, log_prob) == ([7, 2, 9], pytest.approx(math.log(0.125 / 0.75)))
    # A token of probability zero comes as null and does not stay.
    assert found(Truncation(2), top=[[0.0, 7, None], [None, 2, None]], log_prob=0.0) == ([7], 0.0)
    rounded = [[math.log(0.9001), 7, None], [math.log(0.05), 2, None]]
    assert found(Truncation(2, top_p=0.9), sampled=2, log_prob=math.log(0.05), top=rounded)[0] == [7, 2]


@pytest.mark.parametrize(
    ("cut", "sampled", "top", "names"),
    [
        (Truncation(3, top_p=0.4), (9, EIGHTH), [TOP], r"token 9 .* 0\.125 .*place 0 .*--rollout-top-p "),
        (Truncation(2), (7, HALF), [TOP[:1]], r"\[1\] .* 1 places; 2 at each of 1"),
        (Truncation(2), (7, HALF), [], r"\[\] .* 0 places"),
    ],
    ids=["a token that was left out", "too few tokens", "too few places"],
)
def test_an_answer_that_cannot_be_is_an_error(cut: Truncation, sampled: Any, top: Any, names: str) -> None:
    with pytest.raises(EngineError, match=names):
        truncate([sampled[0]], [sampled[1]], top, cut)


@pytest.mark.parametrize(
    ("fields", "most", "cut"),
    [
        ({"top_p": 1.0, "top_k": -1}, 64, None),
        ({"top_p": 0.9, "top_k": -1}, 64, Truncation(64, 0.9)),
        ({"top_p": 0.9, "top_k": 100}, 64, Truncation(100, 0.9)),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0.1}, 64, Truncation(64, 1.0, 0.1)),
        ({"top_p": 1.0, "top_k": -1, "regex": "[0-9]+"}, 64, Truncation(64)),
        ({"top_p": 1.0, "top_k": -1, "min_new_tokens": 2, "regex": None}, 64, Truncation(64)),
        ({"top_p": 0.9, "top_k": -1}, None, None),
        ({"top_p": 0.9, "top_k": -1, "temperature": 0}, 64, None),
    ],
)
def test_sampling_fields_give_the_truncation(fields: dict[str, Any], most: int | None, cut: Truncation | None) -> None:
    assert Truncation.of(fields, most=most, vocab_size=1000) == cut
    # A request for more logits than the vocabulary has kills the engine.
    assert Truncation.of({"top_p": 0.9}, most=64, vocab_size=16) == Truncation(16, 0.9)


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.9, "top_k": 5}])
def test_min_p_with_another_truncation_is_refused_where_the_mask_is_recorded(fields: dict[str, Any]) -> None:
    # sglang 0.5.23, layers/sampler.py: flashinfer renormalises after top_k before it takes top_p, pytorch does not.
    with pytest.raises(RequestRefused, match="min_p alone"):
        Truncation.of({"min_p": 0.1, **fields}, most=64, vocab_size=1000)
    assert Truncation.of({"min_p": 0.1, **fields}, most=None, vocab_size=1000) is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("cut", "warper"),
    [
        (Truncation(20, top_p=0.8), TopPLogitsWarper(0.8)),
        (Truncation(4), TopKLogitsWarper(4)),
        (Truncation(20, min_p=0.1), MinPLogitsWarper(0.1)),
    ],
)
def test_transformers_keeps_the_same_and_gives_it_the_same_log_probabilities(
    cut: Truncation, warper: Any, temperature: float
) -> None:
    logits_TV = 2 * torch.randn(40, 20, generator=torch.Generator().manual_seed(1))
    warped_TV = LogitsProcessorList([TemperatureLogitsWarper(temperature), warper])(None, logits_TV.clone())
    theirs_TV = warped_TV.log_softmax(-1)
    sampled_T = torch.multinomial(theirs_TV.exp(), 1, generator=torch.Generator().manual_seed(2))
    logs_TK, ids_TK = (logits_TV / temperature).log_softmax(-1).sort(descending=True)
    top = [
        [[log, one, None] for log, one in zip(logs, ids, strict=True)]
        for logs, ids in zip(logs_TK[:, : cut.top_k].tolist(), ids_TK[:, : cut.top_k].tolist(), strict=True)
    ]
    before_T = (logits_TV / temperature).log_softmax(-1).gather(1, sampled_T)[:, 0]
    kept, log_probs = truncate(sampled_T[:, 0].tolist(), before_T.tolist(), top, cut)
    for place, (start, end) in enumerate(zip(kept.offsets, kept.offsets[1:], strict=False)):
        assert sorted(kept.token_ids[start:end]) == theirs_TV[place].isfinite().nonzero()[:, 0].tolist()
    assert list(log_probs) == pytest.approx(theirs_TV.gather(1, sampled_T)[:, 0].tolist(), abs=1e-5)


async def test_an_answer_says_what_it_was_sampled_from() -> None:
    sampling = SamplingParams(max_new_tokens=2, top_k=3)
    with FakeEngine() as engine:
        async with GenerateClient(engine.url, vocab_size=16) as client:
            (answer,) = await client.generate([3, 4], sampling=sampling)
            (whole,) = await client.generate([3, 4], sampling=SamplingParams(max_new_tokens=2, top_k=3, max_kept=None))
    assert answer.kept is not None
    assert (list(answer.kept.token_ids), list(answer.kept.offsets)) == ([9, 0, 1, 4, 0, 1], [0, 3, 6])
    rest = (1 - math.exp(-0.5)) / 15
    assert list(answer.log_probs) == pytest.approx([-0.5 - math.log(math.exp(-0.5) + 2 * rest)] * 2, abs=1e-6)
    assert (whole.kept, list(whole.log_probs)) == (None, [-0.5, -0.5])


def test_parts_of_a_response_are_joined() -> None:
    kept = truncate([7], [HALF], [TOP], Truncation(2))[0]
    whole = joined([(None, 3), (kept, 1), (None, 1), (kept, 1)])
    assert whole is not None
    assert (list(whole.token_ids), list(whole.offsets)) == ([7, 2, 7, 2], [0, 0, 0, 0, 2, 2, 4])
    assert joined([(None, 3), (None, 1)]) is None


def sample(index: int = 0, *, prompt: int = 2, sets: Sequence[Sequence[int]] | None, **fields: Any) -> Sample:
    """Its response is token 7, as often as there are sets."""
    count = 2 if sets is None else len(sets)
    made = Sample(
        index=index, tokens=[5] * prompt + [7] * count, response_length=count, rollout_log_probs=[-1.0] * count
    )
    if sets is not None:
        made.rollout_top_p_token_ids = [one for ids in sets for one in ids]
        made.rollout_top_p_token_offsets = [0, *np.cumsum([len(ids) for ids in sets]).tolist()]
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def shards(*samples: Sample, cuts: bool = True, ranks: int = 1, **plan: Any) -> list[TrainBatch]:
    made = BatchPlan(num_ranks=ranks, max_tokens=64, **plan)
    return make_shards(samples, np.zeros(len(samples), np.float32), made, rollout=0, temperature=1.0, cuts=cuts)


def rows(batch: TrainBatch, **how: Any) -> list[list[list[int]]]:
    """The set of every response token of every micro-batch."""
    micro_batches = [micro for step in cut_batch(batch, **how) for micro in step]
    return [
        [part.tolist() for part in one.kept_tokens.ids_S.split(one.kept_tokens.counts_U.tolist())]
        for one in micro_batches
    ]


def test_sets_follow_their_tokens_through_shards_rows_and_ranks() -> None:
    first, second = sample(0, sets=[[7, 1], [7]]), sample(1, prompt=1, sets=[[2, 7, 3], [7, 4], [5, 7]])
    (whole,) = shards(first, second)
    assert [sorted(row) for row in rows(whole)] == [sorted([[7, 1], [7], [2, 7, 3], [7, 4], [5, 7]])]
    split = shards(first, second, ranks=2)
    assert sorted(row for batch in split for row in rows(batch)) == [[[2, 7, 3], [7, 4], [5, 7]], [[7, 1], [7]]]
    shares = [rows(whole, layout=ParallelLayout(context=2), context_rank=rank)[0] for rank in (0, 1)]
    assert sorted([*shares[0], *shares[1]]) == sorted([[7, 1], [7], [2, 7, 3], [7, 4], [5, 7]])
    assert all(shares)


def test_without_truncation_shards_have_no_mask() -> None:
    (batch,) = shards(sample(sets=None), cuts=False)
    assert (batch.kept_counts_U, batch.kept_ids_S, cut_batch(batch)[0][0].kept_tokens) == (None, None, None)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (sample(4, sets=None), "rollout_top_k .*place 0 "),
        (sample(4, sets=[[7], []]), "rollout_top_k .*place 1 "),
        (sample(4, sets=[[7], [2, 3, 4]]), "token 7 at place 1 .* 3 rollout_top_p_token_ids"),
        (sample(4, sets=[[7], [7]], rollout_top_p_token_offsets=[0, 2]), r"rollout_top_p_token_offsets .*\[0, 2\]"),
    ],
)
def test_a_sample_that_does_not_say_what_it_was_sampled_from_is_refused(wrong: Sample, names: str) -> None:
    with pytest.raises(ValueError, match=f"^sample 4: .*{names}"):
        shards(sample(1, sets=[[7], [7]]), wrong)


def test_a_sample_is_written_and_read_with_what_it_was_sampled_from() -> None:
    written = Sample(response_length=1)
    keep(written, truncate([7], [HALF], [TOP], Truncation(2))[0])
    assert written.to_dict()["rollout_top_p_token_ids"] == [7, 2]
    assert Sample.from_dict(written.to_dict()) == written
    keep(written, None)
    assert written.rollout_top_p_token_offsets is None


async def test_both_ways_to_the_mask_agree_on_the_fake_engine() -> None:
    with FakeEngine() as engine:
        answers = []
        for engines in ([engine.url], []):
            async with GenerateClient(engine.url, engines=engines, masks_up_to=64, vocab_size=16) as client:
                (answer,) = await client.generate([3], sampling=SamplingParams(top_p=0.7, max_new_tokens=8))
            assert answer.kept is not None
            answers.append((answer.token_ids, answer.kept.token_ids, answer.kept.offsets, list(answer.log_probs)))
        (*masked, their), (*computed, ours) = answers
        assert masked == computed
        assert their == pytest.approx(ours, abs=1e-6)
