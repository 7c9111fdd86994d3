"""A component that cannot be made, and a model spec that cannot build, are named with their plugin."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime_core import RunView
from slime_core.builtin.losses import Clipped
from slime_core.config.learning import AlgorithmConfig
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import CheckpointError, ConfigError, PluginError
from slime_core.learner import LearnerSettings
from slime_core.learner.components import build_objective
from slime_core.learner.frozen_models import RequiredColumns
from slime_core.learner.objective import Corrections, NamedCorrection, Objective
from slime_core.learner.trained_model import NamedSpec, TrainedModel
from slime_core.plugins.activation import activate
from slime_core.plugins.contracts import LossParts


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


def settings_with(generate_function: str = "single_turn") -> LearnerSettings:
    config = RunConfig(rollout=RolloutConfig(generate_function=generate_function))
    return LearnerSettings(config, Path("model"), "Toy", "clipped", 1)


def test_a_policy_loss_that_cannot_be_made_is_named(monkeypatch):
    registry = activate(()).registry
    monkeypatch.setattr(type(registry), "load", lambda self, kind, name: failing(KeyError("weight")))
    with pytest.raises(PluginError, match=rf"^plugin 'core'.* 'clipped' .*KeyError: 'weight' \(.*{__file__}"):
        build_objective(registry, settings_with(), parts=LossParts())


def test_an_error_that_a_component_raises_is_reported_unchanged(monkeypatch):
    registry = activate(()).registry
    monkeypatch.setattr(type(registry), "load", lambda self, kind, name: failing(ConfigError("too low")))
    with pytest.raises(ConfigError, match=r"^too low$"):
        build_objective(registry, settings_with(), parts=LossParts())


@pytest.mark.parametrize(("generate_function", "engine_sampled"), [("single_turn", True), ("from_label", False)])
def test_the_generate_function_declares_whether_engines_sample_what_is_trained(generate_function, engine_sampled):
    registry = activate(()).registry
    found = build_objective(registry, settings_with(generate_function), parts=LossParts())
    assert bool(found._distance(torch.zeros(1))) is engine_sampled


def model(**fields) -> TrainedModel:
    """A model that has got no further than these fields."""
    found = TrainedModel.__new__(TrainedModel)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyError("embed"), PluginError, r"^model spec 'mine' of X: .*here .*KeyError: 'embed'"),
        (CheckpointError("no such weight"), CheckpointError, "^no such weight$"),
    ],
)
def test_a_model_spec_that_cannot_load_is_named(error, kind, message):
    spec = SimpleNamespace(load_weights=failing(error))
    with pytest.raises(kind, match=message):
        model(_spec=NamedSpec(spec, "model spec 'mine' of X"), chunks=[]).load_weights(Path("here"))


@pytest.mark.parametrize(
    ("objective", "reads", "expected"),
    [
        ({}, (), (False, False)),
        ({}, ("old_log_probs",), (False, True)),
        ({"correct": lambda *_: None}, (), (False, True)),
        ({"corrections": Corrections([NamedCorrection(lambda terms: None, "x")])}, (), (False, True)),
        ({"of_logits": lambda *_: None}, (), (True, True)),
        ({"use_kl_loss": True, "use_unbiased_kl": True}, (), (False, True)),
        ({"get_mismatch_metrics": True}, (), (False, True)),
        ({"use_rollout_logprobs": True}, ("old_log_probs",), (False, False)),
        ({"use_rollout_logprobs": True, "of_logits": lambda *_: None}, (), (False, False)),
    ],
)
def test_with_several_steps_whatever_reads_the_log_probs_of_before_gets_them(objective, reads, expected):
    settings = {name: value for name, value in objective.items() if value is True}
    named = {name: value for name, value in objective.items() if value is not True}
    corrections, parts = named.pop("corrections", Corrections()), LossParts(**named)
    found = Objective(Clipped(None, RunView()), AlgorithmConfig(**settings), corrections=corrections, parts=parts)
    columns = RequiredColumns(found, None, loss_reads=frozenset(reads))
    assert (columns.old(1), columns.old(2)) == expected
