"""Every way in which a target can break its contract, each with its message."""

from __future__ import annotations

import functools
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


class Length:
    def __init__(self, options, run):
        pass

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
    assert str(failure.value) == (
        "plugin 'tree' (acme-tree 2.1, entry point acme_tree.plugin): acme_tree.rewards:Length cannot be a reward "
        "model, which component 'length' says it is:\n"
        "  - it is built by Wrong(options, run), and takes (): too many positional arguments\n"
        "  - score is not async; it is awaited, so write async def score with return\n"
        "  - score is called as score(samples), and takes (self, sample, label): missing a required argument: 'label'\n"
        "The contract is RewardModel in slime_core.plugins.contracts.\n"
        "Correct it, or report this to the author of acme-tree."
    )


def test_a_function_is_refused_and_so_is_an_object():
    def score(samples):
        return []

    accepted = "; accepted: a class, which is called with the plugin's options and a RunView"
    assert found(score) == ["it is a function" + accepted]
    assert found(Length(None, None)) == ["it is an object of type Length" + accepted]


def test_a_missing_method_is_named_and_the_body_of_the_protocol_is_no_method():
    class Nothing:
        def __init__(self, options, run):
            pass

    class OnlyTheProtocol(RewardModel):
        def __init__(self, options, run):
            pass

    assert found(Nothing) == ["it has no method score"]
    assert found(OnlyTheProtocol) == ["it has no method score"]
    # Every class can be called; that is not what a policy loss means.
    assert found(Nothing, Kind.POLICY_LOSS) == ["it has no method __call__"]


def test_an_attribute_that_is_no_method_is_named_with_its_type():
    class Number:
        score = 3

        def __init__(self, options, run):
            pass

    class Property:
        def __init__(self, options, run):
            pass

        @property
        def score(self):
            raise RuntimeError("ran")

    assert found(Number) == ["score is not a method, but of type int"]
    assert found(Property) == ["score is not a method, but of type property"]


def test_an_abstract_class_is_named_with_what_it_leaves_out():
    class Base(ABC):
        def __init__(self, options, run):
            self.options = options

        @abstractmethod
        async def score(self, samples): ...

    assert found(Base) == ["it is abstract, so Base(options, run) fails: it leaves out score"]


def test_every_kind_is_built_with_options_and_run_by_position():
    class Source:
        def __init__(self, options, *, request):
            pass

        def next_groups(self, n): ...
        def put_back(self, groups): ...
        def state(self): ...

    assert found(Source, Kind.DATA_SOURCE) == [
        "it is built by Source(options, run), and takes (options, *, request): too many positional arguments",
        "it has no method restore",
    ]


def test_a_method_that_should_not_be_async_is_refused():
    class Slow:
        def __init__(self, options, run):
            pass

        async def estimate(self, batch): ...

    assert found(Slow, Kind.ADVANTAGE_ESTIMATOR) == [
        "estimate is async, and is called without await; write it with plain def"
    ]


def test_an_async_generator_is_not_awaited():
    class Stream:
        def __init__(self, options, run):
            pass

        async def score(self, samples):
            yield 1.0

    assert found(Stream) == [
        "score is an async generator; it is awaited, so write async def score with return",
    ]


def test_the_scope_chooses_what_the_method_is_called_with():
    class OverGroups:
        def __init__(self, options, run):
            pass

        def estimate(self, batch): ...

    assert found(OverGroups, Kind.ADVANTAGE_ESTIMATOR) == []
    assert found(OverGroups, Kind.ADVANTAGE_ESTIMATOR, AdvantageTraits(scope="token")) == [
        "estimate is called as estimate(batch, reduce), and takes (self, batch): too many positional arguments"
    ]


def test_keyword_parameters_of_the_contract_have_to_be_there():
    class Spec:
        def __init__(self, options, run):
            pass

        def build(self, config, *, dtype, parallel): ...
        def load_weights(self, chunks, folder): ...
        def export_weights(self, chunks): ...

    assert found(Spec, Kind.MODEL_SPEC) == [
        "build is called as build(config, dtype=, parallel=, overrides=), and takes (self, config, *, dtype, "
        "parallel): got an unexpected keyword argument 'overrides'"
    ]


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
    assert found(WrongStatic) == [
        "score is called as score(samples), and takes (self, samples): missing a required argument: 'samples'"
    ]


def test_a_class_that_fails_while_it_is_looked_at_is_named():
    class Meta(type):
        def __getattribute__(cls, name):
            raise OSError(f"no {name}")

    class Shy(metaclass=Meta):
        pass

    with pytest.raises(PluginError) as failure:
        check_fit(Kind.REWARD_MODEL, COMPONENT, PLUGIN, Shy)
    assert str(failure.value).startswith(
        f"{PLUGIN}: looking at acme_tree.rewards:Length of component 'length' failed with OSError: no "
    )
