"""What engines say they hold, against what was sent."""

from __future__ import annotations

import hashlib

import pytest
import torch

from slime_core.errors import WeightSyncError
from slime_core.weights.checksums import SentWeights, agree
from slime_core.weights.endpoints import HeldWeights


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def held(url: str = "http://a", **weights: str) -> HeldWeights:
    return HeldWeights(url, repr(sorted(weights.items())), (weights,))


def test_engines_that_hold_the_same_agree() -> None:
    agree([held("http://a", w="1"), held("http://b", w="1")])


def test_an_engine_that_differs_is_named_with_the_weight() -> None:
    with pytest.raises(WeightSyncError, match=r"http://b holds other weights than http://a: norm"):
        agree([held("http://a", norm="1", w="1"), held("http://b", norm="2", w="1")])


def test_fused_weights_are_proven_whatever_the_order_of_their_pieces() -> None:
    query, key, value = (torch.full((2, 3), float(number)) for number in range(3))
    sent = SentWeights(dtype="float32")
    for name, tensor in (("v_proj", value), ("q_proj", query), ("k_proj", key)):
        sent.add(f"layers.0.self_attn.{name}.weight", tensor)
    name = "layers.0.self_attn.qkv_proj.weight"
    assert sent.verify(held(**{name: digest(query, key, value)})) == 1
    with pytest.raises(WeightSyncError, match="qkv_proj"):
        sent.verify(held(**{name: digest(key, query, value)}))


def test_rows_of_the_embedding_are_filled_up_to_64() -> None:
    embedding = torch.ones(70, 2)
    sent = SentWeights(dtype="float32")
    sent.add("model.embed_tokens.weight", embedding)
    assert sent.verify(held(**{"model.embed_tokens.weight": digest(embedding, torch.zeros(58, 2))})) == 1


def test_weights_are_compared_in_the_dtype_that_the_engine_keeps() -> None:
    weight = torch.tensor([1.0, 1.0 + 2**-12])
    sent = SentWeights(dtype="bfloat16")
    sent.add("norm", weight)
    assert sent.verify(held(norm=digest(weight.to(torch.bfloat16).view(torch.int16)))) == 1


def test_names_that_only_the_engine_knows_are_not_counted_as_proven() -> None:
    assert SentWeights(dtype="float32").verify(held(w13_weight="1")) == 0
