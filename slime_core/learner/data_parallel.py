"""Megatron's DDP that exchanges gradients during the backward pass, and weights during the next forward pass.

Each bucket of parameters is exchanged as soon as it can be. Megatron's own bookkeeping expects that every micro-batch
reaches every parameter in one order on all ranks. Here a rank may differ: its last loss needs no gradient, or its
samples bring no images. So gradients are exchanged in the order of the buckets, those that the backward pass has not
exchanged follow at its end, and the weights of all buckets are requested right after a step, in the order in which the
forward pass reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer

from slime_core.errors import RunError


class OverlappingDDP(DistributedDataParallel):  # type: ignore[misc]
    """Overlaps what its ``ddp_config`` names: ``overlap_grad_reduce``, ``overlap_param_gather``.

    After :meth:`start_gather` only the forward pass may read weights, which waits for those that it needs; for
    everything else, call :meth:`finish_gather` first.
    """

    def __init__(self, **options: Any) -> None:
        # How often the last micro-batch adds to each gradient; more than once if recomputed layers share the parameter.
        self._additions: Counter[torch.nn.Parameter] = Counter()
        self._expected: Counter[torch.nn.Parameter] = Counter()
        self._missing: dict[Any, set[torch.nn.Parameter]] = {}
        self._groups_read: dict[torch.nn.Module, list[Any]] = {}
        super().__init__(**options)

    def _make_backward_post_hook(self, param: Any) -> Callable[..., None]:
        def add(*_: object) -> None:
            group = self.param_to_bucket_group[param]
            if group.grad_reduce_handle is not None:
                raise RunError(
                    "a backward pass reached a parameter more often than in the steps before, when its gradient was "
                    "exchanged already; leave overlap_grad_reduce out"
                )
            if param.grad is not None:
                param.main_grad.add_(param.grad)
                param.grad = None
            if self.ddp_config.overlap_grad_reduce and group.is_last_microbatch:
                self._count(param, group)

        return add

    def _count(self, param: torch.nn.Parameter, group: Any) -> None:
        self._additions[param] += 1
        if not self._expected or self._additions[param] < self._expected[param]:
            return
        missing = self._missing.setdefault(group, set(group.params))
        missing.discard(param)
        if missing:
            return
        # In the order of the buckets, which is that of the backward pass, on every rank.
        for groups in (self.bucket_groups, self.expert_parallel_bucket_groups):
            for bucket_group in groups:
                if self._missing.get(bucket_group, bucket_group.params):
                    break
                if bucket_group.grad_reduce_handle is None:
                    bucket_group.start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Exchange the gradients that the backward pass has not exchanged, and wait for all of them."""
        super().finish_grad_sync(force_all_reduce)
        self._expected |= self._additions  # of each parameter, the largest number
        self._additions.clear()
        self._missing.clear()

    def _make_forward_pre_hook(self) -> Callable[..., None]:
        def wait(module: torch.nn.Module, *_: object) -> None:
            if module not in self._groups_read:
                self._groups_read[module] = list(self._groups_of(module))
            _finish(self._groups_read[module])

        return wait

    def _groups_of(self, module: torch.nn.Module) -> Iterator[Any]:
        """Yield the bucket groups whose weights the forward pass of ``module`` may read.

        A layer may read the weights of a part without calling it, as the experts of a mixture do; a module that has
        layers may not.
        """
        has_layers = any(isinstance(part, TransformerLayer) for part in module.modules() if part is not module)
        params = (param for param in module.parameters(recurse=not has_layers) if param in self.param_to_bucket_group)
        yield from dict.fromkeys(self.param_to_bucket_group[param] for param in params)

    def start_gather(self) -> None:
        """Request the weights of the last step from the ranks that have them."""
        for groups in (self.bucket_groups, self.expert_parallel_bucket_groups):
            for group in reversed(groups):  # the last bucket has the first layers
                group.start_param_sync()

    def finish_gather(self) -> None:
        """Wait until this rank has all weights of the last step."""
        _finish([*self.bucket_groups, *self.expert_parallel_bucket_groups])


def _finish(groups: list[Any]) -> None:
    for group in groups:
        if group.param_gather_handle is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
