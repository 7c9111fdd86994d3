"""Shards of the actor's ranks, resharded for the ranks of a separate critic: every sample once, with its columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import slime_core
from slime_core.config.learning import LearnerConfig
from slime_core.config.model_config import described, forward_flops
from slime_core.config.schema import ClusterConfig, RunConfig
from slime_core.errors import RunError
from slime_core.learner import LearnerSettings
from slime_core.learner.critic import reshard_for_critic
from slime_core.learner.critic_reshard import TokenValues, gather_tokens, reshard, values_of_shard
from slime_core.learner.micro_batches import make_micro_batches
from slime_core.modeling.layout import ParallelLayout
from slime_core.opaque import part
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, Status, TrainBatch

MODEL = Path(slime_core.__file__).parent / "builtin" / "arithmetic" / "model"


def shards(num_ranks: int, *, count: int = 13) -> list[TrainBatch]:
    """Two optimizer steps; a response token's log-probability is minus its sample's index."""
    random = np.random.default_rng(0)
    samples = []
    for index in range(count):
        prompt, response = int(random.integers(1, 5)), int(random.integers(1, 9))
        sample = Sample(
            group_index=index,
            index=index,
            tokens=random.integers(1, 16, prompt + response).tolist(),
            response_length=response,
            loss_mask=random.integers(0, 2, response).tolist(),
            status=Status.COMPLETED,
            multimodal_train_inputs={"pixels": np.full((index, 2), index)} if index % 3 else None,
        )
        sample.rollout_log_probs = [-float(index)] * response
        samples.append(sample)
    rewards_B = np.arange(count, dtype=np.float32)
    plan = BatchPlan(num_ranks=num_ranks, num_steps=2, max_tokens=24)
    return make_shards(samples, None, plan, rewards_B=rewards_B, rollout=5, temperature=1.0)


def by_sample(batches: list[TrainBatch]) -> dict[int, tuple[object, ...]]:
    """What each sample carries, and the step it is in, by its index."""
    found: dict[int, tuple[object, ...]] = {}
    for batch in batches:
        tokens = np.split(batch.tokens_T, np.cumsum(batch.lengths_B)[:-1])
        ends_U = np.cumsum(batch.response_lengths_B)[:-1]
        masks, log_probs = np.split(batch.loss_mask_U, ends_U), np.split(batch.rollout_log_probs_U, ends_U)
        for number, step in enumerate(batch.steps):
            for i in (i for micro in step.micro_batches for i in micro):
                index = int(batch.indices_B[i])
                assert index not in found
                weight, reward = float(batch.loss_weights_B[i]), float(batch.columns_B["rewards"][i])
                columns = (tokens[i].tolist(), masks[i].tolist(), log_probs[i].tolist())
                assert part(batch.inputs["pixels"], i).tolist() == [[index, index]] * (index if index % 3 else 0)
                found[index] = (number, step.divisor, weight, reward, *columns)
    return found


@pytest.mark.parametrize(("given", "wanted"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_every_sample_keeps_its_step_its_weight_and_its_tokens(given, wanted):
    before = shards(given)
    after = [batch for batch, _ in reshard(before, num_ranks=wanted, max_tokens=24)]
    assert by_sample(after) == by_sample(before)
    assert len(after) == wanted
    assert all(batch.rollout == 5 for batch in after)
    for batch in after:
        for micro in (micro for step in batch.steps for micro in step.micro_batches):
            assert len(micro) == 1 or batch.lengths_B[list(micro)].sum() <= 24


def test_data_of_the_engine_stays_with_the_actor():
    before = shards(1)
    before[0].engine_columns_U = {"top": np.zeros((len(before[0].loss_mask_U), 2), np.float32)}
    for batch, _ in reshard(before, num_ranks=3, max_tokens=24):
        assert batch.engine_columns_U == {}
        assert make_micro_batches(batch)


@pytest.mark.parametrize(("given", "wanted"), [(1, 3), (3, 2)])
def test_computed_columns_travel_to_the_critic_ranks_and_back(given, wanted):
    before = shards(given)
    columns = [
        TokenValues(places, batch.response_lengths_B, np.arange(len(batch.loss_mask_U), dtype=np.float32) + 100 * rank)
        for rank, (batch, places) in enumerate(reshard(before, num_ranks=wanted, max_tokens=24))
    ]
    at_home = [values_of_shard(columns, shard, number=number) for number, shard in enumerate(before)]
    assert [len(column_U) for column_U in at_home] == [len(shard.loss_mask_U) for shard in before]
    for column in columns:
        assert gather_tokens(at_home, before, column.places).tolist() == column.values_U.tolist()


def test_a_sample_that_no_rank_computed_is_missed():
    (before,) = shards(1)
    columns = [
        TokenValues(places, batch.response_lengths_B, np.zeros(len(batch.loss_mask_U), np.float32))
        for batch, places in reshard([before], num_ranks=2, max_tokens=24)
    ]
    missing = len(columns[1].places)
    with pytest.raises(RunError, match=rf"^{missing} of 13 samples"):
        values_of_shard(columns[:1], before, number=0)


def test_more_ranks_than_samples_are_refused():
    with pytest.raises(RunError, match=r" 2 samples .* 3 .*--critic-num-gpus.*--global-batch-size"):
        reshard(shards(1, count=4), num_ranks=3, max_tokens=24)


def cut_for(before: list[TrainBatch], *, ranks: int = 1, layout: ParallelLayout | None = None, **learner):
    """Of each data-parallel rank of a critic: lengths of the samples of each micro-batch, step after step."""
    config = RunConfig(cluster=ClusterConfig(device="cpu"), learner=LearnerConfig(**learner))
    layout = layout or ParallelLayout()
    settings = LearnerSettings(
        config, MODEL, "Qwen3ForCausalLM", "clipped", 1, 0, ranks, "nowhere", num_threads=1, layout=layout
    )
    return [
        [[batch.lengths_B[list(micro)].tolist() for micro in step.micro_batches] for step in batch.steps]
        for batch, _ in reshard_for_critic(settings, before)
    ]


def test_padding_does_not_take_a_row_of_the_critic_above_the_budget():
    layout = ParallelLayout(tensor=2, context=2, sequence=True)
    multiple, most = layout.row_multiple, 9
    (steps,) = cut_for(shards(2), ranks=4, layout=layout, max_tokens_per_gpu=most)
    assert 2 * most % multiple  # else rounding down would do nothing
    rows = [row for step in steps for row in step]
    assert any(len(row) > 1 for row in rows)
    assert all(-(-sum(row) // multiple) * multiple <= 2 * most for row in rows if len(row) > 1)


def test_a_critic_takes_as_many_samples_as_the_run_asks_for():
    (steps,) = cut_for(shards(2), micro_batch_size=3, max_tokens_per_gpu=5)
    assert [sorted(map(len, step)) for step in steps] == [[2, 2, 3], [3, 3]]


def test_a_critic_balances_by_work_where_the_run_does():
    before, flops = shards(1, count=26), forward_flops(described(MODEL) or {})
    by_tokens, by_work = (cut_for(before, ranks=2, balance_by_flops=wanted) for wanted in (False, True))
    assert by_tokens != by_work

    def imbalance(cut) -> int:
        loads = [[sum(map(flops.of, (length for row in step for length in row))) for step in rank] for rank in cut]
        return sum(abs(left - right) for left, right in zip(*loads, strict=True))

    assert imbalance(by_work) <= imbalance(by_tokens)
