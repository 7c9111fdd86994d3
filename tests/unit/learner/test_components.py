"""A component that cannot be made, and a model spec that cannot build, are named with their plugin."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.contracts import LossParts
from slime_core.errors import CheckpointError, PluginError
from slime_core.learner import LearnerSettings
from slime_core.learner.components import build_objective
from slime_core.learner.trained_model import NamedSpec, TrainedModel
from slime_core.plugins.activation import activate


def failing(error):
    def fail(*_, **__):
        raise error

    return fail


def settings_with(generate_function: str = "single_turn") -> LearnerSettings:
    config = RunConfig(rollout=RolloutConfig(generate_function=generate_function))
    return LearnerSettings(config, Path("model"), "Toy", "clipped", 1)


class Failing:
    def __init__(self) -> None:
        raise KeyError("weight")


def test_a_policy_loss_that_cannot_be_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = activate(()).registry
    monkeypatch.setattr("slime_core.components.construction.load", lambda *_: Failing)
    with pytest.raises(PluginError, match=rf"^plugin 'core'.* 'clipped' .*KeyError: 'weight' \(.*{__file__}"):
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
