"""Frozen weights in real models: gradients and optimizer state of the other weights do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from slime_core.config.learning import OptimizerConfig
from slime_core.learner.micro_batches import MicroBatch, make_micro_batches
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample
from tests.checkpoints import write_copies
from tests.engines.families import build, write
from tests.processes import runs

# Megatron warns about its own calls between its own modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

FAMILY = "qwen3_moe"
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(FAMILY, tmp_path_factory.mktemp("model"))


def micro_batch() -> MicroBatch:
    tokens = np.random.default_rng(0).integers(0, 16, 12).tolist()
    sample = Sample(index=0, tokens=tokens, response_length=4, rollout_log_probs=[-1.0] * 4)
    plan = BatchPlan(num_ranks=1, max_tokens=16)
    (shard,) = make_shards([sample], np.ones(1, np.float32), plan, rollout=0, temperature=1.0)
    return make_micro_batches(shard)[0][0]


def gradients(folder: Path, layout: Any, *, only: list[str], **overrides: Any) -> dict[str, torch.Tensor]:
    """Of the summed log-probabilities of one token, by name; of parameters that train and have one."""
    from slime_core.learner.trained_model import freeze

    _, (chunk,) = build(FAMILY, folder, layout, **overrides)
    freeze([chunk], only=only)
    chunk.train()
    micro = micro_batch()
    logits = chunk(micro.tokens_1T, micro.position_ids_1T, None, packed_seq_params=micro.packed_sequence)
    logits.log_softmax(-1)[..., 3].sum().backward()
    return {name: part.grad for name, part in chunk.named_parameters() if part.grad is not None}


@pytest.mark.parametrize("recomputed", [FULL, PARTS], ids=["full", "selective"])
def test_recomputed_layers_after_a_frozen_embedding_have_their_gradients(megatron, folder, recomputed):
    expected = gradients(folder, megatron, only=[r"\.mlp\."])
    found = gradients(folder, megatron, only=[r"\.mlp\."], **recomputed)
    assert len(expected) == 3 * (1 + 2 * 8)  # in each layer a router, and two matrices of each expert
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


class Experts:
    """A mixture of which the experts alone train; they have an optimizer of their own, as where ranks share them."""

    def __init__(self, folder: Path, layout: Any) -> None:
        from slime_core.learner.optimizer import build_optimizer, build_schedule, wrap
        from slime_core.learner.trained_model import freeze

        settings = OptimizerConfig(lr=1e-3)
        _, self.chunks = build(FAMILY, folder, layout)
        for name, part in self.chunks[0].named_parameters():
            part.allreduce = ".experts." not in name
        freeze(self.chunks, only=[r"\.experts\."])
        self._model = wrap(self.chunks, bf16=False)
        self.optimizer = build_optimizer(self._model, settings, bf16=False)
        self.schedule = build_schedule(self.optimizer, settings, num_steps=4)

    def step(self, gradient: float) -> None:
        for part in self.chunks[0].parameters():
            if part.requires_grad:
                part.main_grad.fill_(gradient)
        self.optimizer.step()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: part.detach().clone() for name, part in self.chunks[0].named_parameters()}

    @property
    def state(self) -> dict[str, Any]:
        return {"chunks": self.chunks, "optimizer": self.optimizer, "schedule": self.schedule}


@pytest.mark.filterwarnings("ignore")  # Megatron warns of a part without weights, torch of Megatron's calls
def test_experts_that_train_alone_are_saved_and_resumed_exactly(megatron, folder, tmp_path):
    from slime_core.checkpoint import sharded

    first, second = Experts(folder, megatron), Experts(folder, megatron)
    start = first.weights
    first.step(1.0)
    write_copies([sharded.copy(tmp_path, **first.state)])
    first.step(-0.5)
    sharded.load(tmp_path, **second.state)
    second.step(-0.5)
    changed = {name for name, part in first.weights.items() if not torch.equal(part, start[name])}
    assert changed == {name for name in start if ".experts." in name}
    assert all(torch.equal(part, first.weights[name]) for name, part in second.weights.items())


@pytest.mark.filterwarnings("ignore")  # torch warns of Megatron's calls
def test_saving_leaves_no_process(megatron, folder, tmp_path):
    from slime_core.checkpoint import sharded

    before = psutil.Process().children()
    write_copies([sharded.copy_weights(tmp_path / "weights", chunks=build(FAMILY, folder, megatron)[1])])
    assert [child for child in psutil.Process().children() if child not in before and runs(child)] == []
