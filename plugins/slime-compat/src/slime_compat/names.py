"""Makes slime's module names importable in files named by path.

    from slime.utils.types import Sample                          -> slime_core.types
    from slime.rollout.sglang_rollout import GenerateState        -> slime_compat

No package called ``slime`` is installed. A finder at the head of ``sys.meta_path`` serves these names to files named by
path, both at import and inside functions, and to no other code. The module of a name is imported only when the name is
used.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from slime_core import boundary
from slime_core.provisional import FunctionSource

__all__ = ["ADVICE", "HELPERS", "NAMES", "advice_for", "provided"]

HELPERS = ("generate_single",)
"""Helpers of ``slime_compat`` that a file named by path can use without an import."""

_TYPES = {"Sample": "slime_core.types:Sample"}
_SOURCES = {
    "RolloutDataSource": "slime_compat.data:RolloutDataSource",
    "RolloutDataSourceWithBuffer": "slime_compat.data:BufferedDataSource",
    "pop_first": "slime_compat.data:pop_first",
}

_HTTP = {"post": "slime_compat.inside:post", "get": "slime_compat.inside:get"}

NAMES: Mapping[str, Mapping[str, str]] = {
    "slime": {},
    "slime.data": {**_TYPES, **_SOURCES},
    "slime.utils": {},
    "slime.utils.types": _TYPES,
    "slime.utils.core": {},
    "slime.utils.core.types": _TYPES,
    "slime.utils.http_utils": _HTTP,
    "slime.utils.network": {},
    "slime.utils.network.http_utils": _HTTP,
    "slime.rollout": {},
    "slime.rollout.base_types": {
        "RolloutFnTrainOutput": "slime_compat.outputs:RolloutFnTrainOutput",
        "RolloutFnEvalOutput": "slime_compat.outputs:RolloutFnEvalOutput",
    },
    "slime.rollout.data_source": _SOURCES,
    "slime.rollout.sglang_rollout": {
        "GenerateState": "slime_compat.inside:GenerateState",
        "generate": "slime_compat.inside:generate",
        "get_model_url": "slime_compat.inside:get_model_url",
        "post": "slime_compat.inside:post",
        **_TYPES,
    },
    "slime.rollout.rm_hub": {},
    "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": "slime_compat.dapo:compute_score"},
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": "slime_compat.outputs:DynamicFilterOutput"},
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": "slime_compat.outputs:check_reward_nonzero_std",
        "DynamicFilterOutput": "slime_compat.outputs:DynamicFilterOutput",
    },
    "slime.backends": {},
    "slime.backends.megatron_utils": {},
    "slime.backends.megatron_utils.loss": {"get_log_probs_and_entropy": "slime_compat.loss:get_log_probs_and_entropy"},
}
"""slime's module -> its name -> ``module:attribute`` of the counterpart."""

_RULES = {
    "math_utils": "math",
    "math_dapo_utils": "dapo",
    "deepscaler": "deepscaler",
    "f1": "f1",
    "gpqa": "gpqa",
    "ifbench": "ifbench",
}
"""slime's module of a rule -> the reward model of slime-rewards with this rule."""


def _scored_by(name: str) -> str:
    return f"score with it by name: --rm-type {name}, or rm_type = {name} in a row's metadata"


ADVICE: Mapping[str, str] = {
    "slime.rollout.rm_hub": "name the reward model: --rm-type NAME, or rm_type in a row's metadata; several are added "
    "up with --rm-type '0.9*math+0.1*f1'",
    **{f"slime.rollout.rm_hub.{module}": _scored_by(name) for module, name in _RULES.items()},
    "slime.rollout.sglang_rollout": "a rollout is made by the run; a function makes responses with generate(args, "
    "sample, sampling_params), GenerateState and generate_single",
    "slime.rollout.sft_rollout": "give --advantage-estimator sft with --generate-function from_messages or from_label",
    "slime.rollout.fully_async_rollout": "give --async-buffer-size N",
    "slime.rollout.on_policy_distillation": "give --use-opd",
    "slime.utils.mask_utils": "give --generate-function from_messages",
    "slime.utils.ppo_utils": "slime_core.ops has kl.approximate_kl, returns and whitening",
    "slime.utils.misc": "write what it does into the file",
    "slime.utils.processing_utils": "GenerateState(args).tokenizer is the tokenizer",
    "slime.backends.megatron_utils": "slime_core.ops and slime_core.modeling hold what plugins may import",
    "slime.ray": "the run places and starts its processes",
    "slime.agent": "a generate function drives the conversation with generate_single",
}
"""Advice for names of slime's modules that have no counterpart here; the longest matching prefix is used."""


def advice_for(module: str, name: str | None = None) -> str:
    """Return advice for ``name`` of ``module``, which has no counterpart, and the names that the module has."""
    names = sorted(NAMES.get(module, {}))
    listed = f"There are: {', '.join(names)}. " if names else ""
    parts = module.split(".")
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    text = next((ADVICE[prefix] for prefix in prefixes if prefix in ADVICE), "leave the import out")
    return f"{listed}Instead, {text}."


_IMPORTING = ("importlib", "_frozen_importlib", boundary.__module__.rpartition(".")[0])
"""Modules between an import statement and a finder; the core imports modules next to a file."""


class _Finder(MetaPathFinder, Loader):
    """Finds slime's modules if the importing code belongs to a file named by path, or to a module next to it."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.loading = threading.local()
        self.lock = threading.Lock()
        self.blocks = 0

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in NAMES or not self._is_importer_known():
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in NAMES)
        return ModuleSpec(fullname, self, origin="slime_compat", is_package=is_package)

    def _is_importer_known(self) -> bool:
        if getattr(self.loading, "depth", 0):
            return True
        frame = sys._getframe(2)
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            if not name.startswith(_IMPORTING):
                return name in self.modules
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are resolved when they are used."""


class _Names(ModuleType):
    def __getattr__(self, name: str) -> object:
        target = NAMES[self.__name__].get(name)
        if target is None:
            if name.startswith("__"):
                raise AttributeError(name)
            raise AttributeError(f"{self.__name__}.{name} has no counterpart here. {advice_for(self.__name__, name)}")
        module, _, attribute = target.partition(":")
        counterpart: object = getattr(importlib.import_module(module), attribute)
        return counterpart


_FINDER = _Finder()


@contextmanager
def provided(source: FunctionSource) -> Iterator[None]:
    """Serve slime's names to code of ``source`` that is imported inside the context, and later to its functions."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    module = source.code.module
    _FINDER.modules |= {module, *(f"{module}.{neighbour}" for neighbour in source.neighbours)}
    _FINDER.loading.depth = getattr(_FINDER.loading, "depth", 0) + 1
    try:
        with in_use():
            yield
    finally:
        _FINDER.loading.depth -= 1
    if source.content is not None and module in sys.modules:
        import slime_compat

        for name in HELPERS:
            vars(sys.modules[module]).setdefault(name, getattr(slime_compat, name))


@contextmanager
def in_use() -> Iterator[None]:
    """Run code that may import slime's names. The last of several such blocks, in any thread, removes slime's modules
    from ``sys.modules``, so that other code finds no slime."""
    with _FINDER.lock:
        _FINDER.blocks += 1
    try:
        yield
    finally:
        with _FINDER.lock:
            _FINDER.blocks -= 1
            if not _FINDER.blocks:
                _forget()


def _forget() -> None:
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Names)]:
        del sys.modules[name]
