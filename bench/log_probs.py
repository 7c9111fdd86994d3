"""Log-probs and entropies by chunks against all at once in plain torch: seconds of a forward and a backward pass.

    python -m bench.log_probs [--device cuda] [--tokens 1024] [--vocabulary 32000 ...]

Half of a row's tokens are predicted. Seconds are the smallest of some rounds in which all ways take turns, since other
work on the machine only ever adds; of a CPU, those that the thread itself worked.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from slime_core.ops.log_probs import log_probs_and_entropy

CHUNKS = (None, 4096, 1024, 256, 64)
TEMPERATURE = 0.9


def at_once(
    logits_TV: torch.Tensor, rows_U: torch.Tensor, targets_U: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p_UV = (logits_TV[rows_U].float() / TEMPERATURE).log_softmax(-1)
    return log_p_UV.gather(1, targets_U[:, None])[:, 0], -(log_p_UV.exp() * log_p_UV).sum(-1)


def one_pass(chunk_size: int | str | None, logits_TV: torch.Tensor, *, entropy: bool) -> None:
    count, width = len(logits_TV) // 2, logits_TV.size(1)
    rows_U = torch.arange(count, device=logits_TV.device) + count // 2
    targets_U = rows_U % width
    entropy_U: torch.Tensor | None
    if isinstance(chunk_size, str):
        log_probs_U, entropy_U = at_once(logits_TV, rows_U, targets_U)
    else:
        log_probs_U, entropy_U = log_probs_and_entropy(
            logits_TV,
            rows_U=rows_U,
            targets_U=targets_U,
            temperature=TEMPERATURE,
            chunk_size=chunk_size,
            consume=True,
        )
    assert entropy_U is not None
    torch.autograd.grad((log_probs_U + (entropy_U if entropy else entropy_U.detach())).sum(), logits_TV)


def seconds(work: Callable[[], None], device: str) -> float:
    if device == "cpu":
        start = time.thread_time()
        work()
        return time.thread_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(base_TV: torch.Tensor, *, entropy: bool, rounds: int) -> dict[object, float]:
    best: dict[object, float] = {}
    for _ in range(rounds):
        for chunk_size in ("at once", *CHUNKS):
            logits_TV = base_TV.clone().requires_grad_() * 1
            taken = seconds(lambda: one_pass(chunk_size, logits_TV, entropy=entropy), base_TV.device.type)  # noqa: B023
            best[chunk_size] = min(best.get(chunk_size, taken), taken)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, nargs="*", default=[4096, 32000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| logits | vocabulary | gradient of the entropy | at once | " + " | ".join(f"chunk {c}" for c in CHUNKS) + " |"
    )
    print("|---" * (4 + len(CHUNKS)) + "|")
    for dtype in (torch.float32, torch.bfloat16):
        for width in options.vocabulary:
            base_TV = (3 * torch.randn(options.tokens, width, device=options.device)).to(dtype)
            for entropy in (False, True):
                best = measure(base_TV, entropy=entropy, rounds=options.rounds)
                plain = best.pop("at once")
                cells = " | ".join(f"{plain / found:.2f} x as fast" for found in best.values())
                name = str(dtype).removeprefix("torch.")
                print(
                    f"| {name} | {width} | {'yes' if entropy else 'no'} | {1e3 * plain:.1f} ms | {cells} |", flush=True
                )


if __name__ == "__main__":
    main()
