from __future__ import annotations

import dataclasses
import pickle

import pytest

from slime_core import AdvantageTraits, Component, Kind, ModelSpecTraits, RewardTraits


def test_a_component_is_frozen_and_takes_keywords_after_its_name():
    component = Component("grpo", target="slime_grpo.advantage:GroupRelative")
    with pytest.raises(dataclasses.FrozenInstanceError):
        component.name = "other"
    with pytest.raises(TypeError):
        Component("grpo", "slime_grpo.advantage:GroupRelative")


@pytest.mark.parametrize("target", ["a.b", "a:", ":b", "a b:c", "a.b:c()", ""])
def test_a_target_that_is_no_import_path_is_refused(target):
    with pytest.raises(ValueError, match=r"'package\.module:attribute'"):
        Component("x", target=target)


@pytest.mark.parametrize("name", ["", "two words", "-dash", "a:b", "a/b"])
def test_a_name_that_could_not_be_a_flag_value_is_refused(name):
    with pytest.raises(ValueError, match=f"{name!r}"):
        Component(name, target="a:b")


def test_sets_in_traits_are_frozen_so_that_declarations_can_be_compared_and_hashed():
    assert AdvantageTraits(reads={"rewards"}) == AdvantageTraits(reads=frozenset({"rewards"}))
    assert hash(ModelSpecTraits(architectures={"A"})) == hash(ModelSpecTraits(architectures=frozenset({"A"})))


def test_a_scope_that_does_not_exist_names_those_that_do():
    with pytest.raises(ValueError, match=r"RewardTraits\.scope is 'batch'; accepted: 'sample', 'group'"):
        RewardTraits(scope="batch")


def test_a_reward_model_asks_an_auxiliary_model_for_what_one_gives():
    with pytest.raises(ValueError, match=r"auxiliary_model is 'logits'; accepted: 'scores', 'texts', 'any'"):
        RewardTraits(auxiliary_model="logits")


def test_the_columns_of_the_divergence_are_read_where_it_is_taken_off():
    traits = AdvantageTraits(scope="token", reads={"rewards", "gamma", "kl"})
    assert traits.columns(kl_coef=0.0) == {"rewards"}
    assert traits.columns(kl_coef=0.1) == {"rewards", "log_probs", "ref_log_probs"}
    assert AdvantageTraits(reads={"rewards", "lambd"}).columns(kl_coef=0.1) == {"rewards"}


def test_every_kind_has_its_own_traits_class_with_defaults():
    assert len({type(kind.traits()) for kind in Kind}) == len(Kind) == 11


def test_a_component_survives_pickling():
    component = Component("x", target="a:b", traits=AdvantageTraits(reads={"rewards"}))
    assert pickle.loads(pickle.dumps(component)) == component
