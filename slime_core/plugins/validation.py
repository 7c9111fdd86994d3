"""Refuses mistakes in a plugin's hooks that pluggy accepts silently, and return values that the core cannot use.

Ten mistakes in hooks: a class registered in place of an instance, an attribute that is not a function, a forgotten
``@hookimpl`` or another project's, a misspelt hook, ``async def`` where the hook is not awaited and plain ``def``
where it is, a lifecycle hook with ``yield``, parameters that are never passed (positional-only, keyword-only,
``*args``, ``**kwargs``), and parameters with defaults.

Whether a loaded target can do what its kind promises, before a run depends on it.

The contracts are read from the Protocols themselves, so that what is documented and what is checked cannot drift.

A target is a class: one object is built from it with the plugin's options and the run, and used for the whole run. A
function is refused, also one that would return such an object, because its result could be checked only by running it.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_core.config.settings import Setting, Unacceptable, as_toml
from slime_core.errors import PluginError
from slime_core.plugins import contracts, hooks
from slime_core.plugins.component import AdvantageTraits, Component, GenerateTraits, Kind, TransformTraits
from slime_core.plugins.discovery import PluginIdentity, similar
from slime_core.plugins.loading import boundary

_PREFIX = f"{hooks.PROJECT}_"
_MARKER = f"{hooks.PROJECT}_impl"


def check_hooks(plugin: PluginIdentity, holder: object) -> None:
    """Every hook that ``holder`` (a module or an instance) means to implement will be called.

    Raises:
        PluginError: one of the ten mistakes above, naming the plugin, the function and the correction; or looking at
            ``holder`` raised.
    """
    with boundary(plugin, "looking for its hooks"):
        mistake = next(_mistakes(holder), None)
    if mistake is not None:
        raise PluginError(f"{plugin}: {mistake}")


def _mistakes(holder: object) -> Iterator[str]:
    if inspect.isclass(holder):
        yield (
            f"the entry point names the class {holder.__name__}; hooks of a class would be called without an "
            f"instance.\nPoint it at a module, or at an instance: {holder.__name__.lower()} = {holder.__name__}()."
        )
    for name in dir(holder):
        found: Any = inspect.getattr_static(holder, name, None)  # without running properties
        found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        is_function = inspect.isfunction(found) or inspect.ismethod(found)
        mistake = _mistake(name, found) if is_function else _no_function(name, found)
        if mistake:
            yield f"{name} {mistake}"


def _no_function(name: str, found: Any) -> str | None:
    """The mistake in an attribute that is not a function: none, unless it looks like a hook."""
    is_marked = isinstance(inspect.getattr_static(found, _MARKER, None), dict)
    is_named = name.startswith(_PREFIX) and not inspect.ismodule(found)
    if not (is_marked or is_named):
        return None
    return (
        f"is of type {type(found).__name__}, not a function, so slime would never call it.\n"
        "Write a plain function with @hookimpl above it, without a decorator that makes an object of it, or rename it."
    )


def _mistake(name: str, function: Callable[..., Any]) -> str | None:
    options = vars(function).get(_MARKER)  # pluggy keeps a marker's options there
    if options is None:
        unmarked = (
            "is not marked as a hook of slime, so slime would never call it.\nPut @hookimpl above it (from slime_core "
            "import hookimpl), or rename it."
        )
        return unmarked if name.startswith(_PREFIX) else None
    hook = options["specname"] or name
    if hook not in hooks.HOOKS:
        return f"implements no hook of slime{similar(hook, hooks.HOOKS)}.\nHooks are: {', '.join(sorted(hooks.HOOKS))}."
    lifecycle = hooks.LIFECYCLE_HOOKS.get(hook)
    if lifecycle is not None and lifecycle.is_async:
        if not inspect.iscoroutinefunction(function):
            return "is not async; this hook is awaited.\nWrite it with async def, and return."
    elif inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "is async; this hook is called without await.\nWrite it with plain def; targets may be async."
    if options["wrapper"] or options["hookwrapper"]:
        return "is a hook wrapper, which would see the calls of other plugins.\nUse plain @hookimpl."
    if getattr(function, hooks.OBSERVES, False) and not (lifecycle is not None and lifecycle.may_observe):
        allowed = ", ".join(name for name, one in hooks.LIFECYCLE_HOOKS.items() if one.may_observe)
        return f"is marked as an observer, and this hook takes part or observes anyway.\nObservers may be: {allowed}."
    if hook in hooks.LIFECYCLE_HOOKS and inspect.isgeneratorfunction(function):
        return "has a yield, so calling it would run none of it.\nWrite it without yield."
    return _wrong_parameter(function, known=tuple(inspect.signature(vars(hooks)[hook]).parameters))


def _wrong_parameter(function: Callable[..., Any], *, known: tuple[str, ...]) -> str | None:
    """The mistake in the parameters of a hook that passes the arguments ``known``; most declarations take none."""
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    for one in parameters:
        is_plain = one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and one.default is inspect.Parameter.empty
        if not is_plain or one.name not in known:
            found = f"has the {one.kind.description} parameter {one.name!r}"
            passed = f"passes {', '.join(known)}" if known else "takes none"
            return f"{found}; this hook {passed}.\nWrite plain parameters of these names, without defaults."
    return None


_CHOOSES_CODE: Final = frozenset(
    {"plugins", "no_plugins", "locked", "lock_file", "allow_plugin_change", "load", "hf_checkpoint"}
)
"""Settings that say which code and weights a run loads, and are read before plugins are or instead of them."""


def checked_components(kind: Kind, found: Any) -> list[Component]:
    """The components that a registration hook of ``kind`` returned or yielded, traits filled in.

    Raises:
        TypeError: it is not a series of components whose traits fit ``kind``.
    """
    if found is None or isinstance(found, Component):
        raise TypeError(f"it returned {found!r}; yield Components, or return a list")
    return [_checked_component(kind, component) for component in found]


def checked_presets(presets: Any) -> Mapping[str, object]:
    """The presets of ``slime_presets``, checked.

    Raises:
        TypeError, ValueError: it is not a mapping from names of settings, or one of them chooses what code runs.
    """
    if not isinstance(presets, Mapping):
        raise TypeError(f"it returned {presets!r}; return a dict from flag names to values")
    wrong = [key for key in presets if not (isinstance(key, str) and key.isidentifier())]
    if wrong:
        raise ValueError(f"the keys {wrong} are no flag names; write them with underscores: 'advantage_estimator'")
    refused = sorted(_CHOOSES_CODE & presets.keys())
    if refused:
        raise ValueError(
            f"{', '.join(refused)} cannot be preset: which code and weights a run loads, only the run says"
        )
    return presets


def checked_options(options: Any) -> type[BaseModel]:
    """The options of ``slime_options``, checked.

    Raises:
        TypeError, ValueError: it is no frozen model, or a field of it lacks a default or help, has an alias, or has a
            default that cannot be written to a run's file of settings and read from there.
    """
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise TypeError(f"it returned {options!r}; return a subclass of slime_core.PluginOptions")
    if not options.model_config.get("frozen"):
        raise ValueError(f"{options.__name__} is not frozen; give it model_config = ConfigDict(frozen=True)")
    for name, info in options.model_fields.items():
        _check_field(f"{options.__name__}.{name}", name, info)
    return options


def _checked_component(kind: Kind, component: Any) -> Component:
    if not isinstance(component, Component):
        raise TypeError(f"it yielded {component!r}; yield Component(name, target=...)")
    traits = kind.traits() if component.traits is None else component.traits
    if not isinstance(traits, kind.traits):
        found = f"component {component.name!r} carries {type(traits).__name__}"
        raise TypeError(f"{found}; a {kind.words} carries {kind.traits.__name__}")
    return replace(component, traits=traits)


def _check_field(field: str, name: str, info: FieldInfo) -> None:
    if info.is_required() or not info.description:
        raise ValueError(f"{field} needs a default and help: Field(0.1, description='...')")
    if any((info.alias, info.validation_alias, info.serialization_alias)) or not name.isascii():
        raise ValueError(
            f"{field} has an alias or letters beyond a to z; a setting has the one name that files can hold"
        )
    if info.get_default(call_default_factory=True) is not None:
        _check_default(field, Setting("plugin", name, info, owner="plugin"))


def _check_default(field: str, setting: Setting) -> None:
    """Refuse a default that a run's ``config.toml`` cannot hold. Given values are looked at when it is written."""
    try:
        setting.read_toml(tomllib.loads(f"it = {as_toml(setting.default)}")["it"], base=Path())
    except (PluginError, Unacceptable) as mistake:
        raise ValueError(
            f"{field} has the default {setting.default!r}, which config.toml cannot hold: {mistake}"
        ) from None


