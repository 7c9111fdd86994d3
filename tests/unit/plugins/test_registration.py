from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import pytest

from slime_core import EngineColumn, PluginOptions, Registration
from slime_core.components.fit import summary_of
from slime_core.plugins.registration import Kind
from tests.plugin_files import Site


class Length:
    """Length of a response, shorter is better.

    More text.
    """


def plain(samples: list[object]) -> list[float]:
    """Zero for everything."""
    return []


TOP = EngineColumn({"top_logprobs_num": 2}, lambda meta_info: [], width=2)

METHODS: dict[Kind, dict[str, Any]] = {
    Kind.ADVANTAGE_ESTIMATOR: {
        "scope": "token",
        "reads": {"rewards"},
        "policy_loss": "soft",
        "across_groups": True,
    },
    Kind.POLICY_LOSS: {"reads": {"advantages"}, "reads_engine": {"top": TOP}},
    Kind.CORRECTION: {"compares_engine": False, "reads_engine": {"top": TOP}},
    Kind.REWARD_MODEL: {
        "scope": "group",
        "isolated": False,
        "auxiliary_model": "texts",
        "is_constant": True,
        "numbers": {"acc"},
    },
    Kind.SAMPLE_TRANSFORM: {"scope": "rollout"},
    Kind.GENERATE_FUNCTION: {
        "scope": "group",
        "sends_prompts_whole": True,
        "samples_from_engine": False,
        "rewards": True,
        "resumes": True,
    },
    Kind.DATA_SOURCE: {},
    Kind.ROLLOUT_SOURCE: {},
    Kind.MODEL_SPEC: {
        "architectures": {"AcmeLM"},
        "implementation": "acme",
        "unsupported": "a.b:c",
        "inputs": {"pixel_values"},
    },
    Kind.TRACKER: {},
}


@pytest.mark.parametrize(("kind", "traits"), METHODS.items(), ids=[kind.value for kind in METHODS])
def test_each_kind_has_a_method_that_keeps_every_trait(kind: Kind, traits: dict[str, Any]) -> None:
    add = Registration()
    getattr(add, kind.value)("mine", Length, **traits)
    (component,) = add.components
    assert (component.kind, component.name, component.target) == (kind, "mine", Length)
    assert vars(component.traits) == traits
    parameters = inspect.signature(getattr(add, kind.value)).parameters
    assert set(parameters) == {"name", "target", "summary", *traits}
    getattr(add, kind.value)("other", "a.b:C")  # every trait has a default
    assert add.components[1].place == "a.b:C"


def test_every_kind_is_covered() -> None:
    assert set(METHODS) == set(Kind)


@pytest.mark.parametrize("target", ["a.b", "a:", ":b", "a b:c", "a.b:c()", ""])
def test_a_text_that_is_no_import_path_is_refused(target: str) -> None:
    add = Registration()
    calls = (partial(add.tracker, "mine"), partial(add.command, "mine"), add.flag_advice, add.options)
    for call in calls:
        with pytest.raises(ValueError, match="module:attribute"):
            call(target)
    assert add == Registration()


@pytest.mark.parametrize("name", ["", "two words", "-dash", "a:b", "a/b"])
def test_a_name_that_could_not_be_the_value_of_a_flag_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="tracker"):
        Registration().tracker(name, Length)


@pytest.mark.parametrize(
    ("kind", "arguments", "error"),
    [
        ("reward_model", {"target": 3}, TypeError),
        ("reward_model", {"target": "a:b", "scope": "batch"}, ValueError),
        ("sample_transform", {"target": "a:b", "scope": "sample"}, ValueError),
        ("advantage_estimator", {"target": "a:b", "reads": "rewards"}, TypeError),
        ("model_spec", {"target": "a:b", "architectures": "AcmeLM"}, TypeError),
        ("tracker", {"target": "a:b", "scope": "sample"}, TypeError),
    ],
    ids=["a number", "no such scope", "a scope of another kind", "one text", "one architecture", "no such trait"],
)
def test_what_a_method_does_not_accept_is_refused(kind: str, arguments: dict[str, Any], error: type) -> None:
    add = Registration()
    with pytest.raises(error):
        getattr(add, kind)("mine", **arguments)
    assert add.components == []


def test_a_name_is_added_once_a_kind() -> None:
    add = Registration()
    add.reward_model("mine", plain)
    add.generate_function("mine", plain)
    with pytest.raises(ValueError, match="'mine'"):
        add.reward_model("mine", Length)


def test_a_plugin_has_one_options_class() -> None:
    add = Registration()
    add.options(PluginOptions)
    with pytest.raises(ValueError, match="PluginOptions"):
        add.options("a.b:C")


@pytest.mark.parametrize("key", ["plugins", "no_plugins", "allow_plugin_change", "load", "hf_checkpoint"])
def test_no_preset_chooses_code_or_weights(key: str) -> None:
    add = Registration()
    with pytest.raises(ValueError, match=key):
        add.presets(lr=0.1, **{key: "x"})
    assert add.preset_values == {}


def test_presets_add_up() -> None:
    add = Registration()
    add.presets(lr=0.1)
    add.presets(gamma=0.9, lr=0.2)
    assert add.preset_values == {"lr": 0.2, "gamma": 0.9}


# --- Summaries --------------------------------------------------------------------------------------------------------


def summary(target: Any, text: str | None = None) -> str:
    add = Registration()
    add.reward_model("mine", target, summary=text)
    return summary_of(add.components[0])


def test_the_summary_is_the_first_line_of_the_docstring_or_the_given_text() -> None:
    assert summary(Length) == "Length of a response, shorter is better."
    assert summary(plain) == "Zero for everything."
    assert summary(plain, "Nothing.") == "Nothing."
    assert summary(type("Bare", (), {})) == ""


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("acme_p.code:Length", "A class."),
        ("acme_p.code:length", "A function."),
        ("acme_p.code:later", "An async function."),
        ("acme_p.code:Bare", ""),
        ("acme_p.code:Length.inner", ""),
        ("acme_p.code:gone", ""),
        ("acme_p.wrong:Length", ""),
        ("acme_p.gone:Length", ""),
        ("nowhere_at_all:Length", ""),
        ("nowhere_at_all.code:Length", ""),
        ("sys:Length", ""),
    ],
)
def test_the_docstring_of_a_path_is_read_without_importing_the_module(site: Site, path: str, text: str) -> None:
    code = """
        raise SystemExit(3)
        class Length:
            '''A class.

            More.'''
            def inner(self):
                '''Not this.'''
        def length(samples):
            '''A function.'''
        async def later(samples):
            '''An async function.'''
        class Bare: ...
    """
    site.install("acme", code=code, wrong="class Length(:\n")
    assert summary(path) == text
    assert "acme_p.code" not in sys.modules
