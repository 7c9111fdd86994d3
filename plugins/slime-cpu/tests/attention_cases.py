"""The batched attention of a CPU server beside SGLang's loop; run by ``test_attention.py`` with the stand-ins.

Prints the largest difference for each case, and how many calls the batched one took.
"""

from __future__ import annotations

import json
import random
import sys

import torch
from _slime_attention import BatchedAttention, divide, pad
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

SLOTS = 4096


def backend(kind: type) -> TorchNativeAttnBackend:
    """A backend without a model."""
    made = kind.__new__(kind)
    made.use_sliding_window_kv_pool = False
    made._plan = None
    return made


def case(prefixes: list[int], queries: list[int], *, H: int, K: int, D: int, decode: bool, **options: object) -> float:
    """Largest difference of the two backends for sequences of these lengths in random slots; infinite rows never."""
    generator = torch.Generator().manual_seed(len(prefixes))
    lengths = [a + b for a, b in zip(prefixes, queries, strict=True)]
    slots = torch.randperm(SLOTS - 1, generator=generator) + 1
    table = torch.full((len(lengths) + 3, max(lengths) + 5), SLOTS - 1, dtype=torch.int32)  # stale rows and columns
    pools = torch.randperm(len(lengths) + 3, generator=generator)[: len(lengths)]
    for place, (pool, length) in enumerate(zip(pools, lengths, strict=True)):
        table[pool, :length] = slots[sum(lengths[:place]) :][:length].int()
    keys, values = (torch.randn(SLOTS, K, D, generator=generator) for _ in range(2))
    query = torch.randn(sum(queries), H, D, generator=generator)
    tensors = [torch.tensor(one) for one in ([lengths] if decode else [lengths, prefixes, queries])]
    options = {"scaling": 0.3, "enable_gqa": H != K, "causal": not decode, "is_cross_attn": False, **options}
    options.setdefault("sliding_window_size", None)
    found = []
    for kind in (TorchNativeAttnBackend, BatchedAttention):
        output = torch.full_like(query, torch.nan)
        method = "_run_sdpa_forward_decode" if decode else "_run_sdpa_forward_extend"
        getattr(backend(kind), method)(query, output, keys, values, table, pools, *tensors, None, **options)
        found.append(output)
    return float((found[0] - found[1]).abs().max())


def main() -> None:
    """Print the cases."""
    rng = random.Random(0)
    ragged = [rng.randrange(1, 60) for _ in range(40)]
    heads = {"H": 9, "K": 3, "D": 16}
    calls = len(pad(torch.ones(64).long(), torch.full((64,), 9), torch.arange(64), torch.zeros(64, 9).int()))
    results = {
        "decode": case(ragged, [1] * 40, decode=True, **heads),
        "decode, as many heads": case(ragged, [1] * 40, decode=True, H=4, K=4, D=8),
        "decode, one long": case([1500, *ragged], [1] * 41, decode=True, **heads),
        "prompts": case([0] * 40, ragged, decode=False, **heads),
        "equal prompts": case([0] * 8, [7] * 8, decode=False, **heads),
        "prompts after a cached prefix": case(ragged, [*ragged[1:], 3], decode=False, **heads),
        "last tokens of cached prompts": case([6] * 40, [1] * 40, decode=False, **heads),
        "one long prompt": case([0, 0], [900, 2], decode=False, **heads),
        "sliding window": case([0] * 3, [9, 12, 3], decode=False, sliding_window_size=4, **heads),
        "without a mask of the future": case([0] * 3, [9, 12, 3], decode=False, causal=False, **heads),
    }
    every = sorted(one for batch in divide(ragged, ragged) for one in batch)
    json.dump({"differences": results, "calls": calls, "every": every == list(range(40))}, sys.stdout)


if __name__ == "__main__":
    main()
