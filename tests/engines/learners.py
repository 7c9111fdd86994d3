"""Learners in forked processes, because a learner takes over its process; and what they train."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray import cloudpickle

from slime_core.config.learning import AlgorithmConfig, OptimizerConfig
from slime_core.config.schema import ClusterConfig, ModelConfig, RunConfig
from slime_core.errors import SlimeError
from slime_core.learner.micro_batches import PackedMicroBatch, make_micro_batches
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, Status, TrainBatch
from tests.checkpoints import write_copies
from tests.engines.families import build
from tests.ranks import free_address, learner_of, prepare, run_ranks

TIMEOUT_S = 600
TEMPERATURE = 0.7
VOCABULARY = 48
LAST_BITS = 1e-6
"""Absolute error of a mean of differences between log-probabilities near -4, whose last bit is 2e-7 in fp32."""
NEAR = 1e-5
"""Weights after two steps of Adam differ by up to 1.2e-6 where sums are taken in another order; a wrong gradient
moves them by some 6e-3, twice the learning rates."""
ADAM = {"lr": 3e-3, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_eps": 1e-5, "clip_grad": 0.5}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k3"}
EVERYTHING = {**KL, "entropy_coef": 0.02}
ADVANTAGES = np.random.default_rng(1).normal(size=12).astype(np.float32)

Weights = dict[str, torch.Tensor]


def settings(*, algorithm: Any = None, model: Any = None, learner: Any = None, **optimizer: Any) -> RunConfig:
    """Settings of a run on CPUs; ``algorithm`` and ``model`` are fields, ``learner`` a section."""
    config = RunConfig(
        cluster=ClusterConfig(device="cpu"),
        algorithm=AlgorithmConfig(**(algorithm or {})),
        model=ModelConfig(**(model or {})),
        optimizer=OptimizerConfig(**{**ADAM, **optimizer}),
    )
    return config if learner is None else config.model_copy(update={"learner": learner})


def random_model(target: Path, *, seed: int, **fields: Any) -> Path:
    """Write a Qwen3 of two layers with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "rope_theta": 1e4}
    shape = {**sizes, **heads, "vocab_size": VOCABULARY, "tie_word_embeddings": False, "initializer_range": 0.1}
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**{**shape, **fields})).save_pretrained(target)
    return target


def twelve_samples() -> list[Sample]:
    """Samples of different lengths, one with masked tokens, one removed."""
    random = np.random.default_rng(0)
    samples = []
    for index in range(12):
        prompt, response = int(random.integers(1, 6)), int(random.integers(1, 9))
        samples.append(
            Sample(
                group_index=index // 4,
                index=index,
                tokens=random.integers(0, VOCABULARY, prompt + response).tolist(),
                response_length=response,
                rollout_log_probs=[-3.0] * response,
                status=Status.COMPLETED,
            )
        )
    samples[2].loss_mask = [0] + [1] * (samples[2].response_length - 1)
    samples[7].remove_sample = True
    return samples


def cut(
    samples: Sequence[Sample],
    advantages: Any = ADVANTAGES,
    *,
    rollout: int = 0,
    num_ranks: int = 1,
    num_steps: int = 2,
    max_tokens: int = 40,
    **plan: Any,
) -> list[TrainBatch]:
    """Shards by rank."""
    batches = BatchPlan(num_ranks=num_ranks, num_steps=num_steps, max_tokens=max_tokens, **plan)
    return make_shards(samples, advantages, batches, rollout=rollout, temperature=TEMPERATURE)


def weights_of(learner: Any) -> Weights:
    return {name: weight.float().clone() for name, weight in learner.export_weights()}


