"""The learner, alone and as two data-parallel ranks, against Hugging Face and torch's AdamW on the same batches.

A learner takes over its process, so every one of them lives in a child; two children serve all tests, one learner after
the other.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle

from slime_core.config.engines import MegatronConfig
from slime_core.config.learning import AlgorithmConfig, LearnerConfig, OptimizerConfig
from slime_core.config.schema import ClusterConfig, ModelConfig, RunConfig
from slime_core.errors import CheckpointError, NonFiniteError, RunError, SlimeError
from slime_core.rollout.shards import BatchPlan, loss_masks, make_shards
from slime_core.types import Sample, Status, TrainBatch
from slime_core.weights.engine_control import reserve_port
from tests.checkpoints import write_copies
from tests.engines.families import write

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the children cannot import test files

TEMPERATURE = 0.7
LAYOUT = ("tensor", "pipeline", "context", "expert", "sequence")
LAST_BITS = 1e-6
"""Absolute error of a mean of differences between log-probabilities near -4, whose last bit is 2e-7 in fp32."""
NEAR = 1e-5
"""Weights after two steps of Adam differ by up to 1.2e-6 where sums are taken in another order; a wrong gradient
moves them by some 6e-3, twice the learning rates."""
ADAM = {"lr": 3e-3, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_eps": 1e-5, "clip_grad": 0.5}
EVERYTHING = {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k3", "entropy_coef": 0.02}


@dataclass(frozen=True)
class Job:
    """What a child does with one learner.

    Arguments:
        load: torch_dist folder to continue from before anything is trained.
        rollouts: one list of shards, by rank, a rollout.
        save: empty folder to save into after the last rollout.
        prepare: called once the learner is built.
        offloads: the learner is offloaded and loaded again before each rollout and at the end.
        tensor, pipeline, context, expert: ranks that share every matrix, the layers, every row, the experts.
        sequence: those that share matrices share the tokens between them.
        plugins: in addition to the core.
        before: called before the learner is built, when Megatron can be imported.
        functions: option of plugin ``compat`` -> the function that it names by path.
        architecture: of the model.
    """

    config: RunConfig
    folder: Path
    rollouts: Sequence[list[TrainBatch]] = ()
    num_steps: int = 100
    load: Path | None = None
    save: Path | None = None
    prepare: Callable[[], None] | None = None
    offloads: bool = False
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = False
    plugins: Sequence[str] = ()
    functions: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[], None] | None = None
    architecture: str = "Qwen3ForCausalLM"


@dataclass(frozen=True)
class Outcome:
    """What one rank reports: metrics of each rollout, and the weights it would send."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    offloaded_bytes: list[int] = field(default_factory=list)


def carry_out(job: Job, rank: int, world_size: int, address: str) -> Outcome:
    """Runs in a child."""
    from slime_compat.options import PathOptions
    from slime_core.learner import LearnerSettings
    from slime_core.learner.rank import Learner
    from slime_core.modeling.layout import ParallelLayout
    from slime_core.plugins.activation import activate
    from slime_core.plugins.construction import run_view
    from slime_core.plugins.loading import find_function

    compat = ["compat"] if job.functions else []
    active = activate([*job.plugins, *compat], architecture=job.architecture)
    sources = {option: (find_function(path, setting=option),) for option, path in job.functions.items()}
    options = {name: PathOptions(plan=run_view(job.config), sources=sources) for name in compat}
    settings = LearnerSettings(
        job.config,
        job.folder,
        job.architecture,
        "clipped",
        job.num_steps,
        options=options,
        rank=rank,
        world_size=world_size,
        address=address,
        num_threads=1,
        layout=ParallelLayout(**{name: getattr(job, name) for name in LAYOUT}),
    )
    if job.before is not None:
        from slime_core.modeling import prepare_megatron

        prepare_megatron()
        job.before()
    try:
        learner = Learner(settings, active.registry)
    except (ValueError, SlimeError):
        leave_groups()  # the child goes on to serve other tests
        raise
    from slime_core.checkpoint import sharded  # Megatron may be imported only now

    parts = {"chunks": learner.actor.chunks, "optimizer": learner.actor.optimizer, "schedule": learner.actor.schedule}
    try:
        if job.prepare is not None:
            job.prepare()
        if job.load is not None:
            sharded.load(job.load, **parts)
        offloaded, metrics = [], []
        for shards in job.rollouts:
            offloaded += [offload(learner)] if job.offloads else []
            metrics.append(learner.train(shards[rank]))
        offloaded += [offload(learner)] if job.offloads else []
        if job.save is not None:
            write_copies([sharded.copy(job.save, **parts)])
        weights = {name: weight.float().clone() for name, weight in learner.export_weights()}
        return Outcome(metrics, weights, offloaded)
    finally:
        learner.close()


