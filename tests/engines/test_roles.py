"""Frozen models, frozen weights and an optimizer that is reset, in real learners."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_core.errors import ConfigError, NonFiniteError
from slime_core.types import Sample, TrainBatch
from tests.checkpoints import write_copies
from tests.engines.learners import (
    ADVANTAGES,
    KL,
    TEMPERATURE,
    Make,
    Weights,
    cut,
    distance,
    equal,
    random_model,
    settings,
    twelve_samples,
    weights_of,
)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return random_model(tmp_path_factory.mktemp("other"), seed=1)


def shard(rollout: int = 0, *, num_steps: int = 1, scale: float = 1.0) -> TrainBatch:
    """One rollout for one rank, one micro-batch a step."""
    advantages = scale * ADVANTAGES
    (only,) = cut(twelve_samples(), advantages, rollout=rollout, num_steps=num_steps, max_tokens=1000)
    return only


def trained(learner: Any, batch: TrainBatch) -> tuple[dict[str, float], int]:
    """The metrics of a rollout, and how many micro-batches went through the model for it."""
    passed: list[int] = []
    handle = learner.actor.chunks[0].register_forward_pre_hook(lambda *_: passed.append(1))
    metrics = learner.train(batch)
    handle.remove()
    return metrics, len(passed)


def test_only_columns_that_are_read_cost_a_pass(learners, qwen3, other) -> None:
    """One micro-batch a step; a rollout of two steps trains two and annotates two."""
    teacher = {"use_opd": True, "opd_teacher_load": other}

    def count(make: Make) -> list[list[int]]:
        passes = []
        for algorithm in ({}, KL, teacher, {**KL, **teacher}):
            learner = make(settings(algorithm=algorithm), qwen3)
            passes.append([trained(learner, shard())[1], trained(learner, shard(1, num_steps=2))[1]])
        return passes

    assert learners(count) == [[[1, 2 + 2], [2, 4 + 2], [2, 4 + 2], [3, 6 + 2]]]


def test_a_reference_that_changes_is_saved_and_resumed_bit_for_bit(learners, qwen3, tmp_path) -> None:
    plain, refreshed = tmp_path / "plain", settings(algorithm={**KL, "ref_update_interval": 2})

    def resume(make: Make) -> tuple[list[dict[str, float]], dict[str, float], bool]:
        learner, metrics = make(refreshed, qwen3), []
        for rollout in range(4):
            if rollout == 3:
                before = weights_of(learner)
                write_copies(learner.copy(tmp_path))
                untouched = equal(before, weights_of(learner))
            metrics.append(learner.train(shard(rollout)))
        learner = make(refreshed, qwen3)
        learner.load(tmp_path)
        resumed = learner.train(shard(3))
        write_copies(make(settings(algorithm=KL), qwen3).copy(plain))
        return metrics, resumed, untouched

    ((metrics, resumed, untouched),) = learners(resume)
    divergences = [row["train/kl_loss"] for row in metrics]
    assert divergences[0] == divergences[2] == 0.0  # the start, and the copy made after two rollouts
    assert min(divergences[1], divergences[3]) > 1e-6
    assert resumed == metrics[3]
    assert untouched
    assert os.listdir(tmp_path / "roles") == ["reference"]
    assert not (plain / "roles").exists()  # the start weights, which nothing changes


def test_old_log_probs_are_those_of_the_published_actor(learners, qwen3) -> None:
    """Published before rollouts 0 and 2, as with an interval of 2."""

    def measure(make: Make) -> list[list[tuple[float, int]]]:
        by_setting = []
        for keeps in (True, False):
            learner, rollouts = make(settings(algorithm={"keep_old_actor": keeps}), qwen3), []
            for rollout in range(3):
                if rollout % 2 == 0:
                    learner.published(rollout)
                metrics, passes = trained(learner, shard(rollout))
                rollouts.append((metrics["train/ppo_kl"], passes))
            by_setting.append(rollouts)
        return by_setting

    ((kept, current),) = learners(measure)
    assert current == [(0.0, 1)] * 3
    assert kept[0] == kept[2] == (0.0, 1)  # the copy is the actor: no pass for it
    moved, passes = kept[1]
    assert abs(moved) > 1e-4
    assert passes == 2


# --- Teacher ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def log_probs(folder: Path, samples: list[Sample]) -> list[torch.Tensor]:
    """By transformers, of every sample's response."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    by_sample = []
    for sample in samples:
        ids = torch.tensor(sample.tokens)
        logits_TV = model(ids[None]).logits[0, sample.prompt_length - 1 : -1] / TEMPERATURE
        by_sample.append(logits_TV.log_softmax(-1).gather(1, ids[sample.prompt_length :, None])[:, 0])
    return by_sample


