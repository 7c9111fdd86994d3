from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime_core.config.learning import CriticConfig
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.errors import ConfigError, NonFiniteError
from slime_core.learner import LearnerSettings
from slime_core.learner.checks import require_finite_weights, require_same_model
from slime_core.learner.critic import Critic, CriticRank
from slime_core.learner.trained_model import NamedSpec

MODEL = ARITHMETIC / "model"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 1])
def test_a_weight_that_is_not_finite_is_named(bad, dtype, place):
    chunks = [torch.nn.Linear(3, 3).to(dtype), torch.nn.Linear(3, 3).to(dtype)]
    with torch.no_grad():
        chunks[place].weight[1, 2] = bad
    with pytest.raises(NonFiniteError, match=r"rollout 4: .* 1 weights .*, weight among .*--lr,"):
        require_finite_weights(chunks, rollout=4)


@pytest.mark.parametrize("largest", [0.0, 1.0, 3e38])
def test_large_weights_are_still_finite(largest):
    """The sum of their squares may not be."""
    chunk = torch.nn.Linear(40, 40)
    torch.nn.init.constant_(chunk.weight, largest)
    require_finite_weights([chunk], rollout=0)


def test_a_separate_critic_checks_its_weights_before_a_rollout_ends(monkeypatch):
    rank: Any = object.__new__(CriticRank)
    critic: Any = object.__new__(Critic)
    chunk = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(chunk.bias, math.nan)
    critic.trained = SimpleNamespace(chunks=[chunk], finish_gather=lambda: None)
    critic.step = lambda micro_batches, rollout: {}
    rank.critic, rank._device = critic, "cpu"
    rank._steps, rank._shards, rank._places = [[]], [SimpleNamespace(rollout=4)], []
    monkeypatch.setattr("slime_core.learner.critic.gather_tokens", lambda *_: np.zeros(0, np.float32))
    with pytest.raises(NonFiniteError, match=r"rollout 4: .* 1 weights .*critic .*, bias among .*--critic-lr,"):
        rank.fit([])


# --- The same model ---------------------------------------------------------------------------------------------------


def changed(folder: Path, **fields: object) -> Path:
    described = json.loads((MODEL / "config.json").read_text(encoding="utf-8")) | fields
    given = {name: value for name, value in described.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(given), encoding="utf-8")
    return folder


def test_fields_about_saving_do_not_change_the_model(tmp_path):
    require_same_model(changed(tmp_path, dtype="bfloat16", use_cache=False, eos_token_id=1), MODEL, role="teacher")


def test_a_field_that_is_left_out_has_its_default(tmp_path):
    """Weights of the same shapes would load and make other log-probabilities."""
    folder = changed(tmp_path, rope_parameters=None, rope_theta=77.0)
    with pytest.raises(ConfigError, match=rf"^the teacher of {folder} .*rope_parameters = {{'rope_theta': 77\.0, "):
        require_same_model(folder, MODEL, role="teacher")
    config = RunConfig(critic=CriticConfig(critic_load=folder))
    with pytest.raises(ConfigError, match=rf"^the critic of {folder} (?s:.*)config\.json"):
        Critic(NamedSpec(None, "a spec"), settings=LearnerSettings(config, MODEL, "Toy", "clipped", 1))