def equal(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def distance(a: Weights, b: Weights) -> float:
    """Largest difference of any weight."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def micro_batch() -> PackedMicroBatch:
    """One sample of 12 tokens, of which 4 are the response."""
    tokens = np.random.default_rng(0).integers(0, 16, 12).tolist()
    sample = Sample(index=0, tokens=tokens, response_length=4, rollout_log_probs=[-1.0] * 4)
    plan = BatchPlan(num_ranks=1, max_tokens=16)
    (shard,) = make_shards([sample], np.ones(1, np.float32), plan, rollout=0, temperature=1.0)
    return make_micro_batches(shard)[0][0]


class OneRank:
    """A model of a family with its optimizer, in the process of the test (fixture ``megatron``)."""

    def __init__(
        self,
        family: str,
        folder: Path,
        layout: ParallelLayout,
        *,
        prepare: Any = None,
        lr: float = 1e-3,
        **wrapping: Any,
    ) -> None:
        """Call ``prepare`` with the chunks before they are wrapped with the overrides ``wrapping``."""
        from slime_core.learner.optimizer import build_optimizer, build_schedule, wrap

        optimizer = OptimizerConfig(lr=lr)
        _, self.chunks = build(family, folder, layout)
        if prepare is not None:
            prepare(self.chunks)
        self.model = wrap(self.chunks, bf16=False, overrides=wrapping)
        self.optimizer = build_optimizer(self.model, optimizer, bf16=False)
        self.schedule = build_schedule(self.optimizer, optimizer, num_steps=4)
        self.state = {"chunks": self.chunks, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self, seed: int) -> None:
        """Step with random gradients."""
        torch.manual_seed(seed)
        for parameter in self.chunks[0].parameters():
            if parameter.requires_grad:
                parameter.main_grad.copy_(torch.randn_like(parameter))
        self.optimizer.step()
        self.schedule.step(increment=1)

    def weights(self) -> Weights:
        return {name: parameter.detach().clone() for name, parameter in self.chunks[0].named_parameters()}


# --- In the child -----------------------------------------------------------------------------------------------------


class Make:
    """Makes the learners of one rank, one after the other; their ranks meet at ``addresses``."""

    def __init__(self, rank: int, num_ranks: int, addresses: Sequence[str]) -> None:
        self.rank, self.num_ranks, self._addresses = rank, num_ranks, list(addresses)

    def __call__(
        self, config: RunConfig, folder: Path, *, architecture: str = "Qwen3ForCausalLM", **options: Any
    ) -> Any:
        """A learner; options are those of ``learner_of``, and sizes of the layout."""
        if torch.distributed.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
        sizes = {name: options.pop(name) for name in ParallelLayout.__dataclass_fields__ if name in options}
        place: dict[str, Any] = {"rank": self.rank, "ranks": self.num_ranks, "address": self._addresses.pop()}
        return learner_of(config, folder, architecture, **place, layout=ParallelLayout(**sizes), **options)

    def join(self, store: Path) -> None:
        """Join the other ranks in a group without a learner; they meet in the file ``store``."""
        where = f"file://{store}"
        torch.distributed.init_process_group("gloo", init_method=where, rank=self.rank, world_size=self.num_ranks)


Scenario = Callable[[Make], Any]


@dataclass(frozen=True)
class Outcome:
    """What one rank reports of its rollouts, and the weights it would send."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)
    offloaded_bytes: list[int] = field(default_factory=list)


def offload(learner: Any) -> int:
    """Offload the learner in two stages and load it again; return the bytes. Between the stages it can publish."""
    before = weights_of(learner)
    first = learner.offload(keeps_weights=True)
    assert equal(before, weights_of(learner))
    offloaded = learner.offload()
    assert 0 < first < offloaded
    parameters = [parameter for chunk in learner.actor.chunks for parameter in chunk.parameters()]
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in parameters)
    learner.onload()
    return int(offloaded)


def train(
    make: Make,
    *,
    config: RunConfig,
    folder: Path,
    rollouts: Sequence[Sequence[TrainBatch]],
    functions: Mapping[str, str],
    offloads: bool,
    load: Path | None,
    save: Path | None,
    before: Callable[[], None] | None,
    **options: Any,
) -> Outcome:
    """The scenario of :meth:`Learners.train`."""
    from slime_core.checkpoint import sharded

    if before is not None:
        before()
    if functions:
        from slime_compat.paths import PathOptions
        from slime_core.components.construction import run_view
        from slime_core.components.functions import find_function

        sources = {option: (find_function(path, setting=option),) for option, path in functions.items()}
        compat = PathOptions(plan=run_view(config), sources=sources)
        options = {"plugins": ("compat",), "options": {"compat": compat}, **options}
    learner = make(config, folder, **options)
    state = {name: getattr(learner.actor, name) for name in ("chunks", "optimizer", "schedule")}
    if load is not None:
        sharded.load(load, **state)
    metrics, offloaded = [], []
    for shards in rollouts:
        offloaded += [offload(learner)] if offloads else []
        metrics.append(learner.train(shards[make.rank]))
    offloaded += [offload(learner)] if offloads else []
    if save is not None:
        write_copies([sharded.copy(save, **state)])
    return Outcome(metrics, weights_of(learner), offloaded)


