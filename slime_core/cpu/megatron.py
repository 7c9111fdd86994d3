"""Lets Megatron-core and mbridge run without TransformerEngine and without a GPU, after one call to :func:`install`.

There are two kinds of patches, applied after the import of a module of Megatron. Each names its upstream line
(megatron-core 0.16.1) and says when it can go:

    :data:`_LIBRARY_PATCHES`   if TransformerEngine and Apex are missing, with or without a GPU
    :data:`_DEVICE_PATCHES`    if there is no GPU

Without a GPU, the syntax tree of each source file of ``megatron.core`` or ``mbridge`` is rewritten on import:

    torch.cuda.x                      x of :data:`CUDA`, which only these files use
    "cuda"                            "cpu"      (``device="cuda"``)
    "torch.cuda.FloatTensor"          "torch.FloatTensor"      (the optimizers compare ``parameter.type()`` with it)
    x.cuda(...), x.pin_memory()       x.cpu()
    pin_memory=True                   pin_memory=False

Line numbers do not change, so tracebacks match the installed files. torch and all other libraries are unchanged: a
global patch of ``torch.cuda`` would disturb Ray and transformers, and would not change the ``"cuda"`` literals.

The rewriting can go once Megatron-core takes its device from the process group.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
import warnings
from collections.abc import Callable, Sequence, Set
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from slime_core.errors import RunError


def all_gather_parts(
    part: torch.Tensor, sizes: Sequence[int], *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the parts of all ranks, concatenated: ``[sum(sizes), ...]``, in the dtype of ``part``. Collective.

    Arguments:
        part: this rank's part, ``[sizes[its rank], ...]``.
        sizes: rows of each rank's part, in the order of the group, the same on every rank; may be 0.
        group: the process group; None: all ranks.
    """
    if not (most := max(sizes)):
        return part
    filled = _filled(part, most)
    gathered = part.new_empty(most * len(sizes), *part.shape[1:])
    dist.all_gather_into_tensor(gathered, filled, group=group)
    return torch.cat([rows[:size] for rows, size in zip(gathered.split(most), sizes, strict=True)])


