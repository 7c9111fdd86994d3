"""The learner, on one and on two ranks, against Hugging Face and torch's AdamW on the same batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_core.config.engines import MegatronConfig
from slime_core.config.learning import LearnerConfig
from slime_core.errors import CheckpointError, NonFiniteError, PluginError, RunError
from slime_core.rollout.shards import loss_masks
from slime_core.types import Sample, TrainBatch
from tests.engines.families import write
from tests.engines.learners import (
    ADAM,
    ADVANTAGES,
    EVERYTHING,
    LAST_BITS,
    NEAR,
    TEMPERATURE,
    Outcome,
    Weights,
    cut,
    distance,
    equal,
    random_model,
    settings,
)


def start_weights(folder: Path) -> Weights:
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

    def logits(self, sample: Sample) -> torch.Tensor:
        logits_TV: torch.Tensor = self.model(torch.tensor(sample.tokens)[None]).logits[0]
        return logits_TV

    def log_probs(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(sample.tokens)
        log_p_UV = (self.logits(sample)[sample.prompt_length - 1 : -1] / TEMPERATURE).log_softmax(-1)
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
def alone(learners, qwen3, samples) -> Outcome:
    """One rank, one rollout of two steps, every term of the loss."""
    (outcome,) = learners.train(settings(algorithm=EVERYTHING), qwen3, cut(samples))
    return outcome


def test_two_steps_equal_hugging_face_and_adamw(qwen3, samples, alone) -> None:
    reference = Reference(qwen3, samples)
    first, second = reference.step(range(6)), reference.step(range(6, 12))
    (metrics,) = alone.metrics
    assert min(first["grad_norm"], second["grad_norm"]) > ADAM["clip_grad"]  # the clipping is part of the comparison
    assert second["kl_loss"] > 1e-3  # and so is a ratio other than 1
    for name in ("loss", "grad_norm", "kl_loss", "entropy_loss"):
        assert metrics[f"train/{name}"] == pytest.approx((first[name] + second[name]) / 2, rel=1e-5, abs=1e-7), name
    expected = {name: parameter.detach() for name, parameter in reference.model.named_parameters()}
    assert distance(start_weights(qwen3), expected) > 1e-3
    assert distance(alone.weights, expected) < NEAR


# --- What must not matter ---------------------------------------------------------------------------------------------


def test_a_learner_that_is_offloaded_between_steps_trains_the_same_bit_for_bit(learners, qwen3, samples) -> None:
    train = partial(learners.train, settings(algorithm=EVERYTHING), qwen3, cut(samples), cut(samples))
    (stayed,), (moved,) = train(), train(offloads=True)
    assert equal(stayed.weights, moved.weights)
    assert moved.metrics == stayed.metrics
    parameters = sum(weight.numel() for weight in moved.weights.values())
    # Weights and gradients from the start, and Adam's two moments once it has stepped; 4 bytes each.
    assert moved.offloaded_bytes[0] >= 8 * parameters
    assert moved.offloaded_bytes[1] >= 16 * parameters


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


@dataclass(frozen=True)
class Variant:
    """Another way to train the same samples."""

    layout: dict[str, Any] = field(default_factory=dict)
    max_tokens: tuple[int, ...] = (40,)
    learner: LearnerConfig | None = None
    before: Callable[[], None] | None = None

    def shards(self, samples: Sequence[Sample]) -> list[TrainBatch]:
        """By rank: a data rank for each packing, or two ranks that share a model."""
        ranks = len(self.max_tokens)
        by_rank = [cut(samples, num_ranks=ranks, max_tokens=most)[rank] for rank, most in enumerate(self.max_tokens)]
        return by_rank * 2 if self.layout else by_rank


SEQUENCE = {"tensor": 2, "sequence": True}
IN_CHUNKS = Variant(learner=LearnerConfig(fp32_lm_head=True, log_probs_chunk_size=6))
ENGINE = Variant(learner=LearnerConfig(transformer_impl="transformer_engine"), before=stand_in_transformer_engine)
VARIANTS = {
    "a sample a row": Variant(max_tokens=(1,)),
    "all samples in one row": Variant(max_tokens=(1000,)),
    "two ranks": Variant(max_tokens=(40, 40)),
    "ranks with different numbers of micro-batches": Variant(max_tokens=(1, 1000)),
    "logits by chunks": IN_CHUNKS,
    "logits by chunks, TP2": replace(IN_CHUNKS, layout={"tensor": 2}),
    "logits by chunks, TP2 SP": replace(IN_CHUNKS, layout=SEQUENCE),
    "logits by chunks, PP2": replace(IN_CHUNKS, layout={"pipeline": 2}),
    "layers of TransformerEngine": ENGINE,
    "layers of TransformerEngine, TP2 SP": replace(ENGINE, layout=SEQUENCE),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_packing_ranks_chunks_and_kernels_do_not_change_the_training(learners, qwen3, samples, alone, variant) -> None:
    shards = variant.shards(samples)
    config = settings(algorithm=EVERYTHING, learner=variant.learner)
    first, *others = learners.train(config, qwen3, shards, ranks=len(shards), before=variant.before, **variant.layout)
    assert all(other.metrics == first.metrics and equal(other.weights, first.weights) for other in others)
    assert first.metrics[0] == pytest.approx(alone.metrics[0], rel=1e-5, abs=LAST_BITS)
    assert distance(first.weights, alone.weights) < NEAR


def test_a_checkpoint_of_transformer_engines_layers_resumes_with_local_ones(learners, qwen3, samples, tmp_path) -> None:
    config = settings(algorithm=EVERYTHING, learner=ENGINE.learner)
    (saved,) = learners.train(config, qwen3, cut(samples), save=tmp_path, before=ENGINE.before)
    (resumed,) = learners.train(settings(algorithm=EVERYTHING), qwen3, load=tmp_path)
    assert equal(resumed.weights, saved.weights)


def test_with_a_learning_rate_of_zero_the_weights_stay_bit_for_bit(learners, qwen3, samples) -> None:
    (outcome,) = learners.train(settings(lr=0.0), qwen3, cut(samples))
    assert equal(outcome.weights, start_weights(qwen3))
    assert outcome.metrics[0]["train/grad_norm"] > 0


def test_a_step_without_a_trained_token_changes_nothing(learners, qwen3, samples) -> None:
    masked = [replace(sample, remove_sample=True) for sample in samples]
    (outcome,) = learners.train(settings(weight_decay=0.0), qwen3, cut(masked))
    assert equal(outcome.weights, start_weights(qwen3))
    assert outcome.metrics[0]["train/loss"] == outcome.metrics[0]["train/grad_norm"] == 0.0


# --- Settings ---------------------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_from_the_first_step_and_then_falls(learners, qwen3, samples) -> None:
    config = settings(lr=4e-3, min_lr=1e-3, lr_warmup_iters=2, lr_decay_style="linear", lr_decay_iters=5)
    (outcome,) = learners.train(config, qwen3, *[cut(samples, num_steps=1)] * 6)
    rates = [metrics["train/lr"] for metrics in outcome.metrics]
    assert rates == pytest.approx([2e-3, 4e-3, 3e-3, 2e-3, 1e-3, 1e-3])


def test_megatrons_own_flags_reach_its_optimizer_and_its_model(learners, qwen3, samples) -> None:
    flags = [MegatronConfig(given=(flag,)) for flag in (("decoupled_lr", 0.0), ("recompute_granularity", "full"))]
    decoupled, full = (settings().model_copy(update={"megatron": megatron}) for megatron in flags)
    (outcome,) = learners.train(decoupled, qwen3, cut(samples))
    start = start_weights(qwen3)
    moved = {name for name in start if not torch.equal(start[name], outcome.weights[name])}
    assert start.keys() - moved == {"model.embed_tokens.weight", "lm_head.weight"}
    with pytest.raises(PluginError, match="recompute_method"):  # without which Megatron refuses to recompute
        learners.train(full, qwen3)


def test_the_reference_is_the_start_and_stays_there(learners, qwen3, samples) -> None:
    measured = {"use_kl_loss": True, "kl_loss_coef": 0.0, "kl_loss_type": "k3"}
    with_reference, without = (
        learners.train(settings(algorithm=algorithm), qwen3, *[cut(samples, num_steps=1)] * 3)[0]
        for algorithm in (measured, {})
    )
    divergences = [metrics["train/kl_loss"] for metrics in with_reference.metrics]
    assert divergences[0] == 0.0
    assert 1e-6 < divergences[1] < divergences[2]
    assert equal(with_reference.weights, without.weights)  # a measured divergence changes nothing


def test_another_reference_leaves_the_actor_as_it_is(learners, qwen3, samples, tmp_path) -> None:
    other = random_model(tmp_path, seed=1)
    config = settings(algorithm={"use_kl_loss": True, "kl_loss_type": "k3"}, model={"ref_load": other}, lr=0.0)
    (outcome,) = learners.train(config, qwen3, cut(samples))
    assert outcome.metrics[0]["train/kl_loss"] > 0.1
    assert equal(outcome.weights, start_weights(qwen3))


@pytest.mark.parametrize("fp32_lm_head", [False, True])
def test_bfloat16_trains_close_to_float32(learners, qwen3, samples, fp32_lm_head) -> None:
    rollouts = [cut(samples, num_steps=1)] * 3
    (exact,) = learners.train(settings(), qwen3, *rollouts)
    config = settings(model={"bf16": True}, learner=LearnerConfig(fp32_lm_head=fp32_lm_head))
    (rounded,) = learners.train(config, qwen3, *rollouts)
    for a, b in zip(exact.metrics, rounded.metrics, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], abs=0.02)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=0.05)
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in rounded.weights.values())
    assert 1e-3 < distance(rounded.weights, start_weights(qwen3)) < 0.05


# --- Mistakes ---------------------------------------------------------------------------------------------------------


def test_loss_weights_that_do_not_add_up_to_one_are_refused(learners, qwen3, samples) -> None:
    (shard,) = cut(samples)
    with pytest.raises(RunError, match=r"rollout 0: .* 2\.0+ .* 1"):
        learners.train(settings(), qwen3, [replace(shard, loss_weights_B=2 * shard.loss_weights_B)])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_advantage_that_is_not_finite_ends_the_run(learners, qwen3, samples, value) -> None:
    (shard,) = cut(samples)
    spoilt = replace(shard, columns_B={"advantages": np.full(12, value, np.float32)})
    with pytest.raises(NonFiniteError, match=r"rollout 0: .*pg_loss"):
        learners.train(settings(), qwen3, [spoilt])


# --- Checkpoints ------------------------------------------------------------------------------------------------------

FALLING = {"lr_decay_style": "linear", "lr_decay_iters": 8, "lr_warmup_iters": 1}


@pytest.mark.parametrize("bf16", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(learners, qwen3, samples, tmp_path, bf16) -> None:
    config, rollout = settings(model={"bf16": bf16}, algorithm=EVERYTHING, **FALLING), cut(samples)
    (uninterrupted,) = learners.train(config, qwen3, *[rollout] * 3)
    learners.train(config, qwen3, rollout, save=tmp_path)
    (resumed,) = learners.train(config, qwen3, *[rollout] * 2, load=tmp_path)
    assert resumed.metrics == uninterrupted.metrics[1:]
    assert equal(resumed.weights, uninterrupted.weights)


def test_a_resumed_run_follows_its_own_settings_from_the_step_it_resumes_at(learners, qwen3, samples, tmp_path) -> None:
    rollout = cut(samples, num_steps=1)
    first = settings(lr=4e-3, lr_decay_style="linear", lr_decay_iters=4)
    longer = settings(lr=8e-3, min_lr=1e-3, lr_decay_style="linear", lr_decay_iters=8)
    learners.train(first, qwen3, *[rollout] * 2, save=tmp_path)
    (resumed,) = learners.train(longer, qwen3, *[rollout] * 2, load=tmp_path)
    (expected,) = learners.train(longer, qwen3, *[rollout] * 4)
    rates = [[metrics["train/lr"] for metrics in outcome.metrics] for outcome in (resumed, expected)]
    assert rates[0] == rates[1][2:]


@pytest.mark.parametrize("obstacle", [".metadata", "common.pt", "__0_0.distcp"])
def test_a_part_that_cannot_be_written_is_a_checkpoint_error(learners, qwen3, tmp_path, obstacle) -> None:
    (tmp_path / "saved" / obstacle).mkdir(parents=True)  # stands where a file of the checkpoint has to go
    with pytest.raises(CheckpointError, match=f"saved/{obstacle}"):
        learners.train(settings(), qwen3, save=tmp_path / "saved")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_moe", tmp_path_factory.mktemp("mixture") / "model", vocab_size=48)


LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "DP2": {},
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "EP2": {"expert": 2},
}
PAIRS = ["one rank to TP2", "PP2 to TP2", "DP2 to one rank", "EP2 to one rank", "one rank to EP2", "EP2 to EP2"]


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS)
def test_a_checkpoint_resumes_in_another_layout(learners, qwen3, mixture, samples, tmp_path, pair) -> None:
    """Compared with going on in the layout of the first step. Adam's means weigh 0.9 and 0.95 in the second."""
    saved_in, resumed_in = pair.split(" to ")
    model, architecture = (mixture, "Qwen3MoeForCausalLM") if "EP2" in pair else (qwen3, "Qwen3ForCausalLM")

    def train(layout: str, rollouts: int, **files: Path) -> Outcome:
        ranks = 1 if layout == "one rank" else 2
        shards = cut(samples, num_ranks=2) if layout in ("DP2", "EP2") else cut(samples) * ranks
        how = {"ranks": ranks, "architecture": architecture, **LAYOUTS[layout], **files}
        outcome: Outcome = learners.train(settings(**FALLING), model, *[shards] * rollouts, **how)[0]
        return outcome

    whole, saved = train(saved_in, 2), train(saved_in, 1, save=tmp_path)
    loaded, resumed = (train(resumed_in, rollouts, load=tmp_path) for rollouts in (0, 1))
    assert equal(loaded.weights, saved.weights)
    moved, apart = distance(whole.weights, saved.weights), distance(resumed.weights, whole.weights)
    print(f"| {saved_in} | {resumed_in} | {moved:.1e} | {apart:.1e} |")  # a row of docs/checkpoints.md
    assert apart < NEAR < moved / 100


