"""Pixels travel from samples into the forward of a real model, in every layout: what trains is what plain torch trains.

The model is :mod:`tests.engines.pictures`; the measure is transformers' own Qwen3 with the projection added to its
embeddings, one sample at a time, and torch's AdamW.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle
from safetensors.torch import load_file, save_file

from slime_core.errors import RunError
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, Status, TrainBatch
from tests.engines import pictures, test_learner
from tests.engines.pictures import ARCHITECTURE, PATCH, PLACEHOLDER
from tests.engines.test_learner import (
    ADAM,
    ADVANTAGES,
    NEAR,
    TEMPERATURE,
    Children,
    Job,
    Outcome,
    Reference,
    distance,
    random_model,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(test_learner)

FAR = 100 * NEAR


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    found = Children()
    yield found
    found.stop()


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
    found = []
    for index in range(12):
        group, response = index // 4, int(random.integers(1, 9))
        prompt = [5, *[PLACEHOLDER] * (group + 1), 6, 7] if group < 2 else [8, 9, 10]
        one = Sample(
            group_index=group,
            index=index,
            tokens=[*prompt, *random.integers(0, PLACEHOLDER, response).tolist()],
            response_length=response,
            rollout_log_probs=[-3.0] * response,
            status=Status.COMPLETED,
        )
        if group < 2:
            patches = torch.from_numpy(random.normal(size=(group + 1, PATCH)).astype(np.float32))
            one.multimodal_train_inputs = {"pixel_values": patches}
        found.append(one)
    return found


class Seeing(Reference):
    """Transformers' Qwen3 with the projection."""

    def __init__(self, folder: Path, samples: list[Sample]) -> None:
        self.picture = torch.nn.Parameter(load_file(folder / "model.safetensors")["model.picture.weight"])
        super().__init__(folder, samples)
        decays = {"params": [self.picture], "weight_decay": ADAM["weight_decay"]}
        self.optimizer.add_param_group(decays)
        self.model.register_parameter("picture", self.picture)  # so that the norm of all gradients counts it

    def log_probs(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(sample.tokens)
        embedded = self.model.get_input_embeddings()(ids)
        if sample.multimodal_train_inputs is not None:
            seen = sample.multimodal_train_inputs["pixel_values"] @ self.picture.T
            embedded = embedded.index_add(0, (ids == PLACEHOLDER).nonzero()[:, 0], seen)
        logits_TV = self.model(inputs_embeds=embedded[None]).logits[0, sample.prompt_length - 1 : -1] / TEMPERATURE
        log_p_UV = logits_TV.log_softmax(-1)
        return log_p_UV.gather(1, ids[sample.prompt_length :, None])[:, 0], -(log_p_UV.exp() * log_p_UV).sum(-1)


@pytest.fixture(scope="module")
def expected(folder: Path, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """The weights after two optimizer steps of plain torch."""
    reference = Seeing(folder, samples)
    reference.step(range(6))
    reference.step(range(6, 12))
    weights = {name: weight.detach() for name, weight in reference.model.named_parameters()}
    return {"model.picture.weight" if name == "picture" else name: weight for name, weight in weights.items()}


def cut(samples: list[Sample], *, ranks: int = 1, max_tokens: int = 40) -> list[TrainBatch]:
    plan = BatchPlan(num_ranks=ranks, num_steps=2, max_tokens=max_tokens, share_prompts=True)
    return make_shards(samples, ADVANTAGES[: len(samples)], plan, rollout=0, temperature=TEMPERATURE)


def train(children: Children, folder: Path, shards: list[TrainBatch], *, ranks: int = 1, **how: Any) -> Outcome:
    config = test_learner.settings(algorithm=test_learner.EVERYTHING)
    plugin = {"plugins": (pictures.__file__,), "architecture": ARCHITECTURE}
    (found, *_) = children.run(Job(config, folder, [shards], **{**plugin, **how}), world_size=ranks)
    return found


@pytest.mark.parametrize("max_tokens", [1, 40, 1000])
def test_every_packing_trains_what_plain_torch_trains(
    children: Children, folder: Path, samples: list[Sample], expected: dict[str, torch.Tensor], max_tokens: int
) -> None:
    found = train(children, folder, cut(samples, max_tokens=max_tokens))
    assert distance(found.weights, expected) < NEAR
    start = load_file(folder / "model.safetensors")
    assert (found.weights["model.picture.weight"] - start["model.picture.weight"]).abs().max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("layout", ["data", "tensor", "sequence", "pipeline"])
def test_two_ranks_train_what_one_does(
    children: Children, folder: Path, samples: list[Sample], expected: dict[str, torch.Tensor], layout: str
) -> None:
    how: dict[str, Any] = {"data": {}, "sequence": {"tensor": 2, "sequence": True}}.get(layout, {layout: 2})
    shards = cut(samples, ranks=2) if layout == "data" else 2 * cut(samples)
    assert distance(train(children, folder, shards, ranks=2, **how).weights, expected) < NEAR


def test_another_order_of_samples_in_a_row_trains_the_same(
    children: Children, folder: Path, samples: list[Sample], expected: dict[str, torch.Tensor]
) -> None:
    (shard,) = cut(samples)
    reversed_steps = tuple(
        replace(step, micro_batches=tuple(micro[::-1] for micro in reversed(step.micro_batches)))
        for step in shard.steps
    )
    assert distance(train(children, folder, [replace(shard, steps=reversed_steps)]).weights, expected) < NEAR


def turned(shard: TrainBatch) -> TrainBatch:
    """The first group, where everyone has one patch, with the patches of one another."""
    pixels = shard.inputs["pixel_values"]
    order = [1, 2, 3, 0, *range(4, 12)]
    return replace(shard, inputs={"pixel_values": replace(pixels, starts_B=pixels.starts_B[order])})


def test_pixels_of_another_sample_are_far_out_of_bounds(
    children: Children, folder: Path, samples: list[Sample], expected: dict[str, torch.Tensor]
) -> None:
    (shard,) = cut(samples)
    assert distance(train(children, folder, [turned(shard)]).weights, expected) > FAR


def judged(children: Children, folder: Path, shard: TrainBatch) -> dict[str, float]:
    """Metrics of a critic that learns from ``shard``."""
    config = test_learner.settings(algorithm={"advantage_estimator": "ppo"})
    job = Job(config, folder, [[shard]], plugins=("ppo", pictures.__file__), architecture=ARCHITECTURE)
    return children.run(job)[0].metrics[0]


def test_a_critic_sees_what_the_actor_sees(children: Children, folder: Path, samples: list[Sample]) -> None:
    def rewarded(max_tokens: int) -> TrainBatch:
        plan = BatchPlan(num_ranks=1, num_steps=2, max_tokens=max_tokens)
        how = {"rewards_B": ADVANTAGES, "rollout": 0, "temperature": TEMPERATURE}
        return make_shards(samples, None, plan, **how)[0]

    together, alone = (judged(children, folder, rewarded(max_tokens)) for max_tokens in (1000, 1))
    for name in ("train/value_loss", "train/critic_grad_norm"):
        assert together[name] == pytest.approx(alone[name], rel=1e-5)
    swapped = judged(children, folder, turned(rewarded(1000)))
    assert swapped["train/critic_grad_norm"] != pytest.approx(together["train/critic_grad_norm"], rel=1e-3)


def test_a_model_that_takes_no_pixels_is_not_trained_without_them(
    children: Children, folder: Path, samples: list[Sample], tmp_path: Path
) -> None:
    blind = random_model(tmp_path, seed=0)
    with pytest.raises(RunError, match=r" pixel_values .*multimodal_train_inputs.* 'qwen3' of plugin 'models' "):
        train(children, blind, cut(samples), plugins=(), architecture="Qwen3ForCausalLM")


@pytest.mark.long
def test_parts_of_a_row_are_refused(children: Children, folder: Path, samples: list[Sample]) -> None:
    with pytest.raises(RunError, match=r"pixel_values .* context_parallel_size = 2"):
        train(children, folder, 2 * cut(samples), ranks=2, context=2)