def reduce_scatter_parts(
    whole: torch.Tensor, sizes: Sequence[int], *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Sum ``whole`` over all ranks; return this rank's part: ``[sizes[its rank], ...]``. Collective.

    This is the derivative of :func:`all_gather_parts`.

    Arguments:
        whole: the concatenated parts, ``[sum(sizes), ...]``; they are summed in their own dtype.
        sizes: rows of each rank's part, in the order of the group, the same on every rank; may be 0.
        group: the process group; None: all ranks.
    """
    if not (most := max(sizes)):
        return whole
    filled = torch.cat([_filled(part, most) for part in whole.split(list(sizes))])
    mine = whole.new_empty(most, *whole.shape[1:])
    dist.reduce_scatter_tensor(mine, filled, group=group)
    return mine[: sizes[dist.get_rank(group)]]


def _filled(part: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])])


_PREFIXES = ("megatron.core.", "mbridge.")
_NAME = "_slime_cuda"


def install() -> None:
    """Patch later imports of Megatron-core and mbridge to work without TransformerEngine, Apex and, if none, a GPU.

    If torch sees a GPU, nothing that concerns the device is changed. A second call has no effect.

    Call it first in every process that imports Megatron: a learner rank, a Ray actor, a conversion.

    Raises:
        RunError: Megatron-core is already imported, so its modules can no longer be patched.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = sorted(name for name in sys.modules if f"{name}.".startswith("megatron.core."))
    if early:
        raise RunError(
            f"slime_core.cpu.megatron.install() came too late: {early[0]} and {len(early) - 1} more modules are "
            "already imported; call it before anything imports megatron.core or mbridge"
        )
    sys.meta_path.insert(0, _Finder(_Loader if torch.cuda.is_available() else _CPULoader))


# --- The import hook --------------------------------------------------------------------------------------------------


class _Rewrite(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_NAME, node.ctx), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg == "pin_memory" and isinstance(keyword.value, ast.Constant):
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("cuda", "pin_memory"):
            moved = ast.copy_location(ast.Attribute(node.func.value, "cpu", ast.Load()), node)
            return ast.copy_location(ast.Call(moved, [], []), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if node.value in _LITERALS:
            return ast.copy_location(ast.Constant(_LITERALS[node.value]), node)
        return node


_LITERALS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


_MARK = "slime-" + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
"""Part of the name of the byte code that this file writes; another version of this file compiles again."""


def _cached_path(path: str) -> str:
    # Processes without the hook use module.cpython-311.pyc; with it, module.cpython-311.slime-0123456789ab.pyc.
    name, dot, suffix = path.rpartition(".")
    return f"{name}.{_MARK}.pyc" if dot + suffix == ".pyc" else path


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module unchanged, then patches code that expects TransformerEngine or Apex."""

    def exec_module(self, module: types.ModuleType) -> None:
        # Suppresses about ten warnings that Apex and TransformerEngine are missing, which is expected here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().exec_module(module)
        if module.__name__ in _LIBRARY_PATCHES:
            _LIBRARY_PATCHES[module.__name__](module)


class _CPULoader(_Loader):
    """Compiles the rewritten source, about 2 s for all of Megatron, and caches the byte code like Python does."""

    def source_to_code(self, data: Any, path: Any, **settings: Any) -> types.CodeType:  # type: ignore[override]
        tree = _Rewrite().visit(ast.parse(data, path))
        code: types.CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code

    def get_data(self, path: str) -> bytes:
        return super().get_data(_cached_path(path))

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(_cached_path(path), data, _mode=_mode)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__[_NAME] = CUDA
        super().exec_module(module)
        if module.__name__ in _DEVICE_PATCHES:
            _DEVICE_PATCHES[module.__name__](module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, loader: type[_Loader]) -> None:
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


def _patch_jit(module: Any) -> None:
    """jit.py:21 passes some twenty one-line functions to torch.compile, which takes minutes of C++ on a CPU.

    Can go when the choice becomes a setting.
    """
    module.disable_jit_fuser()


def _patch_random(module: Any) -> None:
    """tensor_parallel/random.py:40-118 queue the state setters until CUDA starts, which never happens.

    Can go when they use the device type.
    """
    module._get_cuda_rng_state = CUDA.get_rng_state
    module._set_cuda_rng_state = CUDA.set_rng_state
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _patch_mappings(module: Any) -> None:
    """tensor_parallel/mappings.py:130 and :173 pass parts of unequal size to torch.distributed, which gloo refuses.

    Ranks that share an expert's matrices receive unequal numbers of tokens if experts are distributed as well. Can go
    when gloo accepts unequal parts, as NCCL does.
    """
    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_parts(input_: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        return all_gather_parts(input_, output_split_sizes, group=group)

    def scatter_parts(input_: Any, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        return reduce_scatter_parts(input_, input_split_sizes, group=group)

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather_parts, scatter_parts


def _patch_param_and_grad_buffer(module: Any) -> None:
    """distributed/param_and_grad_buffer.py:285 and :443 exchange parts of a buffer in place, also in a group of one
    rank, which has nothing to exchange; gloo then copies all weights, and all gradients, to new memory and back.

    Can go when gloo leaves such a buffer as it is, as NCCL does.
    """

    def unless_alone(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def exchange_parts(output: torch.Tensor, part: torch.Tensor, **options: Any) -> Any:
            # An asynchronous call returns what its caller waits for.
            is_alone = options["group"].size() == 1 and not options["async_op"]
            if is_alone and output.data_ptr() == part.data_ptr():
                return None
            return exchange(output, part, **options)

        return exchange_parts

    module.dist_all_gather_func = unless_alone(module.dist_all_gather_func)
    module.dist_reduce_scatter_func = unless_alone(module.dist_reduce_scatter_func)


def _patch_moe_utils_on_cpu(module: Any) -> None:
    """moe/moe_utils.py:1093 returns a CPU tensor unchanged although a numpy array was requested.

    Can go when upstream honours ``as_numpy`` on every device.
    """

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


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
"""Entries of a parameter group that describe how and where this run computes. They do not come from a checkpoint; and
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
        found = state_dict(self) if self.optimizer.state else _state_of_nothing(self.optimizer)
        groups = found["optimizer"]["param_groups"]
        found["optimizer"]["param_groups"] = [_without(group, _OF_THE_RUN) for group in groups]
        return found

    def load_with_own_steps(self: Any, loaded: Any) -> None:
        _begin_state(self.optimizer)
        own = {name: value for name, value in self.optimizer.param_groups[0].items() if name in _OF_THE_RUN}
        for group in loaded["optimizer"]["param_groups"]:
            group |= own
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
    optimizer.load_state_dict = load_with_own_steps
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


_LIBRARY_PATCHES: dict[str, Callable[[Any], None]] = {
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils,
    "megatron.core.transformer.multi_latent_attention": _patch_mla,
    "megatron.core.optimizer": _patch_optimizer,
    "megatron.core.optimizer.optimizer_config": _patch_optimizer_config,
    "megatron.core.optimizer.distrib_optimizer": _patch_distributed_optimizer,
}

_DEVICE_PATCHES: dict[str, Callable[[Any], None]] = {
    "megatron.core.jit": _patch_jit,
    "megatron.core.distributed.param_and_grad_buffer": _patch_param_and_grad_buffer,
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.tensor_parallel.mappings": _patch_mappings,
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils_on_cpu,
}


_CPU = torch.device("cpu")


class _Inert:
    """A stream, event, graph or memory pool: CPU calls return when their work is done, so nothing is ordered."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Inert:
        return _Inert()

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


def _inert(*_: Any, **__: Any) -> _Inert:
    return _Inert()


#: Replacement of ``torch.cuda`` in a rewritten file. A name that is missing here raises AttributeError when it is used.
CUDA = types.SimpleNamespace(
    is_available=lambda: False,
    device_count=lambda: 1,
    current_device=lambda: _CPU,
    get_rng_state=lambda *_, **__: torch.get_rng_state(),
    set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    manual_seed=torch.manual_seed,
    default_generators=(torch.default_generator,),
    **dict.fromkeys(("set_device", "set_stream", "synchronize", "empty_cache"), _nothing),
    **dict.fromkeys(("current_stream", "default_stream"), _inert),
    **dict.fromkeys(("Stream", "ExternalStream", "Event", "CUDAGraph", "MemPool"), _Inert),
    stream=lambda *_, **__: contextlib.nullcontext(),
    nvtx=types.SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    FloatTensor=torch.FloatTensor,
    HalfTensor=torch.HalfTensor,
    BFloat16Tensor=torch.BFloat16Tensor,
    OutOfMemoryError=torch.cuda.OutOfMemoryError,
    amp=torch.cuda.amp,
)