def test_the_divergence_from_the_teacher_is_that_of_transformers(learners, qwen3, other) -> None:
    def distil(make: Make) -> tuple[dict[str, float], bool]:
        config = settings(algorithm={"use_opd": True, "opd_teacher_load": other, "opd_kl_coef": 0.5})
        learner = make(config, qwen3)
        before = weights_of(learner)
        return learner.train(shard(scale=0.0)), equal(before, weights_of(learner))

    ((metrics, unchanged),) = learners(distil)
    samples = [sample for sample in twelve_samples() if not sample.remove_sample]
    masks = [torch.tensor(sample.loss_mask or [1] * sample.response_length).bool() for sample in samples]
    pairs = zip(log_probs(qwen3, samples), log_probs(other, samples), masks, strict=True)
    expected = np.mean([(student - teacher)[mask].mean().item() for student, teacher, mask in pairs])
    assert metrics["train/opd_reverse_kl"] == pytest.approx(float(expected), rel=1e-4)
    assert not unchanged  # with advantages of 0, the teacher alone teaches


def test_a_teacher_that_computes_differently_is_refused(learners, qwen3, tmp_path) -> None:
    """The weights have the same shapes; only the base of the rotary positions differs."""
    random_model(tmp_path, seed=1, rope_theta=77.0)
    with pytest.raises(ConfigError, match=r"rope_parameters = .*77\.0"):
        learners.train(settings(algorithm={"use_opd": True, "opd_teacher_load": tmp_path}), qwen3)


# --- Freezing ---------------------------------------------------------------------------------------------------------

FROZEN = settings(freeze_params_name_list=("embedding", r"layers\.0\."))
"""All of the first of two pipeline stages."""


def moved(start: Weights, end: Weights) -> set[str]:
    return {name for name in start if not torch.equal(start[name], end[name])}


def test_only_the_chosen_weights_change_and_a_resume_is_exact(learners, qwen3, tmp_path) -> None:
    config = settings(only_train_params_name_list=(r"layers\.1\.mlp", "final_layernorm"))

    def train(make: Make) -> tuple[set[str], bool]:
        learner = make(config, qwen3)
        start = weights_of(learner)
        learner.train(shard())
        write_copies([learner.actor.copy(tmp_path / "torch_dist")])
        learner.train(shard(1))
        end = weights_of(learner)
        learner = make(config, qwen3)
        learner.actor.load(tmp_path / "torch_dist")
        learner.train(shard(1))
        return moved(start, end), equal(end, weights_of(learner))

    ((changed, exact),) = learners(train)
    parts = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert changed == {f"model.layers.1.{part}.weight" for part in parts} | {"model.norm.weight"}
    assert exact


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_rank_that_trains_nothing_keeps_up(learners, tmp_path, tied) -> None:
    """Untied, and tied, where the last stage holds a copy of what the first one froze."""
    model, saved = random_model(tmp_path / "model", seed=2, tie_word_embeddings=tied), tmp_path / "torch_dist"
    saved.mkdir()

    def train(make: Make) -> tuple[set[str], Weights, list[float], bool]:
        layout = {"pipeline": make.num_ranks}
        learner = make(FROZEN, model, **layout)
        start, norms = weights_of(learner), [learner.train(shard())["train/grad_norm"]]
        if make.num_ranks == 2:
            write_copies([learner.actor.copy(saved)])
        if learner.offload() == 0:
            raise AssertionError("nothing was given away")
        learner.onload()
        norms.append(learner.train(shard(1))["train/grad_norm"])
        end = weights_of(learner)
        if make.num_ranks == 2:
            learner = make(FROZEN, model, **layout)
            learner.actor.load(saved)
            learner.train(shard(1))
        return moved(start, end), end, norms, equal(end, weights_of(learner))

    ((changed, end, norms, _),) = learners(train)
    for split_changed, split_end, split_norms, exact in learners(train, ranks=2):
        assert exact
        assert split_changed == changed
        assert distance(split_end, end) < 1e-5
        assert split_norms == pytest.approx(norms, rel=1e-5)
    assert "model.embed_tokens.weight" not in changed
    assert not any(name.startswith("model.layers.0.") for name in changed)
    assert ("lm_head.weight" in changed) is not tied