def offload(learner: Any) -> int:
    """Offload the learner in two stages and load it again; return the bytes. Between the stages it can publish."""
    before = {name: weight.clone() for name, weight in learner.export_weights()}
    first = learner.offload(keeps_weights=True)
    between = dict(learner.export_weights())
    assert all(torch.equal(weight, between[name]) for name, weight in before.items())
    del between
    offloaded = learner.offload()
    assert 0 < first < offloaded
    assert all(
        parameter.untyped_storage().nbytes() == 0 for chunk in learner.actor.chunks for parameter in chunk.parameters()
    )
    learner.onload()
    return int(offloaded)


def leave_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


class InChild:
    """Runs where it is unpickled, because functions of a test file have no name there."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return _run_as_bytes, self.arguments


def _run_as_bytes(*arguments: Any) -> bytes:
    return cloudpickle.dumps(carry_out(*arguments))


class Children:
    """Two processes that hold a rank each."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pools = [ProcessPoolExecutor(1, mp_context=context, initializer=os.setsid) for _ in range(2)]
        self._pids = [pool.submit(os.getpid) for pool in self._pools]

    def run(self, job: Job, *, world_size: int = 1) -> list[Outcome]:
        """What every rank reports.

        Raises:
            SlimeError: what rank 0 raised.
        """
        # By the process of rank 0, which then serves the rendezvous on it.
        address = f"127.0.0.1:{self._pools[0].submit(reserve_port, '127.0.0.1').result(timeout=1200)}"
        calls = [
            pool.submit(cloudpickle.loads, cloudpickle.dumps(InChild(job, rank, world_size, address)))
            for rank, pool in enumerate(self._pools[:world_size])
        ]
        return [cloudpickle.loads(call.result(timeout=1200)) for call in calls]

    def stop(self) -> None:
        """Ends both, also one that waits for the other."""
        for pool, pid in zip(self._pools, self._pids, strict=True):
            os.killpg(pid.result(timeout=1200), signal.SIGKILL)
            pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    found = Children()
    yield found
    found.stop()


