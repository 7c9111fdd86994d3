"""Whether a loaded target can do what its kind promises, before a run depends on it.

The contracts are read from the Protocols themselves, so that what is documented and what is checked cannot drift.

A target is a class: one object is built from it with the plugin's options and the run, and used for the whole run. A
function is refused, also one that would return such an object, because its result could be checked only by running it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins import contracts
from slime_core.plugins.boundary import boundary
from slime_core.plugins.component import AdvantageTraits, Component, GenerateTraits, Kind, TransformTraits
from slime_core.plugins.discovery import PluginIdentity

__all__ = [
    "check_fit",
    "contract_of",
    "methods_of",
    "misfits",
]


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
"""What every target is called with, by position."""

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
    """Returns if ``target``, which ``component`` of ``plugin`` names, can be built and called as its contract says.

    Raises:
        PluginError: it cannot; names the plugin, the component, all that does not fit, and the contract.
    """
    with boundary(plugin, f"looking at {component.target} of component {component.name!r}"):
        found = list(misfits(kind, component, target))
    if found:
        listed = "".join(f"\n  - {mistake}" for mistake in found)
        article = "an" if kind.words[0] in "aeiou" else "a"
        raise PluginError(
            f"{plugin}: {component.target} cannot be {article} {kind.words}, which component {component.name!r} says "
            f"it is:{listed}\n{_described(contract_of(kind, component))}\n"
            f"Correct it, or report this to the author of {plugin.distribution}; slime plugins check "
            f"{_as_named(plugin)} tells when it is right."
        )


def misfits(kind: Kind, component: Component, target: Any) -> Iterator[str]:
    """Everything about ``target`` that its contract does not allow, in words; nothing is built or called."""
    if not inspect.isclass(target):
        found = "a function" if inspect.isroutine(target) else f"an object of type {type(target).__name__}"
        yield f"it is {found}; accepted is a class, which is called with the plugin's options and a RunView"
        return
    yield from _unbuildable(target)
    contract = contract_of(kind, component)
    for name, asked in methods_of(contract).items():
        yield from _misfit_of_method(target, contract, name, asked)


def _unbuildable(target: Any) -> Iterator[str]:
    call = f"{target.__name__}({', '.join(_BUILT_WITH)})"
    if inspect.isabstract(target):
        left = ", ".join(sorted(target.__abstractmethods__))
        yield f"it is abstract, so {call} fails: it leaves out {left}"
        return
    reason = _refused(target, _BUILT_WITH, ())
    if reason:
        yield f"it is built by {call}, and takes {_signature(target)}: {reason}"


def _misfit_of_method(target: type, contract: type, name: str, asked: Callable[..., Any]) -> Iterator[str]:
    found = _attribute(target, contract, name)
    if found is _NOTHING:
        yield f"it has no method {name}"
        return
    method = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    if not callable(method):
        yield f"{name} is no method, but of type {type(method).__name__}"
        return
    yield from _wrong_colour(name, asked, method)
    positional, keywords = _parameters(asked)
    # A function in a class is handed the object first; one that is made static, and a callable object, are not.
    bound = ("self",) if isinstance(found, classmethod) or inspect.isfunction(found) else ()
    reason = _refused(method, (*bound, *positional), keywords)
    if reason:
        yield f"{name} is called as {_call(name, asked)}, and takes {_signature(method)}: {reason}"


def _attribute(target: type, contract: type, name: str) -> Any:
    """What instances find under ``name``; the bodies of the Protocol itself, which may be a base, do not count."""
    # getattr would find the metaclass's __call__, which every class has.
    owners = (base for base in target.__mro__ if base is not contract and base is not object)
    return next((vars(base)[name] for base in owners if name in vars(base)), _NOTHING)


def _wrong_colour(name: str, asked: Callable[..., Any], method: Callable[..., Any]) -> Iterator[str]:
    function = inspect.unwrap(method)
    if _is_async(asked) and not (_is_async(function) or _is_async(method)):
        kind = "an async generator" if inspect.isasyncgenfunction(function) else "not async"
        yield f"{name} is {kind}; it is awaited, so write async def {name} with return"
    if not _is_async(asked) and (_is_async(method) or inspect.isasyncgenfunction(function)):
        yield f"{name} is async, and is called without await; write it with plain def"


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function)


def _parameters(asked: Callable[..., Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of what a method of a Protocol is called with: by position, and by keyword; without ``self``."""
    parameters = list(inspect.signature(asked).parameters.values())[1:]
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


def _call(name: str, asked: Callable[..., Any]) -> str:
    positional, keywords = _parameters(asked)
    return f"{name}({', '.join([*positional, *(f'{keyword}=' for keyword in keywords)])})"


def _as_named(plugin: PluginIdentity) -> str:
    """What a command takes for the plugin: its name, or the file or module that it is."""
    local = plugin.distribution.removeprefix("module ")
    return local if local.endswith(".py") or local != plugin.distribution else plugin.name


def _described(contract: type) -> str:
    calls = [
        ("async " if _is_async(asked) else "") + _call(name, asked) for name, asked in methods_of(contract).items()
    ]
    built = ", ".join(_BUILT_WITH)
    return (
        f"The contract is {contract.__name__} in {contracts.__name__}: a class, called with ({built}), "
        f"with {', '.join(calls)}."
    )