def test_a_reset_optimizer_is_a_new_one_in_each_rollout(learners, qwen3) -> None:
    def train(make: Make) -> list[float]:
        def second_rollout(**optimizer: Any) -> Any:
            learner = make(settings(**optimizer), qwen3)
            learner.train(shard())
            return learner

        forgetful = second_rollout(reset_optimizer_states=True)
        between = weights_of(forgetful)
        halfway = [parameter.detach().clone() for parameter in forgetful.actor.chunks[0].parameters()]
        forgetful.train(shard(1, num_steps=2))
        end = weights_of(forgetful)
        plain = second_rollout()
        plain.train(shard(1, num_steps=2))
        kept = weights_of(plain)
        fresh = make(settings(), qwen3)
        with torch.no_grad():
            for parameter, value in zip(fresh.actor.chunks[0].parameters(), halfway, strict=True):
                parameter.copy_(value)
        same_start = distance(between, weights_of(fresh))
        fresh.train(shard(1, num_steps=2))
        return [same_start, distance(end, weights_of(fresh)), distance(end, kept)]

    ((same_start, from_fresh, from_kept),) = learners(train)
    assert same_start == from_fresh == 0.0
    assert from_kept > 1e-4


# --- What is not finite -----------------------------------------------------------------------------------------------


def test_a_step_that_spoils_the_weights_ends_the_run(learners, qwen3) -> None:
    with pytest.raises(NonFiniteError, match=r"rollout 5: .* \d+ weights "):
        learners.train(settings(lr=3.3e38, weight_decay=1.0, adam_beta1=0.0), qwen3, [shard(5)])


def test_a_gradient_that_is_not_finite_ends_the_run(learners, qwen3) -> None:
    def train(make: Make) -> None:
        learner = make(settings(), qwen3)
        learner.actor.chunks[0].decoder.final_layernorm.weight.register_hook(lambda gradient: gradient * math.nan)
        learner.train(shard(5))

    with pytest.raises(NonFiniteError, match=r"rollout 5: .*grad_norm"):
        learners(train)


@pytest.mark.parametrize("column", ["kl_loss", "opd_reverse_kl"])
def test_a_frozen_model_with_weights_that_are_not_finite_ends_the_run(learners, qwen3, tmp_path, column) -> None:
    """Nothing is trained by it, also where the divergence is only measured."""
    from safetensors.torch import load_file, save_file

    file = random_model(tmp_path, seed=1) / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    measured = settings(algorithm={"use_kl_loss": True}, model={"ref_load": tmp_path})
    taught = settings(algorithm={"use_opd": True, "opd_teacher_load": tmp_path})
    with pytest.raises(NonFiniteError, match=rf"rollout 5: .*{column}"):
        learners.train(measured if column == "kl_loss" else taught, qwen3, [shard(5)])
