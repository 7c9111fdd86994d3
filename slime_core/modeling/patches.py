"""Lets Megatron-core and mbridge run without TransformerEngine and Apex, after one call to :func:`install`.

Modules of Megatron are patched after their import. Each patch names its upstream line (megatron-core 0.16.1) and says
when it can go. A plugin for another device installs a subclass of :class:`Loader`, which patches more.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Sequence, Set
from importlib.util import find_spec
from typing import Any, Literal

import torch

from slime_core.errors import ConfigError, RunError

__all__ = ["Loader", "accelerator", "install"]

Accelerator = Literal["cuda", "cpu"]


def accelerator(requested: Accelerator | Literal["auto"] = "auto") -> Accelerator:
    """Return the device type of this process: ``requested``; for ``"auto"``, a GPU if torch sees one, else the CPU.

    Raises:
        ConfigError: a GPU was requested and torch sees none.
    """
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device = cuda, but torch {torch.__version__} sees no GPU; check the driver, or give --device cpu"
        )
    return requested


# --- The import hook --------------------------------------------------------------------------------------------------

_PREFIXES = ("megatron.core.", "mbridge.")


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module unchanged, then patches code that expects TransformerEngine or Apex."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Execute and patch the module."""
        # Suppresses about ten warnings that Apex and TransformerEngine are missing, which is expected here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().exec_module(module)
        if module.__name__ in _PATCHES:
            _PATCHES[module.__name__](module)


def install(loader: type[Loader] = Loader) -> None:
    """Load later imports of Megatron-core and mbridge with ``loader``. A second call has no effect.

    Raises:
        RunError: Megatron-core is already imported, so its modules can no longer be patched.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = sorted(name for name in sys.modules if f"{name}.".startswith("megatron.core."))
    if early:
        raise RunError(
            f"slime_core.modeling.prepare_megatron() came too late: {early[0]} and {len(early) - 1} more modules are "
            "already imported; call it before anything imports megatron.core or mbridge"
        )
    sys.meta_path.insert(0, _Finder(loader))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, loader: type[Loader]) -> None:
        self._loader = loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not f"{fullname}.".startswith(_PREFIXES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = self._loader(spec.loader.name, spec.loader.path)
        return spec


# --- Patches after an import ------------------------------------------------------------------------------------------


def _patch_moe_utils(module: Any) -> None:
    """moe/moe_utils.py:1192 reads ``te_general_gemm``, a name that only TransformerEngine defines.

    Can go when upstream defines the name.
    """
    module.__dict__.setdefault("te_general_gemm", None)


def _patch_mla(module: Any) -> None:
    """transformer/multi_latent_attention.py:62 assumes TransformerEngine is installed, because stubs of it import.

    :185 then uses the type of a stub. Can go when HAVE_TE comes from the extension module.
    """
    module.HAVE_TE = sys.modules["megatron.core.extensions.transformer_engine"].HAVE_TE


_OF_THE_RUN = frozenset({
    "fused", "offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32", "bias_correction",
    "pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d",
})  # fmt: skip
"""Entries of a parameter group that describe the computation of this run. They do not come from a checkpoint; and
the classes among them could not be loaded without running code."""


def _patch_distributed_optimizer(module: Any) -> None:
    """Bugs of optimizer/distrib_optimizer.py if torch's AdamW replaces Apex and TransformerEngine.

    :642 requires exactly one step count, but a fresh optimizer, and a rank that trains no parameter, have none.
    :729 creates the state of a fresh hybrid optimizer by a step with random gradients, which changes the weights. :825
    gives *all* parameters one step tensor, which AdamW then increments once for each of them. :939 copies every key of
    the live state, but "step" is not a key of a checkpoint. Can go when upstream tests torch's AdamW.
    """
    if module.HAVE_APEX_OR_TE:
        return
    optimizer = module.DistributedOptimizer
    state_dict, load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    def state_dict_of_fresh(self: Any) -> Any:
        _begin_state(self.optimizer)
        state = state_dict(self) if self.optimizer.state else _state_of_nothing(self.optimizer)
        groups = state["optimizer"]["param_groups"]
        state["optimizer"]["param_groups"] = [_without(group, _OF_THE_RUN) for group in groups]
        return state

    def load_with_separate_steps(self: Any, loaded: Any) -> None:
        _begin_state(self.optimizer)
        of_run = {name: value for name, value in self.optimizer.param_groups[0].items() if name in _OF_THE_RUN}
        for group in loaded["optimizer"]["param_groups"]:
            group |= of_run
        load_state_dict(self, loaded)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    def set_states(self: Any, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        state = self.optimizer.state[main]
        live = {**state, "param": state.get("master_param", main)}
        for name in live.keys() & tensors.keys() - {"step"}:
            live[name].copy_(tensors[name])

    optimizer.state_dict = state_dict_of_fresh
    optimizer.load_state_dict = load_with_separate_steps
    optimizer._set_main_param_and_optimizer_states = set_states


def _begin_state(adam: Any) -> None:
    """Give ``adam``, torch's or Megatron's hybrid one, the state before its first step if it has none."""
    parts = getattr(adam, "sub_optimizers", None)
    for part in [adam] if parts is None else parts:
        for group in part.param_groups:
            for parameter in group["params"]:
                if not part.state[parameter]:
                    part.state[parameter] = _fresh_state(parameter, is_fused=group["fused"])
    if parts is not None:
        adam._sync_sub_optimizers_state_to_hdo()


def _state_of_nothing(adam: torch.optim.Optimizer) -> dict[str, Any]:
    groups = ({**group, "step": 0.0} for group in adam.state_dict()["param_groups"])
    return {"optimizer": {"param_groups": [_without(group, {"params"}) for group in groups]}}


def _without(group: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in names}


def _fresh_state(parameter: torch.Tensor, *, is_fused: bool) -> dict[str, torch.Tensor]:
    return {
        "step": torch.zeros((), device=parameter.device if is_fused else "cpu"),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _patch_optimizer_config(module: Any) -> None:
    """optimizer/optimizer_config.py:383 compares the version of TransformerEngine, None, with 2.1.

    Can go when utils.is_te_min_version works without it.
    """
    if find_spec("transformer_engine") is None:
        module.is_te_min_version = lambda version: False


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW for the part of a hybrid optimizer on the host; a separate class, see ``_patch_optimizer``."""


def _patch_optimizer(module: Any) -> None:
    """optimizer/__init__.py:9 and :31 use one class for both parts of a hybrid optimizer, so
    cpu_offloading/hybrid_optimizer.py:359 then takes the state of either for that of the host.

    Can go when upstream checks the parameter's device.
    """
    if module.USING_PYTORCH_OPTIMIZER:
        module.CPUAdam = HostAdamW


_PATCHES: dict[str, Callable[[Any], None]] = {
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils,
    "megatron.core.transformer.multi_latent_attention": _patch_mla,
    "megatron.core.optimizer": _patch_optimizer,
    "megatron.core.optimizer.optimizer_config": _patch_optimizer_config,
    "megatron.core.optimizer.distrib_optimizer": _patch_distributed_optimizer,
}
