"""A plugin wraps the model that trains: what it adds trains, the model stays, and both leave as the plugin says."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import write_copies
from tests.engines.learners import KL, NEAR, Make, cut, distance, equal, settings, weights_of
from tests.third_party_site import ROOT

SOURCE = ROOT / "tests" / "third_party" / "acme-gain" / "src"
NORM = "model.norm.weight"


def gaining(make: Make, folder: Path, *, config: Any = None, **layout: Any) -> Any:
    """A learner with the plugin of ``tests/third_party/acme-gain``."""
    sys.path.insert(0, str(SOURCE))
    return make(config or settings(), folder, plugins=(f"{SOURCE / 'acme_gain' / '__init__.py'}",), **layout)


def trained(make: Make, folder: Path, shards: Any, **options: Any) -> Any:
    """Weights for engines before and after one rollout, and its metrics."""
    learner = gaining(make, folder, **options)
    before = weights_of(learner)
    metrics = learner.train(shards[make.rank])
    return before, weights_of(learner), metrics


def test_what_the_plugin_adds_trains_alone(learners, qwen3, samples) -> None:
    ((before, after, metrics),) = learners(partial(trained, folder=qwen3, shards=cut(samples)))
    assert metrics["train/grad_norm"] > 0
    assert {name for name in before if not torch.equal(before[name], after[name])} == {NORM}


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"tensor": 2, "sequence": True}], ids=str)
def test_two_ranks_train_it_as_one(learners, qwen3, samples, layout) -> None:
    ((_, expected, _),) = learners(partial(trained, folder=qwen3, shards=cut(samples)))
    shards = cut(samples) * 2 if layout else cut(samples, num_ranks=2)
    for _, after, _ in learners(partial(trained, folder=qwen3, shards=shards, **layout), ranks=2):
        assert distance(after, expected) < NEAR


def test_the_reference_needs_no_copy_and_equals_a_loaded_one(learners, qwen3, samples, tmp_path) -> None:
    copied = shutil.copytree(qwen3, tmp_path / "copied")

    def scenario(make: Make, model: Any) -> Any:
        learner = gaining(make, qwen3, config=settings(algorithm=KL, model=model))
        return [learner.train(cut(samples)[0]) for _ in range(2)]

    (free,) = learners(partial(scenario, model=None))
    (loaded,) = learners(partial(scenario, model={"ref_load": copied}))
    assert free == loaded
    assert free[1]["train/kl_loss"] > free[0]["train/kl_loss"] > 0


def test_a_checkpoint_holds_what_was_added_and_continues_exactly(learners, qwen3, samples, tmp_path) -> None:
    first, second = cut(samples), cut(samples, rollout=1)
    saved = tmp_path / "saved"

    def whole(make: Make) -> Any:
        learner = gaining(make, qwen3)
        learner.train(first[0])
        write_copies(learner.copy(saved))
        learner.write_hf(saved / "hf", list(learner.saved_weights()))
        learner.train(second[0])
        return weights_of(learner)

    def resumed(make: Make) -> Any:
        learner = gaining(make, qwen3)
        learner.load(saved)
        learner.train(second[0])
        return weights_of(learner)

    (expected,) = learners(whole)
    (continued,) = learners(resumed)
    assert equal(continued, expected)
    assert [file.name for file in (saved / "hf").iterdir()] == ["gain.txt"]
    from slime_core.checkpoint.sharded import StoredTensors

    assert list(StoredTensors(saved / "torch_dist").held) == ["acme_gain.gain_H"]
