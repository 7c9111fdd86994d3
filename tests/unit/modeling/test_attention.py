"""The kernel for sequences of unequal length and padded batches give the same numbers, to a loop and flex_attention."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from slime_core.modeling.rows import Gather, Sequences, attend_padded, attend_spans, takes_spans, zigzag

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def loop(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What ``varlen_attn`` documents, one sequence after the other: causal, aligned to the end of the keys."""
    assert window_size == (-1, 0)
    assert query.size(-1) == key.size(-1) == value.size(-1)
    assert query.size(-1) % 8 == 0
    assert (max_q, max_k) == tuple(int(cu.diff().max()) for cu in (cu_q, cu_k))
    assert (cu_q.dtype, cu_k.dtype) == (torch.int32, torch.int32)
    assert enable_gqa == (query.size(1) != key.size(1))
    found = []
    for (q, q_end), (k, k_end) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        groups = query.size(1) // key.size(1)
        keys, values = (part[k:k_end].repeat_interleave(groups, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[q:q_end], keys) * scale
        hidden = torch.ones(q_end - q, k_end - k).triu(k_end - k - (q_end - q) + 1).bool()
        found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(found)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", loop)


def sequences(seed: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ends, what each sequence continues, and the tokens with two of padding; those after the first may be empty."""
    random = np.random.default_rng(seed)
    lengths, continues = [], []
    for _ in range(4):
        head = len(lengths)
        lengths.append(int(random.integers(1, 5)))
        continues.append(-1)
        for _ in range(random.integers(0, 4)):
            continues.append(int(random.integers(head, len(lengths))))
            lengths.append(int(random.integers(0, 9)))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return ends, torch.tensor(continues, dtype=torch.int32), int(ends[-1]) + 2


def inputs(tokens: int, heads: tuple[int, int], sizes: tuple[int, int], *, seed: int = 0) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    shapes = [(heads[0], sizes[0]), (heads[1], sizes[0]), (heads[1], sizes[1])]
    q, k, v = (torch.randn(tokens, *shape, generator=random, requires_grad=True) for shape in shapes)
    return q, k, v


SHAPES = {
    "plain": ((2, 2), (8, 8)),
    "grouped heads": ((4, 2), (16, 16)),
    "an odd size": ((2, 1), (6, 6)),
    "latent attention": ((2, 2), (24, 16)),
    "values wider than keys": ((2, 2), (8, 12)),
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared", [False, True])
def test_both_give_the_same_numbers_and_gradients(shape, shared):
    for seed in range(3):
        ends, continues, tokens = sequences(seed)
        row: dict[str, Any] = {"num_tokens": tokens, "continues": continues if shared else None}
        q, k, v = inputs(tokens, *SHAPES[shape], seed=seed)
        found = attend_spans(q, k, v, Sequences.of(ends, **row).spans, scale=None)
        expected = attend_padded(q, k, v, Sequences.of(ends, **row).packing, scale=None)
        assert torch.allclose(found, expected, atol=1e-6)
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(seed))
        mine = torch.autograd.grad((found * weights).sum(), (q, k, v))
        theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_a_row_give_what_one_rank_gives(size):
    random = np.random.default_rng(size)
    for _ in range(5):
        ends = torch.tensor(np.concatenate([[0], random.integers(1, 12, 6).cumsum()]), dtype=torch.int32)
        tokens = int(ends[-1]) + -int(ends[-1]) % (2 * size)
        q, k, v = inputs(tokens, (4, 2), (8, 8))
        expected = attend_padded(q, k, v, Sequences.of(ends, num_tokens=tokens).packing, scale=None)
        held = [zigzag(tokens, rank=rank, size=size) for rank in range(size)]
        everywhere = [part[np.concatenate(held)] for part in (k, v)]
        for rank, mine in enumerate(held):
            share = Sequences.of_rank(ends.clone(), num_tokens=len(mine), rank=rank, size=size)
            keys = everywhere if share.exchanges else [part[mine] for part in (k, v)]
            for found in (
                attend_spans(q[mine], *keys, share.spans, scale=None),
                attend_padded(q[mine], *keys, share.packing, scale=None),
            ):
                assert torch.allclose(found, expected[mine], atol=1e-6)


def test_a_kernel_without_grouped_heads_gets_keys_for_every_query_head(monkeypatch):
    def old_kernel(*arguments, scale, window_size):  # varlen_attn of torch 2.11
        return loop(*arguments, scale=scale, window_size=window_size, enable_gqa=False)

    monkeypatch.setattr(varlen, "varlen_attn", old_kernel)
    ends, continues, tokens = sequences(3)
    row = Sequences.of(ends, num_tokens=tokens, continues=continues)
    q, k, v = inputs(tokens, (4, 2), (16, 16))
    found = attend_spans(q, k, v, row.spans, scale=None)
    assert torch.allclose(found, attend_padded(q, k, v, row.packing, scale=None), atol=1e-6)


# --- Which kernel -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "dtype", "size", "taken"),
    [
        ("cuda", torch.bfloat16, 128, True),
        ("cuda", torch.float16, 256, True),
        ("cuda", torch.float32, 128, False),
        ("cuda", torch.bfloat16, 264, False),
        ("cpu", torch.bfloat16, 128, False),
    ],
)
def test_the_kernel_for_unequal_lengths_takes_half_precision_on_cuda(device, dtype, size, taken):
    with FakeTensorMode():
        assert takes_spans(torch.empty(3, 2, size, dtype=dtype, device=device)) is taken


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_takes_the_call_forward_and_backward(shape):
    """torch's own operator, on tensors that have shapes and no numbers."""
    ends, continues, tokens = sequences(1)
    spans = Sequences.of(ends, num_tokens=tokens, continues=continues).spans
    keys = spans.gather_keys
    on_device = replace(
        spans,
        cu_queries=spans.cu_queries.to("meta"),
        cu_keys=spans.cu_keys.to("meta"),
        gather_keys=Gather(
            keys.rows_S.to("meta"), tuple((tokens_of.to("meta"), slots.to("meta")) for tokens_of, slots in keys.sources)
        ),
    )
    heads, sizes = SHAPES[shape]
    parts = [part.detach().to("meta", torch.bfloat16).requires_grad_() for part in inputs(tokens, heads, sizes)]
    output = attend_spans(parts[0], parts[1], parts[2], on_device, scale=0.3)
    assert (output.shape, output.dtype) == ((tokens, heads[0] * sizes[1]), torch.bfloat16)
    gradients = torch.autograd.grad(output, parts, torch.empty_like(output))
    assert [gradient.shape for gradient in gradients] == [part.shape for part in parts]
