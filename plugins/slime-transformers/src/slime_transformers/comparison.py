"""Compares a loaded model in rows of the learner with transformers' passes over single samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slime_core.errors import ConfigError

LENGTHS = (7, 9)
"""Tokens of two made-up samples that share a row."""

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Accepted norm of the difference of two logit vectors, by that of the vector; the median over tokens. Rounding to
bfloat16 gives about 0.01, and a sample that sees another one more than 0.5."""


def require_same_logits(chunk: Any, model: Any) -> None:
    """Raise ConfigError unless both give two made-up samples the same logits.

    Arguments:
        chunk: the model of the learner.
        model: transformers' model with the same weights, on the host.
    """
    generator = torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().num_embeddings
    samples = [torch.randint(0, size, (length,), generator=generator) for length in LENGTHS]
    with torch.no_grad():
        logits_TV = row_logits(chunk, samples).to("cpu", torch.float32)
        expected_TV = torch.cat([model(sample[None], use_cache=False).logits[0].float() for sample in samples])
    difference = float(((logits_TV - expected_TV).norm(dim=1) / expected_TV.norm(dim=1)).median())
    dtype = next(chunk.parameters()).dtype
    if not difference < TOLERANCES[dtype]:
        raise ConfigError(
            f"{type(model).__name__}: the logits of two samples in a row differ from those that transformers gives "
            f"each alone by {difference:.2g}, so rows of this architecture cannot be trained; take another checkpoint, "
            "or write a model spec for it (docs/models.md)"
        )


def row_logits(chunk: Any, samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the logits [t, vocabulary] of samples in one row."""
    device = next(chunk.parameters()).device
    lengths = [len(sample) for sample in samples]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    row = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    tokens, places = (values[None].to(device) for values in (torch.cat(list(samples)), positions))
    logits: torch.Tensor = chunk(tokens, places, None, packed_seq_params=row)
    return logits[0]