class _Call:
    """Runs where it is unpickled, because functions of a test file have no name there."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, *arguments

    def __reduce__(self) -> Any:
        return _apply, self._call


def _apply(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _pickle_by_value(function: Any) -> None:
    """The forkserver cannot import test files."""
    name = getattr(function, "__module__", __name__)
    if name.rpartition(".")[2].startswith("test_"):
        cloudpickle.register_pickle_by_value(sys.modules[name])


def _prepare() -> int:
    prepare()
    return os.getpid()


def _fork_ranks(scenario: Scenario, num_ranks: int, num_learners: int) -> list[bytes]:
    """What the ranks wrote; those that died or hang have written nothing."""
    addresses = [free_address() for _ in range(num_learners)]
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(SystemExit):
            run_ranks("scenario", num_ranks, partial(_run, scenario, num_ranks, addresses, folder), limit_s=TIMEOUT_S)
        files = [Path(folder, f"{rank}") for rank in range(num_ranks)]
        return [file.read_bytes() for file in files if file.exists()]


def _run(scenario: Scenario, num_ranks: int, addresses: Sequence[str], folder: str, rank: int) -> None:
    """Write the result of the scenario and the error that ended it, one of them None.

    An error of a library is written as its text: one of Megatron cannot be unpickled where Megatron is not prepared.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = scenario(Make(rank, num_ranks, addresses))
    except SlimeError as problem:
        error = problem
    except Exception:
        error = AssertionError(traceback.format_exc())
    draft = Path(folder, f"{rank}.draft")
    draft.write_bytes(cloudpickle.dumps((result, error)))
    draft.rename(draft.with_suffix(""))
    os._exit(error is not None)


# --- In the test ------------------------------------------------------------------------------------------------------


class Learners:
    """Runs scenarios on ranks that are forked from one process, which has imported the engines."""

    def __init__(self) -> None:
        self._forkserver = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self._pid = self._inside(_prepare)

    def __call__(self, scenario: Scenario, *, ranks: int = 1, num_learners: int = 4) -> list[Any]:
        """What ``scenario(make)`` returns on every rank; raises what one of them raises first."""
        _pickle_by_value(scenario)
        outcomes = [cloudpickle.loads(answer) for answer in self._inside(_fork_ranks, scenario, ranks, num_learners)]
        for error in (error for _, error in outcomes if error is not None):
            raise error
        assert len(outcomes) == ranks, "a rank died or hangs"
        return [result for result, _ in outcomes]

    def train(
        self,
        config: RunConfig,
        folder: Path,
        *rollouts: Sequence[TrainBatch],
        ranks: int = 1,
        functions: Mapping[str, str] | None = None,
        offloads: bool = False,
        load: Path | None = None,
        save: Path | None = None,
        before: Callable[[], None] | None = None,
        **options: Any,
    ) -> list[Outcome]:
        """Train rollouts with one learner; what every rank reports.

        Arguments:
            rollouts: shards by rank of each.
            functions: option of plugin ``compat`` -> the function that it names by path.
            offloads: the learner is offloaded and loaded again before each rollout and at the end.
            load: torch_dist folder to continue from before anything is trained.
            save: empty folder to save into after the last rollout.
            before: called before the learner is built.
            options: of ``learner_of``, and sizes of the layout.
        """
        _pickle_by_value(before)
        files: dict[str, Any] = {"config": config, "folder": folder, "load": load, "save": save}
        how: dict[str, Any] = {"functions": functions or {}, "offloads": offloads, "before": before}
        return self(partial(train, rollouts=rollouts, **files, **how, **options), ranks=ranks, num_learners=1)

    def _inside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        call = cloudpickle.dumps(_Call(function, *arguments))
        return self._forkserver.submit(cloudpickle.loads, call).result(timeout=2 * TIMEOUT_S)

    def stop(self) -> None:
        """End the process, also while it waits."""
        os.kill(self._pid, signal.SIGKILL)
        self._forkserver.shutdown(cancel_futures=True)
