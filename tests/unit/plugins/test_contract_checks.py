"""Every way in which a target can break its contract."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod

import pytest

from slime_core import AdvantageTraits, Component, GenerateTraits, Kind, TransformTraits
from slime_core.errors import PluginError
from slime_core.plugins import contracts
from slime_core.plugins.activation import activate
from slime_core.plugins.contracts import RewardModel
from slime_core.plugins.discovery import PluginIdentity
from slime_core.plugins.validation import check_fit, contract_of, methods_of, misfits

PLUGIN = PluginIdentity("tree", "acme-tree", "2.1", "acme_tree.plugin")
COMPONENT = Component("length", target="acme_tree.rewards:Length")


class Built:
    def __init__(self, options, run):
        pass


class Length(Built):
    async def score(self, samples):
        return [0.0 for _ in samples]


def found(target: object, kind: Kind = Kind.REWARD_MODEL, traits: object = None) -> list[str]:
    return list(misfits(kind, Component("length", target="acme_tree.rewards:Length", traits=traits), target))


def test_a_class_that_does_what_the_contract_says_fits():
    check_fit(Kind.REWARD_MODEL, COMPONENT, PLUGIN, Length)


def test_every_kind_and_scope_has_a_contract_with_methods():
    scoped = [
        (Kind.ADVANTAGE_ESTIMATOR, AdvantageTraits(scope="token"), contracts.TokenAdvantageEstimator),
        (Kind.GENERATE_FUNCTION, GenerateTraits(scope="group"), contracts.GroupGenerateFunction),
        (Kind.SAMPLE_TRANSFORM, TransformTraits(scope="rollout"), contracts.RolloutTransform),
    ]
    for kind, traits, expected in scoped:
        assert contract_of(kind, Component("x", target="a:B", traits=traits)) is expected
    for kind in Kind:
        assert methods_of(contract_of(kind, COMPONENT))


def test_everything_that_ships_fits():
    registry = activate(["grpo", "ppo", "searchr1", "models"]).registry
    light = [(kind, name) for kind in Kind if kind is not Kind.MODEL_SPEC for name in registry.names(kind)]
    assert len(light) >= 10
    for kind, name in light:
        assert found(registry.load(kind, name), kind, registry.find(kind, name).traits) == []


def test_one_message_names_plugin_component_what_is_wrong_and_the_contract():
    class Wrong:
        def score(self, sample, label):
            return 1.0

    with pytest.raises(PluginError) as failure:
        check_fit(Kind.REWARD_MODEL, COMPONENT, PLUGIN, Wrong)
    head, *wrong, contract, _ = str(failure.value).splitlines()
    assert re.search(r"acme-tree 2\.1.*acme_tree\.rewards:Length.*'length'", head)
    assert ["Wrong(options, run)" in wrong[0], "async" in wrong[1], "score(samples)" in wrong[2]] == [True] * 3
    assert len(wrong) == 3
    assert "slime_core.plugins.contracts" in contract


def one(target: object, kind: Kind = Kind.REWARD_MODEL, traits: object = None) -> str:
    (text,) = found(target, kind, traits)
    return text


def test_a_function_is_refused_and_so_is_an_object():
    def score(samples):
        return []

    assert "a function" in one(score)
    assert "type Length" in one(Length(None, None))


def test_a_missing_method_is_named_and_the_body_of_the_protocol_is_no_method():
    class OnlyTheProtocol(Built, RewardModel): ...

    assert one(Built).endswith(" score")
    assert one(OnlyTheProtocol).endswith(" score")
    # Every class can be called; that is not what a policy loss means.
    assert one(Built, Kind.POLICY_LOSS).endswith(" __call__")


def test_an_attribute_that_is_no_method_is_named_with_its_type():
    class Number(Built):
        score = 3

    class Property(Built):
        @property
        def score(self):
            raise RuntimeError("ran")

    assert one(Number).endswith(" type int")
    assert one(Property).endswith(" type property")


def test_an_abstract_class_is_named_with_what_it_leaves_out():
    class Base(ABC):
        def __init__(self, options, run):
            self.options = options

        @abstractmethod
        async def score(self, samples): ...

    assert re.search(r"abstract.* Base\(options, run\) .* score$", one(Base))


def test_every_kind_is_built_with_options_and_run_by_position():
    class Source:
        def __init__(self, options, *, request):
            pass

        def next_groups(self, n): ...
        def put_back(self, groups): ...
        def state(self): ...

    built, missing = found(Source, Kind.DATA_SOURCE)
    assert re.search(r"Source\(options, run\), .*\(options, \*, request\)", built)
    assert missing.endswith(" restore")


def test_a_method_that_should_not_be_async_is_refused():
    class Slow(Built):
        async def estimate(self, batch): ...

    assert one(Slow, Kind.ADVANTAGE_ESTIMATOR).startswith("estimate is async")


def test_an_async_generator_is_not_awaited():
    class Stream(Built):
        async def score(self, samples):
            yield 1.0

    assert "async generator" in one(Stream)


def test_the_scope_chooses_what_the_method_is_called_with():
    class OverGroups(Built):
        def estimate(self, batch): ...

    assert found(OverGroups, Kind.ADVANTAGE_ESTIMATOR) == []
    assert "estimate(batch, reduce)" in one(OverGroups, Kind.ADVANTAGE_ESTIMATOR, AdvantageTraits(scope="token"))


def test_keyword_parameters_of_the_contract_have_to_be_there():
    class Spec(Built):
        def build(self, config, *, dtype, parallel): ...
        def load_weights(self, chunks, folder): ...
        def export_weights(self, chunks): ...

    assert "'overrides'" in one(Spec, Kind.MODEL_SPEC)


def test_inherited_static_class_and_wrapped_methods_are_called_as_they_are():
    def logged(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)

        return wrapper

    class Inherited(Length):
        pass

    class Static(Length):
        @staticmethod
        async def score(samples): ...

    class OfClass(Length):
        @classmethod
        async def score(cls, samples): ...

    class Wrapped(Length):
        score = logged(Length.score)

    class WrongStatic(Length):
        @staticmethod
        async def score(self, samples): ...

    assert [found(target) for target in (Inherited, Static, OfClass, Wrapped)] == [[], [], [], []]
    assert "(self, samples)" in one(WrongStatic)


def test_a_class_that_fails_while_it_is_looked_at_is_named():
    class Meta(type):
        def __getattribute__(cls, name):
            raise OSError(f"no {name}")

    class Shy(metaclass=Meta):
        pass

    with pytest.raises(PluginError, match=r"acme_tree\.rewards:Length.*'length'.*OSError: no "):
        check_fit(Kind.REWARD_MODEL, COMPONENT, PLUGIN, Shy)
