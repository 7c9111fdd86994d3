"""Every way in which a target can break the contract of its kind."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

import pytest

from slime_core import RewardModel, contracts
from slime_core.components.construction import load
from slime_core.components.fit import check_fit, contract_of, methods_of, misfits
from slime_core.errors import PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.discovery import Plugin
from slime_core.plugins.registration import Component, Kind, Registration

PLUGIN = Plugin("tree", "acme-tree", "2.1", "acme_tree.plugin")


def component(kind: str, target: Any = "acme_tree.code:Length", **traits: Any) -> Component:
    add = Registration()
    getattr(add, kind)("length", target, **traits)
    return add.components[0]


def mistakes(target: object, kind: str = "reward_model", **traits: Any) -> list[str]:
    return list(misfits(component(kind, **traits), target))


class Length:
    async def score(self, samples): ...  # type: ignore[no-untyped-def]


class Bare: ...


class OnlyTheProtocol(RewardModel): ...


class Base(ABC):
    @abstractmethod
    async def score(self, samples): ...  # type: ignore[no-untyped-def]


def with_score(value: Any) -> type:
    return type("Scores", (), {"score": value})


def plain(self: Any, samples: Any) -> None: ...


async def score(samples: Any) -> None: ...


async def score_run(samples: Any, run: Any) -> None: ...


async def score_model(samples: Any, model: Any) -> None: ...


async def method(self: Any, samples: Any) -> None: ...


async def stream(self: Any, samples: Any) -> Any:
    yield 1.0


async def two(self: Any, sample: Any, label: Any) -> None: ...


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*arguments: Any) -> Any:
        return function(*arguments)

    return wrapper


class Takes(Length):
    def __init__(self, options: Any, *, request: Any) -> None: ...


class TakesMore(Length):
    def __init__(self, run: Any, more: int = 3) -> None: ...


FITS = {
    "a class": Length,
    "inherited": type("Inherited", (Length,), {}),
    "static": with_score(staticmethod(score)),
    "of the class": with_score(classmethod(method)),
    "wrapped": with_score(wrapped(method)),
    "defaults": TakesMore,
    "a function": score,
    "a function that names the run": score_run,
}


@pytest.mark.parametrize("target", FITS.values(), ids=FITS)
def test_what_can_be_built_and_called_fits(target: object) -> None:
    assert mistakes(target) == []


WRONG = {
    "no method": (Bare, "score"),
    "the Protocol's own": (OnlyTheProtocol, "score"),
    "a number": (with_score(3), "int"),
    "a property": (with_score(property(len)), "property"),
    "abstract": (Base, "score"),
    "not async": (with_score(plain), "async"),
    "an async generator": (with_score(stream), "async"),
    "other parameters": (with_score(two), "score(samples)"),
    "static with self": (with_score(staticmethod(method)), "score(samples)"),
    "another argument of the constructor": (Takes, "'request'"),
    "an object": (Length(), "Length"),
    "a function with another argument": (score_model, "'model'"),
    "a function that is not async": (print, "async"),
}


@pytest.mark.parametrize(("target", "name"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_one_mistake_with_a_name(target: object, name: str) -> None:
    (mistake,) = mistakes(target)
    assert name in mistake


def test_a_function_needs_a_contract_with_one_method() -> None:
    (mistake,) = mistakes(score, "data_source")
    assert all(name in mistake for name in ("next_groups", "put_back", "state", "restore"))


def test_a_method_that_is_called_without_await_is_not_async() -> None:
    estimator = type("Slow", (), {"estimate": method})
    (mistake,) = mistakes(estimator, "advantage_estimator")
    assert mistake.startswith("estimate")


def test_the_scope_chooses_the_contract() -> None:
    estimator = type("Flat", (), {"estimate": lambda self, batch: batch})
    assert mistakes(estimator, "advantage_estimator") == []
    (mistake,) = mistakes(estimator, "advantage_estimator", scope="token")
    assert "estimate(batch, reduce)" in mistake


def test_keyword_parameters_of_the_contract_have_to_be_there() -> None:
    def build(self: Any, config: Any, *, dtype: Any, parallel: Any) -> None: ...

    members = {"build": build, "load_weights": lambda self, c, f: 0, "export_weights": lambda self, c: 0}
    (mistake,) = mistakes(type("Spec", (), members), "model_spec")
    assert "'overrides'" in mistake


def test_every_kind_and_scope_has_a_contract_with_methods() -> None:
    scoped = [
        ("advantage_estimator", "token", contracts.TokenAdvantageEstimator),
        ("generate_function", "group", contracts.GroupGenerateFunction),
        ("sample_transform", "rollout", contracts.RolloutTransform),
    ]
    for kind, scope, contract in scoped:
        assert contract_of(component(kind, scope=scope)) is contract
    assert all(methods_of(contract_of(component(kind.value))) for kind in Kind)


def test_one_error_names_plugin_component_and_every_mistake() -> None:
    class Wrong(Takes):
        def score(self, samples: Any, label: Any) -> None: ...  # type: ignore[override]

    with pytest.raises(PluginError) as failure:
        check_fit(component("reward_model"), PLUGIN, Wrong)
    text = str(failure.value)
    assert text.count("\n  - ") == 3
    assert all(name in text for name in ("acme-tree 2.1", "acme_tree.code:Length", "'length'", "RewardModel"))
    check_fit(component("reward_model"), PLUGIN, Length)


def test_a_class_that_fails_while_it_is_looked_at_is_named() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise OSError(f"no {name}")

    class Shy(metaclass=Meta): ...

    with pytest.raises(PluginError, match=r"acme_tree\.code:Length.*OSError"):
        check_fit(component("reward_model"), PLUGIN, Shy)


def test_light_components_of_this_project_fit() -> None:
    registry = activate(["grpo", "ppo", "rewards", "searchr1", "datasets"]).registry
    names = [(kind, name) for kind in Kind if kind is not Kind.MODEL_SPEC for name in registry.names(kind)]
    assert len(names) >= 30
    for kind, name in names:
        assert list(misfits(registry.find(kind, name)[1], load(registry, kind, name))) == []
