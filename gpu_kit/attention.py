"""Part 2: attention over packed rows, as the learner calls it, against a loop in float32.

On CUDA it is ``varlen_attn`` in bfloat16, on a CPU batches of padded sequences. The loop derives the keys of a sequence
from lengths and from what it continues, and holds a block of scores at a time, so that it takes long rows too.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_kit.report import DEVICE, ON_GPU, digest, report, report_difference, report_equal, seconds, sized
from slime_core.modeling.rows import Sequences, attend

LIMIT = 0.02
"""Of differences: bfloat16 has 8 bits, and a probability is rounded before it is multiplied by a value."""

BLOCK = 512
"""Queries of the loop at a time."""


@dataclass(frozen=True)
class Case:
    """Sequences of a row; heads of queries and keys; sizes of keys and values; what each sequence continues."""

    lengths: list[int]
    heads: tuple[int, int] = (16, 8)
    sizes: tuple[int, int] = (128, 128)
    continues: list[int] | None = None


GENERATOR = torch.Generator().manual_seed(0)
GROUPED, LONG = "heads 16/8 x 128", sized("one row of 32,768", "one row of 100")
CASES = {
    GROUPED: Case(sized([1024] * 6 + [1500, 548], [48, 30, 1])),
    "8 responses that share a prompt": Case(
        sized([1024, 512, 300, 700, 512, 1, 900, 64, 128], [32, 8, 17, 1]),
        continues=sized([-1] + [0] * 8, [-1, 0, 0, 0]),
    ),
    "sizes 192/128 (latent attention)": Case(sized([2048] * 2, [40, 24]), heads=(16, 16), sizes=(192, 128)),
    "256 short rows": Case(torch.randint(sized(16, 1), sized(65, 4), (256,), generator=GENERATOR).tolist()),
    LONG: Case([sized(32_768, 100)], heads=sized((16, 8), (4, 2))),
}

PARTS = ("output", "gradient of q", "gradient of k", "gradient of v")

Tensors = list[torch.Tensor]


def main() -> None:
    """Report all cases, then times beside SDPA."""
    report("kernel", "varlen_attn, bfloat16" if ON_GPU else "padded batches of SDPA, bfloat16, small sizes")
    for name, case in CASES.items():
        inputs, gradient = draw(case)
        found, again = run(case, inputs, gradient), run(case, inputs, gradient)
        exact = loop(case, inputs, gradient)
        for part, value, reference in zip(PARTS, found, exact, strict=True):
            report_difference(f"{name}: {part}", value, reference, limit=LIMIT)
        report_equal(f"{name}: output twice", digest(found[:1]) == digest(again[:1]))
        same = digest(found) == digest(again)
        if ON_GPU:  # equal only with deterministic algorithms
            report(f"{name}: gradients twice", "equal bits" if same else "different bits")
        else:
            report_equal(f"{name}: gradients twice", same)
    for name in (GROUPED, LONG):
        compare_with_sdpa(CASES[name])


def draw(case: Case) -> tuple[Tensors, torch.Tensor]:
    """Return random queries, keys and values, and a gradient of the output."""
    tokens, (heads, key_heads), (size, value_size) = sum(case.lengths), case.heads, case.sizes
    shapes = [(heads, size), (key_heads, size), (key_heads, value_size), (heads * value_size,)]
    *inputs, gradient = (
        torch.randn(tokens, *shape, generator=GENERATOR).to(DEVICE, torch.bfloat16) for shape in shapes
    )
    return inputs, gradient


def sequences_of(case: Case) -> Sequences:
    ends = torch.tensor([0, *case.lengths]).cumsum(0).to(DEVICE, torch.int32)
    continues = None if case.continues is None else torch.tensor(case.continues)
    return Sequences.of(ends, num_tokens=sum(case.lengths), continues=continues)


def run(case: Case, inputs: Tensors, gradient: torch.Tensor, sequences: Sequences | None = None) -> Tensors:
    """Return the output and the gradients of queries, keys and values."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    query, key, value = leaves
    output = attend(query, key, value, sequences or sequences_of(case), scale=None)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


def loop(case: Case, inputs: Tensors, gradient: torch.Tensor) -> Tensors:
    """Return the result of :func:`run` in float32."""
    leaves = [tensor.float().requires_grad_() for tensor in inputs]
    gradients, outputs, groups = gradient.float(), [], case.heads[0] // case.heads[1]
    starts = [sum(case.lengths[:number]) for number in range(len(case.lengths))]
    for number, (start, length) in enumerate(zip(starts, case.lengths, strict=True)):
        before = -1 if case.continues is None else case.continues[number]
        keys = list(range(start, start + length))
        while before >= 0:
            keys = [*range(starts[before], starts[before] + case.lengths[before]), *keys]
            before = -1 if case.continues is None else case.continues[before]
        keys_K, path = torch.tensor(keys, device=DEVICE), len(keys) - length
        for first in range(0, length, BLOCK):
            last = min(first + BLOCK, length)
            seen = keys_K[: path + last]
            query = leaves[0][start + first : start + last]
            key, value = (leaf[seen].repeat_interleave(groups, dim=1) for leaf in leaves[1:])
            scores = torch.einsum("qhd,khd->hqk", query, key) * case.sizes[0] ** -0.5
            hidden = torch.ones(last - first, len(seen), device=DEVICE).triu(path + first + 1).bool()
            output = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).flatten(1)
            output.backward(gradients[start + first : start + last])
            outputs.append(output.detach())
    return [torch.cat(outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare_with_sdpa(case: Case) -> None:
    """Report forward and backward seconds beside SDPA's over a batch of equal sequences with as many tokens."""
    length = max(case.lengths) if len(case.lengths) == 1 else sum(case.lengths) // len(case.lengths)
    case = Case([length] * (sum(case.lengths) // length), heads=case.heads)
    inputs, gradient = draw(case)
    sequences = sequences_of(case)
    query, key, value = leaves = [
        tensor.unflatten(0, (-1, length)).transpose(1, 2).contiguous().requires_grad_() for tensor in inputs
    ]
    of_output = torch.randn(query.shape, generator=GENERATOR).to(query)

    def sdpa() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if ON_GPU else nullcontext():
            output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torch.autograd.grad(output, leaves, of_output)

    ours, theirs = seconds(lambda: run(case, inputs, gradient, sequences)), seconds(sdpa)
    shape = f"{len(case.lengths)} x {length:,} tokens"
    report(f"{shape}: forward and backward", 1e3 * ours, "ms")
    report(f"{shape}: by SDPA" + sized(", flash kernel", ""), 1e3 * theirs, "ms")
    report(f"{shape}: ours / SDPA", ours / theirs, expected="at most 1.2 on a GPU")


if __name__ == "__main__":
    main()