_CONTRACTS: dict[Kind, type] = {
    Kind.POLICY_LOSS: contracts.PolicyLoss,
    Kind.CORRECTION: contracts.Correction,
    Kind.REWARD_MODEL: contracts.RewardModel,
    Kind.DATA_SOURCE: contracts.DataSource,
    Kind.PROMPT_FORMAT: contracts.PromptFormat,
    Kind.ROLLOUT_SOURCE: contracts.RolloutSource,
    Kind.MODEL_SPEC: contracts.ModelSpec,
    Kind.TRACKER: contracts.Tracker,
}
_SCOPED: dict[tuple[Kind, str], type] = {
    (Kind.ADVANTAGE_ESTIMATOR, "sample"): contracts.AdvantageEstimator,
    (Kind.ADVANTAGE_ESTIMATOR, "token"): contracts.TokenAdvantageEstimator,
    (Kind.GENERATE_FUNCTION, "sample"): contracts.GenerateFunction,
    (Kind.GENERATE_FUNCTION, "group"): contracts.GroupGenerateFunction,
    (Kind.SAMPLE_TRANSFORM, "group"): contracts.GroupTransform,
    (Kind.SAMPLE_TRANSFORM, "rollout"): contracts.RolloutTransform,
}
_BUILT_WITH = ("options", "run")
"""Positional arguments of every target."""

_NOTHING = object()


