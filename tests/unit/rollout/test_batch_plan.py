from __future__ import annotations

import json
import re

import numpy as np
import pytest

from slime_core.config.load import load
from slime_core.config.model_config import ForwardFlops
from slime_core.errors import ConfigError, RunError
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.shards import BatchPlan, batch_metrics, make_shards
from slime_core.types import Sample, Status


def plan(*, num_ranks: int = 1, max_tokens: int = 10, **fields) -> BatchPlan:
    return BatchPlan(num_ranks=num_ranks, max_tokens=max_tokens, **fields)


def shards(lengths: list[int], made: BatchPlan):
    samples = [
        Sample(index=i, tokens=[0] * n, response_length=1, rollout_log_probs=[0.0], status=Status.COMPLETED)
        for i, n in enumerate(lengths)
    ]
    return make_shards(samples, np.zeros(len(samples), np.float32), made, rollout=0, temperature=1.0)


def rows(lengths: list[int], made: BatchPlan) -> list[list[list[int]]]:
    """The lengths in every micro-batch of every rank."""
    found = shards(lengths, made)
    return [[[int(s.lengths_B[i]) for i in micro] for step in s.steps for micro in step.micro_batches] for s in found]


def test_ranks_that_share_a_row_hold_the_budget_each():
    assert rows([8, 8, 8], plan()) == [[[8], [8], [8]]]
    assert rows([8, 8, 8], plan(context=2)) == [[[8, 8], [8]]]


def test_padding_takes_no_row_above_the_budget():
    # 10 tokens a rank on two ranks; rows are padded to a multiple of 8, so 17 tokens would become 24.
    assert plan(context=2, row_multiple=8).budget == 16
    assert rows([9, 8, 7], plan(context=2, row_multiple=8)) == [[[9, 7], [8]]]
    assert plan(max_tokens=3, row_multiple=8).budget == 3


def test_work_is_balanced_where_tokens_are_not():
    # Of 8 tokens 36 pairs, of 4 tokens 10, of 2 tokens 3: the long sample alone outweighs all others.
    lengths, pairs = [8, 4, 4, 2], ForwardFlops(per_token=0, per_pair=1)
    assert [sum(map(sum, rank)) for rank in rows(lengths, plan(num_ranks=2))] == [10, 8]
    assert [sum(map(sum, rank)) for rank in rows(lengths, plan(num_ranks=2, flops=pairs))] == [8, 10]


def test_a_micro_batch_size_goes_before_the_budget():
    assert rows([9, 9, 9, 2, 1], plan(micro_batch_size=2)) == [[[9, 2], [9, 1], [9]]]


# --- Samples that do not fit ------------------------------------------------------------------------------------------


def test_samples_above_the_budget_run_alone_with_one_warning():
    assert rows([30, 5, 25, 5], plan(context=2)) == [[[30], [25], [5, 5]]]
    (warning,) = plan(context=2).warnings([30, 5, 25, 5])
    assert re.search("2 of 4 .* max_tokens_per_gpu .* = 20 .* 30;.*--rollout-max-response-len", warning)
    assert plan().warnings([10, 5]) == []
    assert plan(micro_batch_size=2).warnings([30]) == []


def test_a_sample_above_a_hard_budget_ends_the_run():
    text = (
        r"1 of 2 samples are longer than max_tokens_per_gpu x context_parallel_size = 10 tokens, the longest 11; with "
        r"--hard-token-budget that ends the run: raise --max-tokens-per-gpu, or lower --rollout-max-response-len"
    )
    with pytest.raises(RunError, match=text):
        plan(hard=True).warnings([11, 5])
    assert plan(hard=True).warnings([10]) == []
    with pytest.raises(RunError, match="context_parallel_size / micro_batch_size = 2 = 5 tokens, the longest 6"):
        plan(hard=True, micro_batch_size=2).warnings([6, 1])


# --- Metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    # Ranks hold 9 and 4 + 3 tokens, in rows of 9, 4 and 3 that are padded to 12, 4 and 4.
    made = plan(num_ranks=2, max_tokens=4, row_multiple=4, flops=ForwardFlops(per_token=1, per_pair=0))
    found = batch_metrics(shards([9, 4, 3], made), made)
    assert found == pytest.approx(
        {
            "train/token_imbalance": 9 / 8,
            "train/padding_ratio": 4 / 20,
            "train/micro_batches_per_rank": 1.5,
            "train/flops_imbalance": 9 / 8,
        }
    )


def test_imbalance_is_that_of_each_step():
    # Steps of 2 + 6 and 6 + 2 tokens over two ranks: together the ranks are even, in no step they are.
    made = plan(num_ranks=2, num_steps=2)
    assert batch_metrics(shards([2, 6, 2, 6], made), made)["train/token_imbalance"] == 1.5


# --- Settings --------------------------------------------------------------------------------------------------------


def test_a_plan_is_what_the_settings_say(tmp_path):
    line = (
        "--advantage-estimator toy --max-tokens-per-gpu 77 --context-parallel-size 2 --actor-num-gpus-per-node 8 "
        "--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 3 --num-steps-per-rollout 4 "
        "--loss-token-divisor 5 --hard-token-budget --balance-by-flops"
    )
    config = load(line.split(), check_rules=False).config
    shape = {
        "hidden_size": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 1,
        "vocab_size": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert BatchPlan.of(config, tmp_path) == BatchPlan(
        num_ranks=2,
        num_steps=4,
        max_tokens=77,
        context=2,
        row_multiple=8,
        micro_batch_size=3,
        hard=True,
        flops=ForwardFlops(per_token=32 + 12 + 4, per_pair=8),
        token_divisor=5,
    )
    assert config.parallel.row_multiple == ParallelLayout.of(config.parallel).row_multiple


def test_work_that_cannot_be_counted_is_refused(tmp_path):
    config = load(["--advantage-estimator", "toy", "--balance-by-flops"], check_rules=False).config
    with pytest.raises(ConfigError, match=r"balance_by_flops: .*config\.json .*hidden_size"):
        BatchPlan.of(config, tmp_path)
