"""Lets Megatron-core and mbridge run without a GPU, after one call to :func:`install`.

The syntax tree of each source file of ``megatron.core`` or ``mbridge`` is rewritten on import:

    torch.cuda.x                      x of :data:`CUDA`, which only these files use
    "cuda"                            "cpu"      (``device="cuda"``)
    "torch.cuda.FloatTensor"          "torch.FloatTensor"      (the optimizers compare ``parameter.type()`` with it)
    x.cuda(...), x.pin_memory()       x.cpu()
    pin_memory=True                   pin_memory=False

Line numbers do not change, so tracebacks match the installed files. torch and all other libraries are unchanged: a
global patch of ``torch.cuda`` would disturb Ray and transformers, and would not change the ``"cuda"`` literals. The
rewriting can go once Megatron-core takes its device from the process group.

Then :data:`_PATCHES` change functions of the imported module. Each names its upstream line (megatron-core 0.16.1) and
says when it can go.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import logging
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from slime_core.modeling import patches


def install() -> None:
    """Rewrite and patch later imports of Megatron-core and mbridge. A second call has no effect.

    Raises:
        RunError: Megatron-core is already imported.
    """
    patches.install(_Loader)


# --- The import hook --------------------------------------------------------------------------------------------------

_NAME = "_slime_cuda"


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


class _Loader(patches.Loader):
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
        if module.__name__ in _PATCHES:
            _PATCHES[module.__name__](module)


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

    Can go when gloo does not copy such a buffer; NCCL does not.
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


def all_gather_parts(
    part: torch.Tensor, sizes: Sequence[int], *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the parts of all ranks, concatenated: ``[sum(sizes), ...]``, in the dtype of ``part``. Collective.

    Arguments:
        part: this rank's part, ``[sizes[its rank], ...]``.
        sizes: rows of each rank's part, in the order of the group, the same on every rank; may be 0.
        group: the process group. By default all ranks.
    """
    if not (most := max(sizes)):
        return part
    filled = _filled(part, most)
    gathered = part.new_empty(most * len(sizes), *part.shape[1:])
    dist.all_gather_into_tensor(gathered, filled, group=group)
    return torch.cat([rows[:size] for rows, size in zip(gathered.split(most), sizes, strict=True)])


def reduce_scatter_parts(
    parts: torch.Tensor, sizes: Sequence[int], *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Sum ``parts`` over all ranks; return this rank's part: ``[sizes[its rank], ...]``. Collective.

    This is the derivative of :func:`all_gather_parts`.

    Arguments:
        parts: the concatenated parts, ``[sum(sizes), ...]``; the dtype of the sum is the same.
        sizes: rows of each rank's part, in the order of the group, the same on every rank; may be 0.
        group: the process group. By default all ranks.
    """
    if not (most := max(sizes)):
        return parts
    filled = torch.cat([_filled(part, most) for part in parts.split(list(sizes))])
    mine = parts.new_empty(most, *parts.shape[1:])
    dist.reduce_scatter_tensor(mine, filled, group=group)
    return mine[: sizes[dist.get_rank(group)]]


def _filled(part: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])])


_PATCHES: dict[str, Callable[[Any], None]] = {
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
