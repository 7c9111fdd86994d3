"""Tokens that stand once for all samples that start with them give the log-probs and gradients of repeated ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slime_core.ops.prefixes import Prefixes
from slime_core.types import StepPlan, TrainBatch
from tests.engines.conftest import campaign
from tests.shared_prompts import build, gradients, train

# Megatron warns about its own calls between its own modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

SIZES = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
SHAPE = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2}


@pytest.fixture(scope="module")
def chunk(megatron) -> Any:
    return build(SHAPE)


def conversations() -> tuple[list[np.ndarray], list[int]]:
    """16 samples, and their response tokens: each has a turn of up to 9 tokens after all or half of a sample before it.

    There are two prompts. Some samples are equal, some end where others go on, and in some the prompt has the turns
    before the last.
    """
    random = np.random.default_rng(2)
    samples, lengths = [random.integers(0, 32, 4), random.integers(0, 32, 7)], [2, 0]
    while len(samples) < 16:
        before = samples[random.integers(len(samples))]
        before = before[: max(len(before) // random.integers(1, 3), 4)]
        turn = random.integers(0, 32, random.integers(0, 10))
        samples.append(np.concatenate([before, turn]))
        lengths.append(len(turn) if len(samples) % 3 == 0 else len(before) + len(turn) - 2)
    return samples, lengths


def shard(*plan: tuple[int, ...]) -> TrainBatch:
    """Every third response token is masked, and all of the third response; every common token is shared."""
    samples, lengths = conversations()
    random = np.random.default_rng(3)
    mask_U = (np.arange(sum(lengths)) % 3 != 1).astype(np.float32)
    mask_U[3:10] = 0
    shared = Prefixes.of(samples, least=1)
    return TrainBatch(
        rollout=0,
        tokens_T=np.concatenate(samples),
        lengths_B=np.array([len(sample) for sample in samples]),
        response_lengths_B=np.array(lengths),
        loss_mask_U=mask_U,
        loss_weights_B=random.uniform(0.5, 1, len(samples)).astype(np.float32),
        rollout_log_probs_U=np.zeros(sum(lengths), np.float32),
        columns_B={"advantages": random.normal(size=len(samples)).astype(np.float32)},
        steps=(StepPlan(plan or (tuple(range(len(samples))),)),),
        indices_B=np.arange(len(samples)),
        prefix_order_B=shared.samples,
        prefix_lengths_B=shared.common,
    )


def trained(chunk: Any, batch: TrainBatch, **options: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probs in the order of the shard, and the gradients over all micro-batches."""
    from slime_core.learner.micro_batches import make_micro_batches

    (step,) = make_micro_batches(batch, **options)
    log_probs_U, sums = torch.zeros(len(batch.loss_mask_U)), None
    for micro in step:
        log_probs_U[micro.places_U] = train(chunk, micro)
        new = gradients(chunk)
        sums = new if sums is None else [a + b for a, b in zip(sums, new, strict=True)]
    return log_probs_U, sums


def require_equal(found: Any, expected: Any) -> None:
    assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-5)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize(
    "plan",
    [(), ((0, 4, 2, 14, 6, 8), (1, 3, 5, 7), (9, 10, 11, 12, 13, 15)), tuple((i,) for i in range(16))],
    ids=["one row", "split groups", "single samples"],
)
def test_log_probs_and_gradients_are_those_of_repeated_tokens(chunk, plan) -> None:
    require_equal(trained(chunk, shard(*plan), share=True), trained(chunk, shard(*plan)))


def test_fewer_tokens_run_through_the_model(chunk) -> None:
    from slime_core.learner.micro_batches import make_micro_batches

    ((repeated,),), ((once,),) = make_micro_batches(shard()), make_micro_batches(shard(), share=True)
    assert repeated.num_tokens == sum(map(len, conversations()[0]))
    assert once.num_tokens < 0.5 * repeated.num_tokens


# --- What can take such rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("multi_latent_attention", True), ("hidden_dropout", 0.1), ("attention_dropout", 0.1)),
        *(("moe_expert_capacity_factor", 1.0), ("moe_router_enable_expert_bias", True), ("mtp_num_layers", 1)),
    ],
)
def test_a_model_whose_tokens_depend_on_others_repeats_prompts(chunk, monkeypatch, setting, value) -> None:
    from slime_core.learner.checks import can_share_prompts

    device = torch.device("cpu")
    assert can_share_prompts([chunk], context=1, device=device)
    assert not can_share_prompts([chunk], context=2, device=device)
    assert not can_share_prompts([torch.nn.Linear(1, 1)], context=1, device=device)
    monkeypatch.setattr(chunk.config, setting, value)
    assert not can_share_prompts([chunk], context=1, device=device)


def test_a_model_with_other_layers_repeats_prompts(chunk, monkeypatch) -> None:
    from slime_core.learner.checks import can_share_prompts

    monkeypatch.setattr(chunk.decoder.layers[1].self_attention, "core_attention", torch.nn.Identity())
    assert not can_share_prompts([chunk], context=1, device=torch.device("cpu"))


# --- Layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_layout_finds_the_gradients_of_repeated_prompts_on_one_rank(tmp_path) -> None:
    rows = campaign("shared_layouts", tmp_path / "rows.json")
    assert [row["layout"] for row in rows] == ["DP1", "DP2", "TP2", "TP2, SP", "PP2", "CP2", "DP1, experts"]
    for row in rows:
        assert max(row["loss"], row["grad_norm"], row["metric"], row["gradient"]) <= 1e-5, row
        assert (row["once"] < row["repeated"]) == (row["layout"] != "CP2"), row
