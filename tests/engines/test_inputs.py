"""Pixels travel from samples into the forward of a real model, in every layout: what trains is what plain torch trains.

The model is :mod:`tests.engines.pictures`; the measure is transformers' own Qwen3 with the projection added to its
embeddings, one sample at a time, and torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, Status, TrainBatch
from tests.engines import learners as shared
from tests.engines import pictures
from tests.engines.learners import (
    ADAM,
    ADVANTAGES,
    EVERYTHING,
    NEAR,
    TEMPERATURE,
    Learners,
    Outcome,
    distance,
    random_model,
    settings,
)
from tests.engines.pictures import ARCHITECTURE, PATCH, PLACEHOLDER
from tests.engines.test_learner import Reference

FAR = 100 * NEAR
cut = partial(shared.cut, share_prompts=True)
PICTURES = {"plugins": (pictures.__file__,), "architecture": ARCHITECTURE}
Train = Callable[..., list[Outcome]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 with the projection among its weights."""
    target = random_model(tmp_path_factory.mktemp("model"), seed=0)
    weights = load_file(target / "model.safetensors")
    torch.manual_seed(1)
    weights["model.picture.weight"] = torch.randn(32, PATCH)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Three groups of four. The prompts of a group are the same ids around placeholders, and their pictures differ;
    the last group sees nothing."""
    random = np.random.default_rng(0)
    samples = []
    for index in range(12):
        group, response = index // 4, int(random.integers(1, 9))
        prompt = [5, *[PLACEHOLDER] * (group + 1), 6, 7] if group < 2 else [8, 9, 10]
        sample = Sample(
            group_index=group,
            index=index,
            tokens=[*prompt, *random.integers(0, PLACEHOLDER, response).tolist()],
            response_length=response,
            rollout_log_probs=[-3.0] * response,
            status=Status.COMPLETED,
        )
        if group < 2:
            patches = torch.from_numpy(random.normal(size=(group + 1, PATCH)).astype(np.float32))
            sample.multimodal_train_inputs = {"pixel_values": patches}
        samples.append(sample)
    return samples


class Seeing(Reference):
    """Transformers' Qwen3 with the projection."""

    def __init__(self, folder: Path, samples: list[Sample]) -> None:
        self.picture = torch.nn.Parameter(load_file(folder / "model.safetensors")["model.picture.weight"])
        super().__init__(folder, samples)
        self.optimizer.add_param_group({"params": [self.picture], "weight_decay": ADAM["weight_decay"]})
        self.model.register_parameter("picture", self.picture)  # so that the norm of all gradients counts it

    def logits(self, sample: Sample) -> torch.Tensor:
        ids = torch.tensor(sample.tokens)
        embedded = self.model.get_input_embeddings()(ids)
        if sample.multimodal_train_inputs is not None:
            seen = sample.multimodal_train_inputs["pixel_values"] @ self.picture.T
            embedded = embedded.index_add(0, (ids == PLACEHOLDER).nonzero()[:, 0], seen)
        logits_TV: torch.Tensor = self.model(inputs_embeds=embedded[None]).logits[0]
        return logits_TV


@pytest.fixture(scope="module")
def expected(folder: Path, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """The weights after two optimizer steps of plain torch."""
    reference = Seeing(folder, samples)
    reference.step(range(6))
    reference.step(range(6, 12))
    weights = {name: weight.detach() for name, weight in reference.model.named_parameters()}
    weights["model.picture.weight"] = weights.pop("picture")
    return weights


@pytest.fixture
def train(learners: Learners, folder: Path) -> Train:
    return partial(learners.train, settings(algorithm=EVERYTHING), folder, **PICTURES)


@pytest.mark.parametrize("max_tokens", [1, 40, 1000])
def test_every_packing_trains_what_plain_torch_trains(train, folder, samples, expected, max_tokens) -> None:
    (outcome,) = train(cut(samples, max_tokens=max_tokens))
    assert distance(outcome.weights, expected) < NEAR
    start = load_file(folder / "model.safetensors")
    assert (outcome.weights["model.picture.weight"] - start["model.picture.weight"]).abs().max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2}], ids=lambda layout: "-".join(layout)
)
def test_two_ranks_train_what_one_does(train, samples, expected, layout) -> None:
    shards = 2 * cut(samples) if layout else cut(samples, num_ranks=2)
    assert distance(train(shards, ranks=2, **layout)[0].weights, expected) < NEAR


def test_another_order_of_samples_in_a_row_trains_the_same(train, samples, expected) -> None:
    (shard,) = cut(samples)
    steps = tuple(
        replace(step, micro_batches=tuple(micro[::-1] for micro in reversed(step.micro_batches)))
        for step in shard.steps
    )
    assert distance(train([replace(shard, steps=steps)])[0].weights, expected) < NEAR


def turned(shard: TrainBatch) -> TrainBatch:
    """The first group, where everyone has one patch, with the patches of one another."""
    pixels = shard.inputs["pixel_values"]
    order = [1, 2, 3, 0, *range(4, 12)]
    return replace(shard, inputs={"pixel_values": replace(pixels, starts_B=pixels.starts_B[order])})


def test_pixels_of_another_sample_are_far_out_of_bounds(train, samples, expected) -> None:
    (shard,) = cut(samples)
    assert distance(train([turned(shard)])[0].weights, expected) > FAR


def test_a_critic_sees_what_the_actor_sees(learners, folder, samples) -> None:
    def rewarded(max_tokens: int) -> TrainBatch:
        plan = BatchPlan(num_ranks=1, num_steps=2, max_tokens=max_tokens)
        how: Any = {"rewards_B": ADVANTAGES, "rollout": 0, "temperature": TEMPERATURE}
        return make_shards(samples, None, plan, **how)[0]

    def judged(shard: TrainBatch) -> dict[str, float]:
        """Metrics of a critic that learns from the shard."""
        config = settings(algorithm={"advantage_estimator": "ppo"})
        outcomes = learners.train(config, folder, [shard], **{**PICTURES, "plugins": ("ppo", pictures.__file__)})
        return outcomes[0].metrics[0]

    together, alone, swapped = map(judged, (rewarded(1000), rewarded(1), turned(rewarded(1000))))
    for name in ("train/value_loss", "train/critic_grad_norm"):
        assert together[name] == pytest.approx(alone[name], rel=1e-5)
    assert swapped["train/critic_grad_norm"] != pytest.approx(together["train/critic_grad_norm"], rel=1e-3)