def random_model(target: Path, *, seed: int, hidden: int = 32) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        rope_theta=1e4,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Twelve samples of different lengths, one with masked tokens, one removed."""
    random = np.random.default_rng(0)
    found = []
    for index in range(12):
        prompt, response = int(random.integers(1, 6)), int(random.integers(1, 9))
        found.append(
            Sample(
                group_index=index // 4,
                index=index,
                tokens=random.integers(0, 48, prompt + response).tolist(),
                response_length=response,
                rollout_log_probs=[-3.0] * response,
                status=Status.COMPLETED,
            )
        )
    found[2].loss_mask = [0] + [1] * (found[2].response_length - 1)
    found[7].remove_sample = True
    return found


ADVANTAGES = np.random.default_rng(1).normal(size=12).astype(np.float32)


def cut(samples: list[Sample], *, num_ranks: int = 1, num_steps: int = 2, max_tokens: int = 40) -> list[TrainBatch]:
    return make_shards(
        samples,
        ADVANTAGES[: len(samples)],
        BatchPlan(num_ranks=num_ranks, num_steps=num_steps, max_tokens=max_tokens),
        rollout=0,
        temperature=TEMPERATURE,
    )


def settings(*, algorithm: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **optimizer) -> RunConfig:
    return RunConfig(
        cluster=ClusterConfig(device="cpu"),
        algorithm=AlgorithmConfig(**(algorithm or {})),
        model=ModelConfig(**(model or {})),
        optimizer=OptimizerConfig(**{**ADAM, **optimizer}),
    )


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of any weight."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def start_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


# --- Against Hugging Face and torch -----------------------------------------------------------------------------------


class Reference:
    """Two optimizer steps with plain transformers and torch.optim.AdamW, each sample alone."""

    def __init__(self, folder: Path, samples: list[Sample]) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.samples, self.masks = samples, [torch.from_numpy(mask) for mask in loss_masks(samples)]
        named = list(self.model.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": ADAM["weight_decay"]},
            {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=ADAM["lr"], betas=(0.9, 0.95), eps=ADAM["adam_eps"])
        with torch.no_grad():
            self.old = [self.log_probs(sample)[0] for sample in samples]

    def log_probs(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(sample.tokens)
        logits_TV = self.model(ids[None]).logits[0, sample.prompt_length - 1 : -1] / TEMPERATURE
        log_p_UV = logits_TV.log_softmax(-1)
        return log_p_UV.gather(1, ids[sample.prompt_length :, None])[:, 0], -(log_p_UV.exp() * log_p_UV).sum(-1)

    def step(self, members: range) -> dict[str, float]:
        trained = [i for i in members if self.masks[i].sum() > 0]
        parts = {name: torch.zeros(()) for name in ("loss", "kl_loss", "entropy_loss", "clip_fraction")}
        for i in trained:
            now, entropy = self.log_probs(self.samples[i])
            ratio, advantage = (now - self.old[i]).exp(), float(ADVANTAGES[i])
            policy = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
            kl = (self.old[i] - now).exp() - 1 - (self.old[i] - now)  # the reference is the start, and so is old
            weight = self.masks[i] / self.masks[i].sum() / len(trained)
            parts["loss"] = parts["loss"] + (weight * (policy + 0.05 * kl - 0.02 * entropy)).sum()
            parts["kl_loss"] += (weight * kl).sum().detach()
            parts["entropy_loss"] += (weight * entropy).sum().detach()
        self.optimizer.zero_grad()
        parts["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), ADAM["clip_grad"])
        self.optimizer.step()
        return {**{name: part.item() for name, part in parts.items()}, "grad_norm": norm.item()}


@pytest.fixture(scope="module")
def alone(children, folder, samples) -> Outcome:
    """One rank, one rollout of two steps, every term of the loss."""
    (found,) = children.run(Job(settings(algorithm=EVERYTHING), folder, [cut(samples)]))
    return found


def test_two_steps_equal_hugging_face_and_adamw(folder, samples, alone):
    reference = Reference(folder, samples)
    first, second = reference.step(range(6)), reference.step(range(6, 12))
    (metrics,) = alone.metrics
    assert min(first["grad_norm"], second["grad_norm"]) > ADAM["clip_grad"]  # the clipping is part of the comparison
    assert second["kl_loss"] > 1e-3  # and so is a ratio other than 1
    for name in ("loss", "grad_norm", "kl_loss", "entropy_loss"):
        assert metrics[f"train/{name}"] == pytest.approx((first[name] + second[name]) / 2, rel=1e-5, abs=1e-7), name
    expected = {name: parameter.detach() for name, parameter in reference.model.named_parameters()}
    assert distance(start_weights(folder), expected) > 1e-3
    assert distance(alone.weights, expected) < NEAR


# --- What must not matter ---------------------------------------------------------------------------------------------


def test_a_learner_that_is_offloaded_between_steps_trains_the_same_bit_for_bit(children, folder, samples):
    job = Job(settings(algorithm=EVERYTHING), folder, [cut(samples), cut(samples)], offloads=True)
    (stayed,), (moved,) = children.run(replace(job, offloads=False)), children.run(job)
    assert equal(stayed.weights, moved.weights)
    assert moved.metrics == stayed.metrics
    parameters = sum(weight.numel() for weight in moved.weights.values())
    # Weights and gradients from the start, and Adam's two moments once it has stepped; 4 bytes each.
    assert moved.offloaded_bytes[0] >= 8 * parameters
    assert moved.offloaded_bytes[1] >= 16 * parameters


@pytest.mark.parametrize("max_tokens", [1, 1000])
def test_packing_does_not_change_the_training(children, folder, samples, alone, max_tokens):
    shards = cut(samples, max_tokens=max_tokens)
    assert len(shards[0].steps[0].micro_batches) == (6 if max_tokens == 1 else 1)
    (found,) = children.run(Job(settings(algorithm=EVERYTHING), folder, [shards]))
    assert found.metrics[0] == pytest.approx(alone.metrics[0], rel=1e-5, abs=LAST_BITS)
    assert distance(found.weights, alone.weights) < NEAR


def test_two_ranks_equal_one(children, folder, samples, alone):
    job = Job(settings(algorithm=EVERYTHING), folder, [cut(samples, num_ranks=2)])
    first, second = children.run(job, world_size=2)
    assert first.metrics == second.metrics
    assert equal(first.weights, second.weights)
    assert first.metrics[0] == pytest.approx(alone.metrics[0], rel=1e-5, abs=LAST_BITS)
    assert distance(first.weights, alone.weights) < NEAR


@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2}], ids=lambda layout: "-".join(layout)
)
def test_logits_that_are_multiplied_by_chunks_train_the_same(children, folder, samples, alone, layout):
    config = settings(algorithm=EVERYTHING).model_copy(
        update={"learner": LearnerConfig(fp32_lm_head=True, log_probs_chunk_size=6)}
    )
    shards = 2 * cut(samples)  # both ranks train the same
    found, *_ = children.run(Job(config, folder, [shards], **layout), world_size=2 if layout else 1)
    assert found.metrics[0] == pytest.approx(alone.metrics[0], rel=1e-5, abs=LAST_BITS)
    assert distance(found.weights, alone.weights) < NEAR


def stand_in_transformer_engine() -> None:
    """Give Megatron modules with the parameters of TransformerEngine's, that compute with torch."""
    from megatron.core.extensions import transformer_engine as engine
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from slime_core.modeling.layers import RMSNorm

    class LayerNormColumnParallelLinear(ColumnParallelLinear):
        def __init__(self, input_size, output_size, *, config, **options):
            super().__init__(input_size, output_size, config=config, **options)
            norm = RMSNorm(config, input_size, eps=config.layernorm_epsilon)
            self.layer_norm_weight = norm.weight
            self.eps = norm.eps

        def forward(self, hidden, *more, **options):
            shape = self.layer_norm_weight.shape
            normed = torch.nn.functional.rms_norm(hidden, shape, self.layer_norm_weight, self.eps)
            return super().forward(normed, *more, **options)

    engine.HAVE_TE = True
    engine.TENorm, engine.TERowParallelLinear = RMSNorm, RowParallelLinear
    engine.TELayerNormColumnParallelLinear = LayerNormColumnParallelLinear


