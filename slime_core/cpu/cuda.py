"""What ``torch.cuda`` means to Megatron-core and mbridge where there is no GPU."""

from __future__ import annotations

import contextlib
import types
from typing import Any, Self

import torch

__all__ = ["CUDA"]

_CPU = torch.device("cpu")


class _Inert:
    """A stream, event, graph or memory pool: on a CPU a call returns when its work is done, nothing needs order."""

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


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _inert(*_: Any, **__: Any) -> _Inert:
    return _Inert()


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def _properties(*_: Any, **__: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=1)


#: What ``torch.cuda`` means in a rewritten file. A name that is missing here raises AttributeError where it is used.
CUDA = types.SimpleNamespace(
    is_available=lambda: False,
    is_initialized=lambda: False,
    device_count=lambda: 1,
    current_device=lambda: _CPU,
    get_device_capability=lambda *_: (0, 0),
    get_device_properties=_properties,
    get_rng_state=_get_rng_state,
    set_rng_state=_set_rng_state,
    random=types.SimpleNamespace(get_rng_state=_get_rng_state, set_rng_state=_set_rng_state),
    manual_seed=_manual_seed,
    manual_seed_all=_manual_seed,
    default_generators=(torch.default_generator,),
    set_device=_nothing,
    set_stream=_nothing,
    synchronize=_nothing,
    empty_cache=_nothing,
    ipc_collect=_nothing,
    reset_peak_memory_stats=_nothing,
    memory_allocated=_zero,
    memory_reserved=_zero,
    max_memory_allocated=_zero,
    max_memory_reserved=_zero,
    memory_stats=lambda *_, **__: {},
    current_stream=_inert,
    default_stream=_inert,
    stream=lambda *_, **__: contextlib.nullcontext(),
    device=lambda *_, **__: contextlib.nullcontext(),
    nvtx=types.SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    Stream=_Inert,
    ExternalStream=_Inert,
    Event=_Inert,
    CUDAGraph=type("CUDAGraph", (_Inert,), {}),
    MemPool=type("MemPool", (_Inert,), {}),
    FloatTensor=torch.FloatTensor,
    HalfTensor=torch.HalfTensor,
    BFloat16Tensor=torch.BFloat16Tensor,
    OutOfMemoryError=torch.cuda.OutOfMemoryError,
    amp=torch.cuda.amp,
)
