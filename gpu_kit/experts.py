"""Part 3: the product of all experts of a mixture against one product an expert, with groups of 0 and 1 token."""

from __future__ import annotations

import torch

from gpu_kit.report import DEVICE, ON_GPU, digest, report, report_difference, report_equal, seconds, sized
from slime_core.modeling.mlp import grouped_linear

COUNTS = sized([0, 1, 700, 0, 1, 2000, 3, 129, 512, 0, 8, 16, 1, 700, 25, 0], [0, 1, 7, 0, 1, 20, 3, 0])
IN, OUT = sized((2048, 1536), (64, 48))
LIMIT = 0.01

Tensors = list[torch.Tensor]


def main() -> None:
    """Report values, gradients, bits, time and waits."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(sum(COUNTS), IN, generator=generator).to(DEVICE, torch.bfloat16)
    weights = [torch.randn(OUT, IN, generator=generator).to(DEVICE, torch.bfloat16) for _ in COUNTS]
    gradient = torch.randn(sum(COUNTS), OUT, generator=generator).to(DEVICE, torch.bfloat16)
    ends = torch.tensor(COUNTS).cumsum(0).to(DEVICE, torch.int32)

    def grouped() -> Tensors:
        leaves = [tensor.detach().requires_grad_() for tensor in (tokens, *weights)]
        output = grouped_linear(leaves[0], ends, leaves[1:])
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]

    def loop(dtype: torch.dtype) -> Tensors:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (tokens, *weights)]
        parts = leaves[0].split(COUNTS)
        output = torch.cat([part @ weight.t() for part, weight in zip(parts, leaves[1:], strict=True)])
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(dtype))]

    found, again, exact = grouped(), grouped(), loop(torch.float32)
    names = ("output", "gradient of the tokens")
    for name, value, reference in zip(names, found[:2], exact[:2], strict=True):
        report_difference(name, value, reference, limit=LIMIT)
    report_difference("gradients of the weights", torch.stack(found[2:]), torch.stack(exact[2:]), limit=LIMIT)
    unused = [value for count, value in zip(COUNTS, found[2:], strict=True) if not count]
    most = max(float(value.abs().max()) for value in unused)
    report("largest gradient of an expert without tokens", most, expected="0", ok=most == 0)
    report_equal("twice", digest(found) == digest(again))
    ours, theirs = seconds(grouped), seconds(lambda: loop(torch.bfloat16))
    report("forward and backward", 1e3 * ours, "ms")
    report("one product an expert", 1e3 * theirs, "ms", expected="more on a GPU")
    if not ON_GPU:
        report("waits for the GPU in the product", "not measured on a CPU", expected="none")
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped()
        waits = "none"
    except RuntimeError as problem:
        waits = str(problem)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    report("waits for the GPU in the product", waits, expected="none", ok=waits == "none")


if __name__ == "__main__":
    main()