def test_a_run_starts_from_the_weights_of_a_torch_dist_folder(learners, qwen3, samples, tmp_path) -> None:
    (trained,) = learners.train(settings(), qwen3, cut(samples), save=tmp_path)
    start = {"initial_megatron_checkpoint": tmp_path}
    (started,) = learners.train(settings(model=start), qwen3)
    assert equal(started.weights, trained.weights)
    measured = {"use_kl_loss": True, "kl_loss_type": "k3"}
    divergences = [
        learners.train(settings(algorithm=measured, model=model, lr=0.0), qwen3, cut(samples))[0].metrics[0]
        for model in (start, {**start, "ref_load": tmp_path}, {"ref_load": tmp_path}, {**start, "ref_load": qwen3})
    ]
    assert [metrics["train/kl_loss"] > 0 for metrics in divergences] == [False, False, True, True]


def test_a_missing_checkpoint_and_one_of_another_model_are_refused(learners, qwen3, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="absent"):
        learners.train(settings(), qwen3, load=tmp_path / "absent")
    saved = tmp_path / "saved"
    saved.mkdir()
    learners.train(settings(), qwen3, save=saved)
    with pytest.raises(CheckpointError, match="saved"):
        learners.train(settings(), random_model(tmp_path / "wide", seed=0, hidden_size=64), load=saved)
