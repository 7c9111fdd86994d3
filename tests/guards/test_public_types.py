"""No ``Any`` in what plugins import: public records, Protocols, hooks and functions say what they take and return."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import BaseModel

import slime_core
from slime_core import EngineColumn, RunView, contracts, generation, provisional, types
from slime_core.generation import GenerateContext, ProcessedPrompt, SamplingParams
from slime_core.modeling import prepare_megatron
from slime_core.modeling.layout import ParallelLayout
from slime_core.plugins import hooks
from slime_core.provisional import FunctionSource

PROMPTS = ("chat", "messages")
"""Modules of the prompts room."""

OPS = ("groups", "log_probs", "losses", "packing", "prefixes", "whitening")
MODELING = ("experts", "export", "kernels", "layers", "layout", "memory", "mlp", "patches", "rows", "spec")

ROOMS = (
    *("slime_core", "slime_core.contracts", "slime_core.plugins.hooks", "slime_core.provisional"),
    *(
        "slime_core.checkpoint",
        "slime_core.errors",
        "slime_core.generation",
        "slime_core.services",
        "slime_core.types",
        "slime_core.weights",
    ),
    *(f"slime_core.prompts.{name}" for name in PROMPTS),
    *(f"slime_core.ops.{name}" for name in OPS),
    *("slime_core.modeling", *(f"slime_core.modeling.{name}" for name in MODELING)),
)

FOR_CHECKERS: Mapping[str, object] = {
    **{
        name: getattr(module, name) for module in (slime_core, contracts, provisional, types) for name in module.__all__
    },
    **{
        one.__name__: one
        for one in (BaseModel, EngineColumn, FunctionSource, GenerateContext, ParallelLayout, ProcessedPrompt, RunView)
    },
    **{"Encoder": generation.Encoder, "NDArray": NDArray, "SamplingParams": SamplingParams, "np": np, "torch": torch},
    "Bridge": object,  # mbridge and Megatron ship no types
    "NamedForMBridge": object,  # its module imports the one that names it
    "PretrainedConfig": object,  # transformers takes seconds to import
    "ProcessGroupCollection": object,
    "TransformerBlockSubmodules": object,  # Megatron warns where it is imported
    "TransformerConfig": object,
    "array": Sequence,  # array.array takes no type arguments before Python 3.12
}
"""What public modules import under ``TYPE_CHECKING`` only, so that importing them loads neither torch nor an engine."""

DEPENDS_ON_THE_HOOK = {"Hooks.call(return)", "Hooks.implementations(return)"}
"""Values of pluggy, whose type is that of the hook that is called."""

PUBLIC_METHODS = ("__call__", "__init__", "__new__")


def has_any(hint: object) -> bool:
    """Whether ``Any`` stands in ``hint``; an array's shape, which numpy writes with ``Any``, does not count."""
    arguments = get_args(hint)[1:] if get_origin(hint) is np.ndarray else get_args(hint)
    inner = [one for part in arguments for one in (part if isinstance(part, list) else [part])]
    return hint is Any or any(map(has_any, inner))


def functions(owner: type) -> Iterator[tuple[str, Callable[..., object]]]:
    """The public methods and properties that ``owner`` itself defines."""
    for name, value in vars(owner).items():
        found = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(found) and (not name.startswith("_") or name in PUBLIC_METHODS):
            yield name, found


def hints(room: str) -> Iterator[tuple[str, object]]:
    """Each annotation of each public name of ``room``, with where it stands."""
    if "megatron.core" not in sys.modules:
        prepare_megatron()  # before the first import of Megatron, for the tests after these
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of what torch has deprecated, and of what is not installed
        module = importlib.import_module(room)
    for name in module.HOOKS if module is hooks else module.__all__:
        value = getattr(module, name)
        if not inspect.isclass(value):
            found = get_type_hints(value, localns=dict(FOR_CHECKERS)) if inspect.isfunction(value) else {"": value}
            yield from ((f"{name}({key})", hint) for key, hint in found.items())
            continue
        for owner in (one for one in value.__mro__ if one.__module__.startswith("slime_core")):
            fields = get_type_hints(owner, localns=dict(FOR_CHECKERS))
            own = [key for key in inspect.get_annotations(owner) if not key.startswith("_")]
            yield from ((f"{name}.{key}", fields[key]) for key in own)
            for method, function in functions(owner):
                found = get_type_hints(function, localns=dict(FOR_CHECKERS))
                yield from ((f"{name}.{method}({key})", hint) for key, hint in found.items())


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_public_is_typed_as_any(room: str) -> None:
    assert {where for where, hint in hints(room) if has_any(hint)} - DEPENDS_ON_THE_HOOK == set()


@pytest.mark.parametrize("room", ["modeling", "ops", "prompts"])
def test_every_module_of_a_public_room_is_looked_at(room: str) -> None:
    package = importlib.import_module(f"slime_core.{room}")
    modules = {f"slime_core.{room}.{one.name}" for one in pkgutil.iter_modules(package.__path__)}
    assert modules - set(ROOMS) == set()


def test_fields_methods_and_hooks_are_looked_at() -> None:
    found = {where for room in ROOMS for where, _ in hints(room)}
    assert {"Sample.metadata", "GenerateContext.start(return)", "slime_run_start(run)"} <= found
    assert {"Registration.reward_model(target)", "RMSNorm.__init__(config)"} <= found
