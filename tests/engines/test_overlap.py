"""Training with overlapped exchanges gives the weights of training without, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slime_core.config.learning import AlgorithmConfig, OptimizerConfig
from slime_core.config.schema import ClusterConfig, MegatronConfig, RunConfig
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, TrainBatch
from tests.checkpoints import write_copies
from tests.engines.families import build, write
from tests.ranks import free_address, learner_of, prepare, run_ranks

ROOT = Path(__file__).parents[2]
FAMILY, LENGTHS, ROLLOUTS = "qwen3_moe", (9, 4, 12, 6, 7, 11, 5, 8), 3
REDUCE, GATHER = "overlap_grad_reduce", "overlap_param_gather"
FULL = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
BUCKET = 3000
"""Parameters; a tiny layer has several buckets, and the exchange of some starts in the backward pass."""

LAYOUTS = {
    "DP2": (2, ParallelLayout(), ()),
    "DP2 recomputed": (2, ParallelLayout(), FULL),
    "DP2 silent": (2, ParallelLayout(), ()),
    "EP2": (2, ParallelLayout(expert=2), ()),
    "PP2xDP2": (4, ParallelLayout(pipeline=2), ()),
    "PP2xVPP2": (2, ParallelLayout(pipeline=2, virtual_pipeline=2), ()),
}
WAYS = {"none": (), "both": (REDUCE, GATHER), "reduce": (REDUCE,), "gather": (GATHER,)}


def ways(layout: str) -> list[str]:
    """All of them in the simplest layout, two in the others."""
    return list(WAYS) if layout == "DP2" else ["none", "both"]


def shards(num_ranks: int, rollout: int) -> list[TrainBatch]:
    """Two optimizer steps of several micro-batches on each rank."""
    random = np.random.default_rng(rollout)
    samples = [
        Sample(
            index=i,
            tokens=random.integers(0, 16, length).tolist(),
            response_length=2,
            rollout_log_probs=[-1.0, -1.0],
        )
        for i, length in enumerate(LENGTHS)
    ]
    advantages_B = random.normal(size=len(samples)).astype(np.float32)
    plan = BatchPlan(num_ranks=num_ranks, num_steps=2, max_tokens=12)
    return make_shards(samples, advantages_B, plan, rollout=rollout, temperature=1.0)


def learner(way: str, layout: str, rank: int, address: str, folder: Path) -> Any:
    """Its steps are never clipped: a norm is summed in the order of the buckets, whose number differs."""
    ranks, parallel, recomputation = LAYOUTS[layout]
    config = RunConfig(
        cluster=ClusterConfig(device="cpu"),
        algorithm=AlgorithmConfig(),
        optimizer=OptimizerConfig(lr=1e-3, clip_grad=1e9),
        megatron=MegatronConfig(given=(*recomputation, *((name, True) for name in WAYS[way]))),
    )
    return learner_of(config, folder, "Qwen3MoeForCausalLM", rank=rank, ranks=ranks, address=address, layout=parallel)


def weights(of: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in of.export_weights()}


def join_once() -> None:
    """The first learner of this process joins the group, the others find it."""
    from slime_core.learner import rank as module

    join = module.prepare_process
    module.prepare_process = lambda settings: torch.device("cpu") if dist.is_initialized() else join(settings)


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


def count_open(of: Any) -> dict[str, list[int]]:
    """Filled as ``of`` trains: exchanges that run when a backward pass ends, and gathers that run after a step."""
    found: dict[str, list[int]] = {REDUCE: [], GATHER: []}
    config, step, model = of.actor.model[0].config, of.actor.step, of.actor.model
    finalize = config.finalize_model_grads_func

    def groups() -> list[Any]:
        return [group for chunk in model for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]

    def finalized(*arguments: Any, **options: Any) -> None:
        found[REDUCE].append(sum(group.grad_reduce_handle is not None for group in groups()))
        finalize(*arguments, **options)

    def stepped() -> dict[str, float]:
        metrics: dict[str, float] = step()
        found[GATHER].append(sum(group.param_gather_handle is not None for group in groups()))
        return metrics

    config.finalize_model_grads_func, of.actor.step = finalized, stepped
    return found


def on_rank(layout: str, folder: Path, target: Path, address: str, rank: int) -> None:
    """Train in every way, resume each after its first rollout, and write what was found into ``target``."""
    from slime_core.learner import optimizer

    optimizer.DistributedDataParallelConfig = partial(optimizer.DistributedDataParallelConfig, bucket_size=BUCKET)
    join_once()
    if layout == "DP2 silent":
        silence_last(rank)
    ranks, parallel, _ = LAYOUTS[layout]
    place = parallel.data_rank(rank, world_size=ranks)
    parts = [shards(parallel.data_size(ranks), number)[place] for number in range(ROLLOUTS)]
    found: dict[str, Any] = {}
    for way in ways(layout):
        first, second = (learner(way, layout, rank, address, folder) for _ in range(2))
        opened, rollouts = count_open(first), []
        for number, part in enumerate(parts):
            first.train(part)
            rollouts.append(weights(first))
            if number == 0:
                write_copies(first.copy(target / f"saved {way}"))
        second.load(target / f"saved {way}")
        for part in parts[1:]:
            second.train(part)
        found[way] = {"rollouts": rollouts, "resumed": weights(second), **opened}
    torch.save(found, target / f"{rank}.pt")
    second.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(FAMILY, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found, for one layout."""
    target = tmp_path_factory.mktemp("overlap")
    words = [sys.executable, "-m", "tests.engines.test_overlap", request.param, str(folder), str(target)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(target / f"{rank}.pt") for rank in range(LAYOUTS[request.param][0])]


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(weight, others[name]) for name, weight in some.items())