def with_transformer_engine(layout: dict[str, Any], folder: Path, shards: list[TrainBatch], **more: Any) -> Job:
    requested = {"learner": LearnerConfig(transformer_impl="transformer_engine")}
    config = settings(algorithm=EVERYTHING).model_copy(update=requested)
    return Job(config, folder, [shards], before=stand_in_transformer_engine, **layout, **more)


@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "sequence": True}], ids=["one rank", "tensor"])
def test_layers_with_the_names_of_transformer_engine_load_train_and_export(children, folder, samples, alone, layout):
    job = with_transformer_engine(layout, folder, 2 * cut(samples))
    found, *_ = children.run(job, world_size=2 if layout else 1)
    assert found.metrics[0] == pytest.approx(alone.metrics[0], rel=1e-5, abs=LAST_BITS)
    assert distance(found.weights, alone.weights) < NEAR


def test_a_checkpoint_of_transformer_engines_layers_resumes_with_local_ones(children, folder, samples, tmp_path):
    (tmp_path / "saved").mkdir()
    job = with_transformer_engine({}, folder, cut(samples), save=tmp_path / "saved")
    (saved,) = children.run(job)
    (resumed,) = children.run(Job(settings(algorithm=EVERYTHING), folder, load=tmp_path / "saved"))
    assert equal(resumed.weights, saved.weights)


