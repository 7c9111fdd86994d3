"""Implementations that a learner process computes with, chosen once, before its first pass.

Choice             what is used for one part of the model, and why; printed and recorded by the run
choose_attention   FlashAttention 4 if it works here and agrees with FlashAttention 2, else FlashAttention 2
compile_pointwise  rotary embeddings and SwiGLU by torch.compile
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.distributed as dist
from torch.nn import attention

from slime_core.errors import ConfigError, RunError
from slime_core.modeling.mlp import Function, compile_swiglu
from slime_core.modeling.rows import LARGEST_HEAD, Sequences, attend_spans
from slime_core.user_code.failures import boundary

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["Choice", "Heads", "choose_attention", "compile_pointwise"]


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation of one part of the model.

    Example: ``Choice("fa2", "FlashAttention 4: a test call failed with ModuleNotFoundError: ...")``.

    Arguments:
        used: its name.
        because: the reason, if another one would be preferred; else empty.
    """

    used: str
    because: str = ""

    def __str__(self) -> str:
        return f"{self.used} ({self.because})" if self.because else self.used


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of heads of queries and of keys on one rank; entries of a query or key head, and of a value head."""

    queries: int
    keys: int
    size: int
    value_size: int

    @classmethod
    def of(cls, config: TransformerConfig) -> Heads:
        """Return the heads of a Megatron model on one tensor-parallel rank."""
        ranks = config.tensor_model_parallel_size
        queries = config.num_attention_heads // ranks
        if config.multi_latent_attention:
            return cls(queries, queries, config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim)
        keys = max((config.num_query_groups or config.num_attention_heads) // ranks, 1)
        return cls(queries, keys, config.kv_channels, config.kv_channels)


def choose_attention(
    requested: Literal["auto", "fa2", "fa4"], heads: Heads, *, device: torch.device, dtype: torch.dtype
) -> Choice:
    """Activate the version of FlashAttention that all ranks of this process group can use; return its name. Collective.

    FlashAttention 4 replaces torch's FlashAttention 2 for the whole process, after a test row gave the same outputs and
    gradients with both. In float32, on a CPU and for larger heads torch's other kernels are used: ``sdpa``.

    Raises:
        ConfigError: FlashAttention 4 was requested and cannot be used.
    """
    if device.type != "cuda" or dtype is torch.float32 or heads.size > LARGEST_HEAD:
        problem = f"FlashAttention takes bfloat16 heads of at most {LARGEST_HEAD} entries on GPUs"
        used = "sdpa"
    else:
        problem = "" if requested == "fa2" else _problem_of_fa4(heads, device)
        used = "fa2" if problem or requested == "fa2" else "fa4"
    if requested == "fa4" and problem:
        raise ConfigError(f"flash_attention = fa4: {problem}; leave --flash-attention out, or choose fa2")
    return Choice(used, problem if used == "fa2" else "")


def _problem_of_fa4(heads: Heads, device: torch.device) -> str:
    """Activate FlashAttention 4 on all ranks, or on none; return the reason if it cannot be used, else ""."""
    problem = ""
    try:
        with boundary("FlashAttention 4", "a test call", error=RunError):
            expected = _attend_test_row(heads, device)
            attention.activate_flash_attention_impl("FA4")
            results = _attend_test_row(heads, device)
        difference = max(map(_difference, results, expected))
        if not difference < LARGEST_DIFFERENCE:
            problem = f"FlashAttention 4 differs from FlashAttention 2 by {difference:.0%} on a test row"
    except RunError as error:
        problem = f"{error}".splitlines()[0]
    agreed = torch.tensor(int(not problem), device=device)
    if dist.is_initialized():
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    if not agreed:
        problem = problem or "FlashAttention 4 does not work on another rank"
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
    return problem


LARGEST_DIFFERENCE = 0.02
"""Accepted norm of the difference of two kernels, by that of their results. Results are rounded to 2^-9 in bfloat16; a
wrong mask or a missing sequence differs by more than a tenth."""


def _attend_test_row(heads: Heads, device: torch.device) -> list[torch.Tensor]:
    """Return outputs and gradients for a row of a prompt, two responses that continue it, and a longer sequence."""
    ends = torch.tensor([0, 70, 71, 135, 400], dtype=torch.int32, device=device)
    continues = torch.tensor([-1, 0, 0, -1])
    num_tokens = int(ends[-1])
    spans = Sequences.of(ends, num_tokens=num_tokens, continues=continues).spans
    random = torch.Generator().manual_seed(0)
    shapes = ((heads.queries, heads.size), (heads.keys, heads.size), (heads.keys, heads.value_size))
    inputs = [
        torch.randn(num_tokens, *shape, generator=random).to(device, torch.bfloat16).requires_grad_()
        for shape in shapes
    ]
    slope = torch.randn(num_tokens, heads.queries * heads.value_size, generator=random).to(device, torch.bfloat16)
    query, key, value = inputs
    with torch.enable_grad():
        output = attend_spans(query, key, value, spans, scale=None)
        return [output.detach(), *torch.autograd.grad(output, inputs, slope)]


def _difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def compile_pointwise(backend: str = "inductor") -> None:
    """Let torch.compile fuse the rotary embedding and SwiGLU of this process; a second call changes nothing.

    Fused kernels round to bfloat16 once instead of after each operation, so results differ in their last bits.

    Arguments:
        backend: of torch.compile.
    """
    from megatron.core.models.common.embeddings import rope_utils

    def compile_function(function: Function, /) -> Function:
        # Rows differ in length: one graph for all of them.
        return cast("Function", torch.compile(function, backend=backend, dynamic=True, fullgraph=True))

    if not hasattr(rope_utils._apply_rotary_pos_emb_bshd, "_torchdynamo_orig_callable"):
        rope_utils._apply_rotary_pos_emb_bshd = compile_function(rope_utils._apply_rotary_pos_emb_bshd)
        compile_swiglu(compile_function)