@pytest.mark.long
def test_weights_are_the_same_bit_for_bit(found):
    for rank in found:
        expected = rank["none"]["rollouts"]
        assert not equal(expected[0], expected[1])
        assert all(all(map(equal, way["rollouts"], expected)) for way in rank.values())


@pytest.mark.long
def test_a_resumed_run_takes_the_same_steps(found):
    assert all(equal(way["rollouts"][-1], way["resumed"]) for rank in found for way in rank.values())


@pytest.mark.long
def test_exchanges_run_while_passes_do(found):
    for way, names in ((way, WAYS[way]) for way in found[0]):
        for name in (REDUCE, GATHER):
            # The first step shows how often a pass reaches each parameter.
            later = [number for rank in found[:1] for number in rank[way][name][name == REDUCE :]]
            assert len(later) == 2 * ROLLOUTS - (name == REDUCE)
            assert min(later) > 0 if name in names else max(later) == 0


@pytest.mark.filterwarnings("ignore")  # torch and Megatron warn of Megatron's own calls
def test_a_model_in_several_buckets_is_saved_and_resumed_exactly(megatron, folder, tmp_path):
    from slime_core.checkpoint import sharded
    from slime_core.learner.optimizer import build_optimizer, build_schedule, wrap

    settings, learners = OptimizerConfig(lr=1e-3), []
    for _ in range(2):
        _, chunks = build(FAMILY, folder, megatron)
        model = wrap(chunks, bf16=False, overrides={REDUCE: True, "bucket_size": BUCKET})
        optimizer = build_optimizer(model, settings, bf16=False)
        schedule = build_schedule(optimizer, settings, num_steps=4)
        learners.append({"chunks": chunks, "optimizer": optimizer, "schedule": schedule})

    def step(of: dict[str, Any], seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in of["chunks"][0].parameters():
            parameter.main_grad.copy_(torch.randn_like(parameter))
        of["optimizer"].step()

    first, second = learners
    assert len(model[0].bucket_groups) > 10
    step(first, 0)
    write_copies([sharded.copy(tmp_path, **first)])
    step(first, 1)
    sharded.load(tmp_path, **second)
    step(second, 1)
    assert equal(*(dict(of["chunks"][0].named_parameters()) for of in learners))


def main(layout: str, folder: str, target: str) -> None:
    prepare()
    run = partial(on_rank, layout, Path(folder), Path(target), free_address())
    run_ranks(layout, LAYOUTS[layout][0], run, limit_s=500)


if __name__ == "__main__":
    main(*sys.argv[1:])