@pytest.mark.long
def test_latent_attention_split_over_two_ranks_trains_as_one_rank_does(children, samples, tmp_path):
    model = write("deepseek_v3", tmp_path / "model", vocab_size=48, num_hidden_layers=2, first_k_dense_replace=2)
    job = Job(settings(), model, [cut(samples)], architecture="DeepseekV3ForCausalLM")
    (expected,) = children.run(job)
    first, second = children.run(replace(job, rollouts=[cut(samples) * 2], tensor=2, sequence=True), world_size=2)
    assert equal(first.weights, second.weights)
    assert first.metrics[0] == pytest.approx(expected.metrics[0], rel=1e-5, abs=LAST_BITS)
    assert distance(first.weights, expected.weights) < NEAR


def leave_gradients_alone() -> None:
    from slime_core.learner import optimizer

    def forgotten(model: list[Any], num_tokens: Any = None, **options: Any) -> None:
        optimizer.finalize_model_grads = original  # the child goes on to serve other tests

    original, optimizer.finalize_model_grads = optimizer.finalize_model_grads, forgotten


@pytest.mark.long
def test_the_comparison_of_two_ranks_notices_gradients_that_were_not_summed(children, folder, samples):
    shards = {count: cut(samples, num_ranks=count, num_steps=1) for count in (1, 2)}
    (expected,) = children.run(Job(settings(), folder, [shards[1]]))
    spoilt = Job(settings(), folder, [shards[2]], prepare=leave_gradients_alone)
    assert distance(children.run(spoilt, world_size=2)[0].weights, expected.weights) > 100 * NEAR
    assert distance(children.run(replace(spoilt, prepare=None), world_size=2)[0].weights, expected.weights) < NEAR


def test_ranks_may_run_different_numbers_of_micro_batches(children, folder, samples, alone):
    shards = cut(samples, num_ranks=2, max_tokens=1)
    whole = cut(samples, num_ranks=2, max_tokens=1000)
    job = Job(settings(algorithm=EVERYTHING), folder, [[shards[0], whole[1]]])
    assert distance(children.run(job, world_size=2)[0].weights, alone.weights) < NEAR


def test_with_a_learning_rate_of_zero_the_weights_stay_bit_for_bit(children, folder, samples):
    (found,) = children.run(Job(settings(lr=0.0), folder, [cut(samples)]))
    assert equal(found.weights, start_weights(folder))
    assert found.metrics[0]["train/grad_norm"] > 0


def test_a_step_without_a_trained_token_changes_nothing(children, folder, samples):
    masked = [replace(sample, remove_sample=True) for sample in samples]
    (found,) = children.run(Job(settings(weight_decay=0.0), folder, [cut(masked)]))
    assert equal(found.weights, start_weights(folder))
    assert found.metrics[0]["train/loss"] == found.metrics[0]["train/grad_norm"] == 0.0


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_from_the_first_step_and_then_falls(children, folder, samples):
    shards = cut(samples, num_steps=1)
    config = settings(lr=4e-3, min_lr=1e-3, lr_warmup_iters=2, lr_decay_style="linear", lr_decay_iters=5)
    (found,) = children.run(Job(config, folder, [shards] * 6))
    rates = [metrics["train/lr"] for metrics in found.metrics]
    assert rates == pytest.approx([2e-3, 4e-3, 3e-3, 2e-3, 1e-3, 1e-3])


def test_megatrons_own_flags_reach_its_optimizer(children, folder, samples):
    config = settings().model_copy(update={"megatron": MegatronConfig(given=(("decoupled_lr", 0.0),))})
    (outcome,) = children.run(Job(config, folder, [cut(samples)]))
    start = start_weights(folder)
    moved = {name for name in start if not torch.equal(start[name], outcome.weights[name])}
    assert start.keys() - moved == {"model.embed_tokens.weight", "lm_head.weight"}


def test_megatrons_own_flags_reach_its_model(children, folder):
    full = MegatronConfig(given=(("recompute_granularity", "full"),))  # which Megatron refuses without a method
    with pytest.raises(ValueError, match="recompute_method"):
        children.run(Job(settings().model_copy(update={"megatron": full}), folder))


