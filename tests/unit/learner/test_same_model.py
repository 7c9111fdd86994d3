from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.learning import CriticConfig
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.errors import ConfigError
from slime_core.learner import LearnerSettings
from slime_core.learner.checks import require_same_model
from slime_core.learner.critic import Critic
from slime_core.learner.trained_model import NamedSpec

MODEL = ARITHMETIC / "model"


def changed(folder: Path, **fields: object) -> Path:
    described = json.loads((MODEL / "config.json").read_text(encoding="utf-8")) | fields
    given = {name: value for name, value in described.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(given), encoding="utf-8")
    return folder


def test_fields_about_saving_do_not_change_the_model(tmp_path):
    require_same_model(changed(tmp_path, dtype="bfloat16", use_cache=False, eos_token_id=1), MODEL, role="teacher")


def test_a_field_that_is_left_out_has_its_default(tmp_path):
    """Weights of the same shapes would load and make other log-probabilities."""
    with pytest.raises(ConfigError, match=rf"^the teacher of {tmp_path} .*rope_parameters = {{'rope_theta': 77\.0, "):
        require_same_model(changed(tmp_path, rope_parameters=None, rope_theta=77.0), MODEL, role="teacher")


def test_start_weights_of_another_model_are_refused_before_the_critic_is_built(tmp_path):
    folder = changed(tmp_path, rope_parameters=None, rope_theta=77.0)
    config = RunConfig(critic=CriticConfig(critic_load=folder))
    with pytest.raises(ConfigError, match=rf"^the critic of {folder} (?s:.*)config\.json"):
        Critic(NamedSpec(None, "a spec"), settings=LearnerSettings(config, MODEL, "Toy", "clipped", 1))