def contract_of(kind: Kind, component: Component) -> type:
    """The Protocol that the component's target implements; where a kind has several, the scope in its traits says."""
    traits = kind.traits() if component.traits is None else component.traits
    if isinstance(traits, AdvantageTraits | GenerateTraits | TransformTraits):
        return _SCOPED[kind, traits.scope]
    return _CONTRACTS[kind]


def methods_of(contract: type) -> dict[str, Callable[..., Any]]:
    """The methods that a Protocol asks for, by name, in its order; without those that every Protocol inherits."""
    own = {name: found for name, found in vars(contract).items() if inspect.isfunction(found)}
    return {name: found for name, found in own.items() if found.__qualname__ == f"{contract.__name__}.{name}"}


def check_fit(kind: Kind, component: Component, plugin: PluginIdentity, target: Any) -> None:
    """Raise PluginError if ``target`` of ``component`` cannot be built and called as its contract says.

    Raises:
        PluginError: it cannot; names the plugin, the component, all that does not fit, and the contract.
    """
    with boundary(plugin, f"looking at {component.target} of component {component.name!r}"):
        found = list(misfits(kind, component, target))
    if found:
        listed = "".join(f"\n  - {mistake}" for mistake in found)
        raise PluginError(
            f"{plugin}: {component.target} cannot be {kind.one}, which component {component.name!r} says "
            f"it is:{listed}\nThe contract is {contract_of(kind, component).__name__} in {contracts.__name__}.\n"
            f"Correct it, or report this to the author of {plugin.distribution}."
        )


def misfits(kind: Kind, component: Component, target: Any) -> Iterator[str]:
    """Everything about ``target`` that its contract does not allow, in words; nothing is built or called."""
    if not inspect.isclass(target):
        found = "a function" if inspect.isroutine(target) else f"an object of type {type(target).__name__}"
        yield f"it is {found}; accepted: a class, which is called with the plugin's options and a RunView"
        return
    yield from _unbuildable(target)
    contract = contract_of(kind, component)
    for name, expected in methods_of(contract).items():
        yield from _misfit_of_method(target, contract, name, expected)


def _unbuildable(target: Any) -> Iterator[str]:
    call = f"{target.__name__}({', '.join(_BUILT_WITH)})"
    if inspect.isabstract(target):
        left = ", ".join(sorted(target.__abstractmethods__))
        yield f"it is abstract, so {call} fails: it leaves out {left}"
        return
    reason = _refused(target, _BUILT_WITH, ())
    if reason:
        yield f"it is built by {call}, and takes {_signature(target)}: {reason}"


def _misfit_of_method(target: type, contract: type, name: str, expected: Callable[..., Any]) -> Iterator[str]:
    found = _attribute(target, contract, name)
    if found is _NOTHING:
        yield f"it has no method {name}"
        return
    method = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    if not callable(method):
        yield f"{name} is not a method, but of type {type(method).__name__}"
        return
    yield from _wrong_colour(name, expected, method)
    positional, keywords = _parameters_of(expected)
    # A function in a class is handed the object first; one that is made static, and a callable object, are not.
    bound = ("self",) if isinstance(found, classmethod) or inspect.isfunction(found) else ()
    reason = _refused(method, (*bound, *positional), keywords)
    if reason:
        yield f"{name} is called as {_call(name, expected)}, and takes {_signature(method)}: {reason}"


def _attribute(target: type, contract: type, name: str) -> Any:
    """The attribute ``name`` of instances; the bodies of the Protocol itself, which may be a base, do not count."""
    # getattr would find the metaclass's __call__, which every class has.
    owners = (base for base in target.__mro__ if base is not contract and base is not object)
    return next((vars(base)[name] for base in owners if name in vars(base)), _NOTHING)


def _wrong_colour(name: str, expected: Callable[..., Any], method: Callable[..., Any]) -> Iterator[str]:
    function = inspect.unwrap(method)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)
    if inspect.iscoroutinefunction(expected) and not is_async:
        kind = "an async generator" if inspect.isasyncgenfunction(function) else "not async"
        yield f"{name} is {kind}; it is awaited, so write async def {name} with return"
    if not inspect.iscoroutinefunction(expected) and (is_async or inspect.isasyncgenfunction(function)):
        yield f"{name} is async, and is called without await; write it with plain def"


def _parameters_of(expected: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of what a method of a Protocol is called with: by position, and by keyword; without ``self``."""
    parameters = list(inspect.signature(expected).parameters.values())[1:]
    by_keyword = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    return tuple(one.name for one in parameters if one.name not in by_keyword), tuple(by_keyword)


def _refused(function: Callable[..., Any], positional: tuple[str, ...], keywords: tuple[str, ...]) -> str:
    """Why ``function`` cannot be called with so many positional arguments and these keywords; empty: it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, without a signature: only a call would tell
        return ""
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as mistake:
        return str(mistake)
    return ""


def _signature(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in parameters]
    return str(inspect.Signature(bare))


def _call(name: str, expected: Callable[..., Any]) -> str:
    positional, keywords = _parameters_of(expected)
    return f"{name}({', '.join([*positional, *(f'{keyword}=' for keyword in keywords)])})"