def test_the_reference_is_the_start_and_stays_there(children, folder, samples):
    algorithm = {"use_kl_loss": True, "kl_loss_coef": 0.0, "kl_loss_type": "k3"}
    shards = cut(samples, num_steps=1)
    with_reference, without = (
        children.run(Job(settings(algorithm=chosen), folder, [shards] * 3))[0] for chosen in (algorithm, {})
    )
    divergences = [metrics["train/kl_loss"] for metrics in with_reference.metrics]
    assert divergences[0] == 0.0
    assert 1e-6 < divergences[1] < divergences[2]
    assert equal(with_reference.weights, without.weights)  # a measured divergence changes nothing


def test_another_reference_leaves_the_actor_as_it_is(children, folder, samples, tmp_path):
    other = random_model(tmp_path, seed=1)
    config = settings(algorithm={"use_kl_loss": True, "kl_loss_type": "k3"}, model={"ref_load": other}, lr=0.0)
    (found,) = children.run(Job(config, folder, [cut(samples)]))
    assert found.metrics[0]["train/kl_loss"] > 0.1
    assert equal(found.weights, start_weights(folder))


@pytest.mark.parametrize("fp32_lm_head", [False, True])
def test_bfloat16_trains_close_to_float32(children, folder, samples, fp32_lm_head):
    exact, rounded = (
        children.run(
            Job(
                settings(model={"bf16": bf16}).model_copy(
                    update={"learner": LearnerConfig(fp32_lm_head=bf16 and fp32_lm_head)}
                ),
                folder,
                [cut(samples, num_steps=1)] * 3,
            )
        )[0]
        for bf16 in (False, True)
    )
    for a, b in zip(exact.metrics, rounded.metrics, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], abs=0.02)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=0.05)
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in rounded.weights.values())
    assert 1e-3 < distance(rounded.weights, start_weights(folder)) < 0.05


# --- Mistakes ---------------------------------------------------------------------------------------------------------


def test_loss_weights_that_do_not_add_up_to_one_are_refused(children, folder, samples):
    (shard,) = cut(samples)
    doubled = replace(shard, loss_weights_B=2 * shard.loss_weights_B)
    with pytest.raises(RunError, match=r"rollout 0: the loss weights .* 2\.0+ .* 1"):
        children.run(Job(settings(), folder, [[doubled]]))


def test_an_advantage_that_is_not_a_number_ends_the_run(children, folder, samples):
    (shard,) = cut(samples)
    spoilt = replace(shard, columns_B={"advantages": np.full(12, math.nan, np.float32)})
    with pytest.raises(NonFiniteError, match=r"rollout 0: not finite.*: loss, pg_loss\..*--load"):
        children.run(Job(settings(), folder, [[spoilt]]))


# --- Checkpoints ------------------------------------------------------------------------------------------------------

FALLING = {"lr_decay_style": "linear", "lr_decay_iters": 8, "lr_warmup_iters": 1}


