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
PLAIN = "\nWrite plain parameters of these names, without defaults."
WHO = "plugin 'tree' (acme-tree 2.1, entry point acme_tree.plugin): "


def module(**functions: object) -> ModuleType:
    made = ModuleType("acme_tree.plugin")
    vars(made).update(functions)
    return made


def message(holder: object) -> str:
    with pytest.raises(PluginError) as failure:
        check_hooks(PLUGIN, holder)
    return str(failure.value)


def plain():
    return []


def test_a_module_with_a_marked_hook_and_other_functions_passes():
    check_hooks(PLUGIN, module(slime_register_trackers=hookimpl(lambda: []), own=plain, CONSTANT=3))


def test_an_instance_with_a_marked_method_passes():
    class Plugin:
        @hookimpl
        def slime_register_trackers(self):
            return []

    check_hooks(PLUGIN, Plugin())


def test_a_class_in_place_of_an_instance_is_refused():
    class Tree:
        @hookimpl
        def slime_register_trackers(self):
            return []

    assert message(Tree) == (
        WHO + "the entry point names the class Tree; hooks of a class would be called without an instance.\n"
        "Point it at a module, or at an instance: tree = Tree()."
    )


def test_a_forgotten_marker_is_refused():
    assert message(module(slime_register_trackers=plain)) == (
        WHO + "slime_register_trackers is not marked as a hook of slime, so slime would never call it.\n"
        "Put @hookimpl above it (from slime_core import hookimpl), or rename it."
    )


def test_the_marker_of_another_project_is_refused():
    def impl():
        return []

    marked = pluggy.HookimplMarker("pytest")(impl)
    assert message(module(slime_register_trackers=marked)) == (
        WHO + "slime_register_trackers is not marked as a hook of slime, so slime would never call it.\n"
        "Put @hookimpl above it (from slime_core import hookimpl), or rename it."
    )


def test_a_misspelt_hook_is_refused_with_the_nearest():
    found = message(module(slime_register_tracker=hookimpl(lambda: [])))
    assert found.startswith(
        WHO
        + "slime_register_tracker implements no hook of slime (did you mean 'slime_register_trackers'?).\nHooks are: "
    )


def test_a_misspelt_specname_is_refused_too():
    found = message(module(mine=hookimpl(specname="slime_preset")(lambda: {})))
    assert "mine implements no hook of slime (did you mean 'slime_presets'?)" in found


def test_an_async_hook_is_refused():
    @hookimpl
    async def impl():
        return []

    assert message(module(slime_register_trackers=impl)) == (
        WHO + "slime_register_trackers is async; this hook is called without await.\n"
        "Write it with plain def; targets may be async."
    )


@pytest.mark.parametrize(
    ("function", "mistake"),
    [
        (
            lambda *, config: [],
            "has the keyword-only parameter 'config'; this hook takes none." + PLAIN,
        ),
        (
            lambda config, /: [],
            "has the positional-only parameter 'config'; this hook takes none." + PLAIN,
        ),
        (
            lambda **kw: [],
            "has the variadic keyword parameter 'kw'; this hook takes none." + PLAIN,
        ),
        (
            lambda *args: [],
            "has the variadic positional parameter 'args'; this hook takes none." + PLAIN,
        ),
        (
            lambda config=1: [],
            "has the positional or keyword parameter 'config'; this hook takes none." + PLAIN,
        ),
        (
            lambda config: [],
            "has the positional or keyword parameter 'config'; this hook takes none." + PLAIN,
        ),
    ],
)
def test_a_parameter_that_would_never_be_passed_is_refused(function, mistake):
    assert message(module(slime_register_trackers=hookimpl(function))) == WHO + "slime_register_trackers " + mistake


def test_a_hook_that_is_awaited_is_refused_without_async():
    def impl(step):
        return None

    assert message(module(slime_evaluate=hookimpl(impl))) == (
        WHO + "slime_evaluate is not async; this hook is awaited.\nWrite it with async def, and return."
    )


def test_an_async_generator_is_refused_for_a_registration_hook():
    @hookimpl
    async def impl():
        yield Component("t", target="a:b")

    assert message(module(slime_register_trackers=impl)) == (
        WHO + "slime_register_trackers is async; this hook is called without await.\n"
        "Write it with plain def; targets may be async."
    )


def test_a_hook_of_the_run_s_life_may_name_any_of_its_parameters():
    for function in (lambda: None, lambda run: None, lambda options, run: None):
        check_hooks(PLUGIN, module(slime_run_start=hookimpl(function)))


async def asynchronous(run):
    return None


@pytest.mark.parametrize(
    ("function", "mistake"),
    [
        (asynchronous, "is async; this hook is called without await.\nWrite it with plain def; targets may be async."),
        (
            lambda *, options: None,
            "has the keyword-only parameter 'options'; this hook passes run, options." + PLAIN,
        ),
        (
            lambda **kw: None,
            "has the variadic keyword parameter 'kw'; this hook passes run, options." + PLAIN,
        ),
        (
            lambda *args: None,
            "has the variadic positional parameter 'args'; this hook passes run, options." + PLAIN,
        ),
        (
            lambda options=None: None,
            "has the positional or keyword parameter 'options'; this hook passes run, options." + PLAIN,
        ),
        (
            lambda option: None,
            "has the positional or keyword parameter 'option'; this hook passes run, options." + PLAIN,
        ),
    ],
)
def test_the_same_mistakes_are_refused_for_the_hooks_of_a_run_s_life(function, mistake):
    assert message(module(slime_run_start=hookimpl(function))) == WHO + "slime_run_start " + mistake


def test_a_wrapper_around_other_plugins_hooks_is_refused():
    @hookimpl(wrapper=True)
    def impl():
        return (yield)

    assert message(module(slime_register_trackers=impl)) == (
        WHO + "slime_register_trackers is a hook wrapper, which would see the calls of other plugins.\n"
        "Use plain @hookimpl."
    )


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
    assert message(module(**{name: found})) == (
        WHO + f"{name} is of type {kind}, not a function, so slime would never call it.\n"
        "Write a plain function with @hookimpl above it, without a decorator that makes an object of it, or rename it."
    )


def test_a_module_and_an_object_that_is_no_hook_are_left_alone():
    check_hooks(PLUGIN, module(slime_core=slime_core, other=Decorated(plain), cached=functools.cache(plain)))


def test_a_hook_of_the_run_s_life_with_yield_is_refused():
    @hookimpl
    def impl(run):
        yield run

    assert message(module(slime_run_start=impl)) == (
        WHO + "slime_run_start has a yield, so calling it would run none of it.\nWrite it without yield."
    )


def test_a_module_that_fails_while_it_is_looked_at_is_named():
    def fail():
        raise OSError("no list")

    assert message(module(__dir__=fail)) == WHO + "looking for its hooks failed with OSError: no list"
