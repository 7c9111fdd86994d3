from __future__ import annotations

import functools
from types import ModuleType

import pluggy
import pytest

import slime_core
from slime_core import Component, hookimpl
from slime_core.errors import PluginError
from slime_core.plugins.discovery import PluginIdentity
from slime_core.plugins.validation import check_hooks

PLUGIN = PluginIdentity("tree", "acme-tree", "2.1", "acme_tree.plugin")


def module(**functions: object) -> ModuleType:
    made = ModuleType("acme_tree.plugin")
    vars(made).update(functions)
    return made


def plain():
    return []


def refused(holder: object, names: str) -> None:
    """Assert that the holder of hooks is refused with the plugin's name and ``names``."""
    with pytest.raises(PluginError, match=rf"'tree' \(acme-tree 2\.1, (.|\n)*{names}"):
        check_hooks(PLUGIN, holder)


def test_a_module_with_a_marked_hook_and_other_functions_passes():
    check_hooks(PLUGIN, module(slime_register_trackers=hookimpl(lambda: []), own=plain, CONSTANT=3))


def test_a_class_in_place_of_an_instance_is_refused():
    class Tree:
        @hookimpl
        def slime_register_trackers(self):
            return []

    refused(Tree, r"class Tree;(.|\n)* Tree\(\)")


def test_a_forgotten_marker_and_that_of_another_project_are_refused():
    for function in (plain, pluggy.HookimplMarker("pytest")(lambda: [])):
        refused(module(slime_register_trackers=function), r": slime_register_trackers (.|\n)*@hookimpl")


def test_a_misspelt_hook_is_refused_with_the_nearest():
    tracker = module(slime_register_tracker=hookimpl(lambda: []))
    refused(tracker, r": slime_register_tracker .*'slime_register_trackers'")
    refused(module(mine=hookimpl(specname="slime_preset")(lambda: {})), r": mine .*'slime_presets'")


def test_a_hook_of_the_run_s_life_may_name_any_of_its_parameters():
    for function in (lambda: None, lambda run: None, lambda options, run: None):
        check_hooks(PLUGIN, module(slime_run_start=hookimpl(function)))


async def asynchronous():
    return []


async def generator():
    yield Component("t", target="a:b")


def yielding(run):
    yield run


def wrapping():
    return (yield)


@pytest.mark.parametrize(
    ("name", "function", "mistake"),
    [
        ("slime_register_trackers", lambda *, config: [], "keyword-only parameter 'config'"),
        ("slime_register_trackers", lambda config, /: [], "positional-only parameter 'config'"),
        ("slime_register_trackers", lambda **kw: [], "variadic keyword parameter 'kw'"),
        ("slime_register_trackers", lambda *args: [], "variadic positional parameter 'args'"),
        ("slime_register_trackers", lambda config=1: [], "parameter 'config'"),
        ("slime_register_trackers", lambda config: [], "parameter 'config'"),
        ("slime_register_trackers", asynchronous, "async"),
        ("slime_register_trackers", generator, "async"),
        ("slime_run_start", hookimpl(wrapper=True)(wrapping), "wrapper"),
        ("slime_run_start", lambda *, options: None, "parameter 'options'.* run, options"),
        ("slime_run_start", lambda **kw: None, "parameter 'kw'.* run, options"),
        ("slime_run_start", lambda *args: None, "parameter 'args'.* run, options"),
        ("slime_run_start", lambda options=None: None, "parameter 'options'.* run, options"),
        ("slime_run_start", lambda option: None, "parameter 'option'.* run, options"),
        ("slime_run_start", asynchronous, "async"),
        ("slime_run_start", yielding, "yield"),
        ("slime_evaluate", lambda step: None, "async def"),
    ],
)
def test_a_function_that_slime_cannot_call_as_the_hook_is_refused(name, function, mistake):
    marked = function if hasattr(function, "slime_impl") else hookimpl(function)
    refused(module(**{name: marked}), rf"{name} (.|\n)*{mistake}")


def test_properties_are_not_run_while_checking():
    class Plugin:
        @property
        def secret(self):
            raise RuntimeError("ran")

        @hookimpl
        def slime_register_trackers(self):
            yield Component("t", target="a:b")

    check_hooks(PLUGIN, Plugin())


class Decorated:
    """What a decorator without ``functools.wraps`` leaves of a function."""

    def __init__(self, function):
        self.function = function

    def __call__(self):
        return self.function()


@pytest.mark.parametrize(
    ("name", "found", "kind"),
    [
        ("slime_presets", hookimpl(functools.cache(plain)), "_lru_cache_wrapper"),
        ("slime_presets", functools.cache(hookimpl(lambda: {})), "_lru_cache_wrapper"),
        ("mine", hookimpl(specname="slime_presets")(Decorated(plain)), "Decorated"),
        ("slime_presets", Decorated(plain), "Decorated"),
        ("slime_presets", {"gamma": 1.0}, "dict"),
        ("slime_presets", property(plain), "property"),
    ],
)
def test_a_hook_that_is_no_function_is_refused(name, found, kind):
    refused(module(**{name: found}), f": {name} .* type {kind},")


def test_a_module_and_an_object_that_is_no_hook_are_left_alone():
    check_hooks(PLUGIN, module(slime_core=slime_core, other=Decorated(plain), cached=functools.cache(plain)))


def test_a_module_that_fails_while_it_is_looked_at_is_named():
    def fail():
        raise OSError("no list")

    refused(module(__dir__=fail), "OSError: no list")