@pytest.mark.parametrize("bf16", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(children, folder, samples, tmp_path, bf16):
    job = Job(settings(model={"bf16": bf16}, algorithm=EVERYTHING, **FALLING), folder)
    rollout = cut(samples)
    (tmp_path / "saved").mkdir()
    (whole,) = children.run(replace(job, rollouts=[rollout] * 3))
    children.run(replace(job, rollouts=[rollout], save=tmp_path / "saved"))
    (resumed,) = children.run(replace(job, rollouts=[rollout] * 2, load=tmp_path / "saved"))
    assert resumed.metrics == whole.metrics[1:]
    assert equal(resumed.weights, whole.weights)


def test_a_resumed_run_follows_its_own_settings_from_the_step_it_resumes_at(children, folder, samples, tmp_path):
    job = Job(settings(lr=4e-3, lr_decay_style="linear"), folder, num_steps=4)
    rollout = cut(samples, num_steps=1)
    (tmp_path / "saved").mkdir()
    children.run(replace(job, rollouts=[rollout] * 2, save=tmp_path / "saved"))
    longer = replace(job, config=settings(lr=8e-3, min_lr=1e-3, lr_decay_style="linear"), num_steps=8)
    (found,) = children.run(replace(longer, rollouts=[rollout] * 2, load=tmp_path / "saved"))
    (expected,) = children.run(replace(longer, rollouts=[rollout] * 4))
    rates = [[metrics["train/lr"] for metrics in outcome.metrics] for outcome in (found, expected)]
    assert rates[0] == rates[1][2:]


@pytest.mark.parametrize("obstacle", [".metadata", "common.pt", "__0_0.distcp"])
def test_a_part_that_cannot_be_written_is_a_checkpoint_error(children, folder, tmp_path, obstacle):
    (tmp_path / "saved" / obstacle).mkdir(parents=True)  # stands where a file of the checkpoint has to go
    with pytest.raises(CheckpointError, match=rf"saved/{obstacle} .*Is a directory"):
        children.run(Job(settings(), folder, save=tmp_path / "saved"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_moe", tmp_path_factory.mktemp("mixture") / "model", vocab_size=48)


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved_in", "resumed_in"),
    [
        pytest.param(*layouts, id=" to ".join(layouts))
        for layouts in (
            *(("one rank", "TP2"), ("PP2", "TP2"), ("DP2", "one rank")),
            *(("EP2", "one rank"), ("one rank", "EP2"), ("EP2", "EP2")),
        )
    ],
)
def test_a_checkpoint_resumes_in_another_layout(children, folder, mixture, samples, tmp_path, saved_in, resumed_in):
    """Compared with going on in the layout of the first step. Adam's means weigh 0.9 and 0.95 in the second."""
    layouts = {"TP2": {"tensor": 2}, "PP2": {"pipeline": 2}, "EP2": {"expert": 2}}
    job = Job(settings(**FALLING), folder)
    if "EP2" in (saved_in, resumed_in):
        job = Job(settings(**FALLING), mixture, architecture="Qwen3MoeForCausalLM")
    (tmp_path / "saved").mkdir()

    def train(layout: str, rollouts: int, **options: Any) -> list[Outcome]:
        world_size = 1 if layout == "one rank" else 2
        shards = cut(samples, num_ranks=2) if layout in ("DP2", "EP2") else cut(samples) * world_size
        here = replace(job, rollouts=[shards] * rollouts, **layouts.get(layout, {}), **options)
        return children.run(here, world_size=world_size)

    whole, saved = train(saved_in, 2)[0], train(saved_in, 1, save=tmp_path / "saved")[0]
    loaded, resumed = (train(resumed_in, n, load=tmp_path / "saved")[0] for n in (0, 1))
    assert equal(loaded.weights, saved.weights)
    moved, found = distance(whole.weights, saved.weights), distance(resumed.weights, whole.weights)
    print(f"| {saved_in} | {resumed_in} | {moved:.1e} | {found:.1e} |")  # a row of docs/checkpoints.md
    assert found < NEAR < moved / 100


def test_a_run_starts_from_the_weights_of_a_torch_dist_folder(children, folder, samples, tmp_path):
    saved = tmp_path / "saved"
    saved.mkdir()
    (trained,) = children.run(Job(settings(), folder, [cut(samples)], save=saved))
    start = {"initial_megatron_checkpoint": saved}
    (started,) = children.run(Job(settings(model=start), folder))
    assert equal(started.weights, trained.weights)
    measured = {"use_kl_loss": True, "kl_loss_type": "k3"}
    divergences = [
        children.run(Job(settings(algorithm=measured, model=chosen, lr=0.0), folder, [cut(samples)]))[0].metrics[0]
        for chosen in (start, {**start, "ref_load": saved}, {"ref_load": saved}, {**start, "ref_load": folder})
    ]
    assert [metrics["train/kl_loss"] > 0 for metrics in divergences] == [False, False, True, True]


def test_a_missing_checkpoint_and_one_of_another_model_are_refused(children, folder, tmp_path):
    with pytest.raises(CheckpointError, match="absent cannot be loaded"):
        children.run(Job(settings(), folder, load=tmp_path / "absent"))
    (tmp_path / "saved").mkdir()
    children.run(Job(settings(), folder, save=tmp_path / "saved"))
    other = random_model(tmp_path / "wide", seed=0, hidden=64)
    with pytest.raises(CheckpointError, match="saved cannot be loaded"):
        children.run(Job(settings(), other, load=tmp_path / "saved"))
