"""Training with overlapped exchanges gives the weights of training without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.config.schema import MegatronConfig
from slime_core.types import Sample, TrainBatch
from tests.checkpoints import write_copies
from tests.engines.families import write
from tests.engines.learners import Learners, Make, cut, equal, settings, weights_of

pytestmark = pytest.mark.long

LENGTHS, ROLLOUTS = (9, 4, 12, 6, 7, 11, 5, 8), 3
REDUCE, GATHER = "overlap_grad_reduce", "overlap_param_gather"
FULL = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
BUCKET = 3000
"""Parameters; a tiny layer has several buckets, and the exchange of some starts in the backward pass."""

LAYOUTS: dict[str, tuple[int, dict[str, int], Any]] = {
    "DP2": (2, {}, ()),
    "DP2 recomputed": (2, {}, FULL),
    "DP2 silent": (2, {}, ()),
    "EP2": (2, {"expert": 2}, ()),
    "PP2xDP2": (4, {"pipeline": 2}, ()),
    "PP2xVPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}, ()),
}
WAYS = {"none": (), "both": (REDUCE, GATHER), "reduce": (REDUCE,), "gather": (GATHER,)}


def shards(rollout: int, num_ranks: int) -> list[TrainBatch]:
    """Two optimizer steps of several micro-batches on each rank."""
    random = np.random.default_rng(rollout)
    samples = [
        Sample(index=i, tokens=random.integers(0, 16, n).tolist(), response_length=2, rollout_log_probs=[-1.0, -1.0])
        for i, n in enumerate(LENGTHS)
    ]
    return cut(samples, random.normal(size=len(samples)).astype(np.float32), num_ranks=num_ranks, max_tokens=12)


def silence_last(rank: int) -> None:
    """On rank 1, let the loss of the last micro-batch of a step need no gradient, so nothing runs backward."""
    from slime_core.learner import rank as module
    from slime_core.learner.objective import Objective

    call, run = Objective.__call__, module.forward_backward_policy
    last: list[Any] = []

    def silenced(self: Any, log_probs_U: Any, entropy_U: Any, micro: Any) -> Any:
        loss, sums = call(self, log_probs_U, entropy_U, micro)
        return (loss.detach() if rank == 1 and micro.places_U is last[-1].places_U else loss), sums

    def remembered(model: Any, micro_batches: Any, *arguments: Any, **options: Any) -> Any:
        last[:] = micro_batches
        return run(model, micro_batches, *arguments, **options)

    Objective.__call__, module.forward_backward_policy = silenced, remembered


def count_open(learner: Any) -> dict[str, list[int]]:
    """Filled during training: exchanges that run when a backward pass ends, and gathers that run after a step."""
    counts: dict[str, list[int]] = {REDUCE: [], GATHER: []}
    config, step, model = learner.actor.model[0].config, learner.actor.step, learner.actor.model
    finalize = config.finalize_model_grads_func

    def groups() -> list[Any]:
        return [group for chunk in model for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]

    def finalized(*arguments: Any, **options: Any) -> None:
        counts[REDUCE].append(sum(group.grad_reduce_handle is not None for group in groups()))
        finalize(*arguments, **options)

    def stepped() -> dict[str, float]:
        metrics: dict[str, float] = step()
        counts[GATHER].append(sum(group.param_gather_handle is not None for group in groups()))
        return metrics

    config.finalize_model_grads_func, learner.actor.step = finalized, stepped
    return counts


def train_each_way(make: Make, name: str, folder: Path, saved: Path) -> dict[str, Any]:
    """Train in every way, in most layouts in two, and resume each after its first rollout."""
    from slime_core.learner import optimizer
    from slime_core.modeling.layout import ParallelLayout

    optimizer.DistributedDataParallelConfig = partial(optimizer.DistributedDataParallelConfig, bucket_size=BUCKET)
    if name == "DP2 silent":
        silence_last(make.rank)
    ranks, sizes, recomputation = LAYOUTS[name]
    layout = ParallelLayout(**sizes)
    place = layout.data_rank(make.rank, world_size=ranks)
    rollouts = [shards(number, layout.data_size(ranks))[place] for number in range(ROLLOUTS)]
    report: dict[str, Any] = {}
    for way in WAYS if name == "DP2" else ("none", "both"):
        megatron = MegatronConfig(given=(*recomputation, *((flag, True) for flag in WAYS[way])))
        # Not clipped: a norm is summed in the order of the buckets, whose number differs.
        config = settings(lr=1e-3, clip_grad=1e9).model_copy(update={"megatron": megatron})
        learn = partial(make, config, folder, architecture="Qwen3MoeForCausalLM", **sizes)
        learner, weights = learn(), []
        counts = count_open(learner)
        for number, shard in enumerate(rollouts):
            learner.train(shard)
            weights.append(weights_of(learner))
            if number == 0:
                write_copies(learner.copy(saved / way))
        learner = learn()
        learner.load(saved / way)
        for shard in rollouts[1:]:
            learner.train(shard)
        report[way] = {"rollouts": weights, "resumed": weights_of(learner), **counts}
    return report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(
    request: pytest.FixtureRequest, learners: Learners, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Any]:
    """What each rank reports, for one layout."""
    saved = tmp_path_factory.mktemp("overlap")
    scenario = partial(train_each_way, name=request.param, folder=folder, saved=saved)
    return learners(scenario, ranks=LAYOUTS[request.param][0], num_learners=2 * len(WAYS))


def test_weights_are_the_same_bit_for_bit(ranks) -> None:
    for rank in ranks:
        expected = rank["none"]["rollouts"]
        assert not equal(expected[0], expected[1])
        assert all(all(map(equal, way["rollouts"], expected)) for way in rank.values())


def test_a_resumed_run_takes_the_same_steps(ranks) -> None:
    assert all(equal(way["rollouts"][-1], way["resumed"]) for rank in ranks for way in rank.values())


def test_exchanges_run_while_passes_do(ranks) -> None:
    for way, counts in ranks[0].items():
        for name in (REDUCE, GATHER):
            later = counts[name][name == REDUCE :]  # the first step shows how often a pass reaches each parameter
            assert len(later) == 2 * ROLLOUTS - (name == REDUCE)
            assert min(later) > 0 if name in WAYS[way] else max(later) == 0
