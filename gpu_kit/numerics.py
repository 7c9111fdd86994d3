"""Part 4: a step of the learner's optimizer, and log-probabilities in chunks at Qwen's vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gpu_kit.report import DEVICE, GIB, ON_GPU, peak_of, report, report_difference, report_peak, seconds, sized
from slime_core.modeling import ParallelLayout, prepare_megatron
from slime_core.modeling.layout import initialize_model_parallel
from slime_core.modeling.memory import LOGIT
from slime_core.ops.log_probs import log_probs_and_entropy

VOCABULARY = 151_936
ROWS = sized(8192, 48)
CHUNKS = sized((None, 1024, 256), (None, 16))
MATRICES, WIDTH = sized((64, 2048), (4, 64))
STEPS = 3


def main() -> None:
    """Report the optimizer, then log-probabilities."""
    optimizer_steps()
    log_probs()


def optimizer_steps() -> None:
    """Compare steps of Megatron's distributed optimizer, as the learner builds it, with AdamW in float64."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    prepare_megatron()
    dist.init_process_group(sized("nccl", "gloo"), store=HashStore(), rank=0, world_size=1)
    initialize_model_parallel(ParallelLayout(), seed=1)
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime_core.config.learning import OptimizerConfig
    from slime_core.learner.optimizer import build_optimizer, wrap

    torch.manual_seed(0)
    module: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES)))
    module.to(DEVICE, torch.bfloat16)
    module.config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16
    )
    exact = [weight.detach().double().requires_grad_() for weight in module.parameters()]
    settings = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0)
    model = wrap([module], bf16=True)
    optimizer = build_optimizer(model, settings, bf16=True)
    betas, eps = (settings.adam_beta1, settings.adam_beta2), settings.adam_eps
    reference = torch.optim.AdamW(exact, lr=settings.lr, betas=betas, eps=eps, weight_decay=settings.weight_decay)
    parameters = list(model[0].parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.main_grad.copy_(torch.randn_like(parameter, dtype=torch.float32))
        optimizer.step()

    for _ in range(STEPS):
        gradients = [torch.randn_like(weight, dtype=torch.float32) for weight in exact]
        for parameter, weight, gradient in zip(parameters, exact, gradients, strict=True):
            parameter.main_grad.copy_(gradient)
            weight.grad = gradient.double()
        torch.nn.utils.clip_grad_norm_(exact, settings.clip_grad)
        optimizer.step()
        reference.step()
    found, expected = (torch.cat([weight.detach().flatten() for weight in group]) for group in (parameters, exact))
    report_difference(f"AdamW, {STEPS} steps: bfloat16 weights", found, expected, limit=2**-8)
    masters = torch.cat([part.flatten() for group in optimizer.param_groups for part in group["params"]])
    is_complete = masters.dtype == torch.float32 and masters.numel() == MATRICES * WIDTH**2
    report("AdamW: all weights in float32", f"{masters.numel():,}", expected=f"{MATRICES * WIDTH**2:,}", ok=is_complete)
    is_fused = all(group.get("fused") for part in optimizer.chained_optimizers for group in part.optimizer.param_groups)
    report("AdamW: kernel", "fused" if is_fused else "plain", expected="fused", ok=is_fused)
    report("AdamW: a step", 1e3 * seconds(step), "ms", expected=f"{MATRICES * WIDTH**2 / 1e6:.3g} M weights")
    # A copy of the gradients, which the step writes here, and of a matrix at a time.
    report_peak("AdamW: memory of a step", peak_of(step), limit=2 * 4 * WIDTH**2 + 2**26)


def log_probs() -> None:
    """Compare log-probabilities and their gradient with float64, and measure peak and time of each chunk size."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(ROWS, VOCABULARY, generator=generator)).to(DEVICE, torch.bfloat16)
    rows = torch.arange(ROWS, device=DEVICE)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator).to(DEVICE)
    slopes = torch.randn(ROWS, generator=generator).to(DEVICE)
    some = slice(0, min(ROWS, 64))
    leaf = logits[some].double().requires_grad_()
    exact = leaf.log_softmax(-1).gather(1, targets[some, None])[:, 0]
    (exact_gradient,) = torch.autograd.grad(exact, leaf, slopes[some].double())
    report("logits", logits.nbytes / GIB, "GiB", expected=f"{ROWS:,} rows of {VOCABULARY:,} in bfloat16")
    for chunk in CHUNKS:
        source = logits.clone().requires_grad_()

        def work(chunk: int | None = chunk, source: torch.Tensor = source) -> tuple[torch.Tensor, torch.Tensor]:
            found, _ = log_probs_and_entropy(
                source, rows_U=rows, targets_U=targets, chunk_size=chunk, with_entropy=False
            )
            return found.detach(), torch.autograd.grad(found, source, slopes)[0]

        name = "all rows at once" if chunk is None else f"chunks of {chunk:,}"
        found, gradient = work()
        report_difference(f"{name}: log-probabilities", found[some], exact.detach(), limit=1e-5)
        report_difference(f"{name}: gradient", gradient[some], exact_gradient, limit=2**-8)
        del found, gradient
        # The gradient of the logits, and float32 copies of the rows of a chunk.
        limit = int(1.1 * (logits.nbytes + (chunk or ROWS) * VOCABULARY * LOGIT)) + 2**26
        report_peak(f"{name}: memory", peak_of(work), limit=limit)
        report(f"{name}: forward and backward", 1e3 * seconds(work, rounds=sized(5, 1)), "ms")
    if ON_GPU:
        plain = logits.clone().requires_grad_()

        def cross_entropy() -> None:
            loss = torch.nn.functional.cross_entropy(plain, targets, reduction="none")
            torch.autograd.grad(loss, plain, slopes.to(loss.dtype))

        report("torch's cross_entropy in bfloat16", 1e3 * seconds(cross_entropy), "ms", expected="less accurate")


if __name__ == "__main__":
    main()
