"""Checksums that engines report, against the published weights."""

from __future__ import annotations

import hashlib

import pytest
import torch
import xxhash

from slime_core.errors import WeightSyncError
from slime_core.weights.checksums import SentWeights, require_agreement, require_all_overwritten, require_restored
from slime_core.weights.engine_control import SHA_DIGITS, XXH3_DIGITS, EngineChecksums


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def held(url: str = "http://a", **weights: str) -> EngineChecksums:
    return EngineChecksums(url, repr(sorted(weights.items())), (weights,))


def cut(url: str, total: str) -> EngineChecksums:
    """An engine of two processes."""
    return EngineChecksums(url, total, ({}, {}))


def test_engines_are_compared_among_their_like() -> None:
    require_agreement([held("http://a", w="1"), held("http://b", w="1"), cut("http://c", "x")])
    with pytest.raises(WeightSyncError, match=r"http://d .*http://c"):
        require_agreement([held("http://a", w="1"), cut("http://c", "x"), cut("http://d", "y")])
    with pytest.raises(WeightSyncError, match=r"http://b .*http://a: norm"):
        require_agreement([held("http://a", norm="1", w="1"), held("http://b", norm="2", w="1")])


def test_fused_weights_are_proven_whatever_the_order_of_their_pieces() -> None:
    query, key, value = (torch.full((2, 3), float(number)) for number in range(3))
    sent = SentWeights(dtype="float32")
    for name, tensor in (("v_proj", value), ("q_proj", query), ("k_proj", key)):
        sent.add(f"layers.0.self_attn.{name}.weight", tensor)
    name = "layers.0.self_attn.qkv_proj.weight"
    assert sent.verify(held(**{name: digest(query, key, value)})) == 1
    with pytest.raises(WeightSyncError, match="qkv_proj"):
        sent.verify(held(**{name: digest(key, query, value)}))


def of_ranks(*ranks: dict[str, str]) -> EngineChecksums:
    return EngineChecksums("http://a", repr(ranks), ranks)


def test_two_processes_hold_halves_of_rows_of_columns_or_all() -> None:
    sent = SentWeights(dtype="float32", ranks=2, kv_heads=4)
    gate, up, down, norm = (
        torch.arange(128.0).reshape(64, 2),
        torch.ones(64, 2),
        torch.arange(128.0).reshape(2, 64),
        torch.ones(2),
    )
    for name, tensor in (("gate_proj.weight", gate), ("up_proj.weight", up), ("down_proj.weight", down)):
        sent.add(f"mlp.{name}", tensor)
    sent.add("mlp.down_proj.bias", norm)
    sent.add("norm.weight", norm)
    sent.add("model.embed_tokens.weight", torch.ones(70, 1))
    whole = {"norm.weight": digest(norm), "mlp.down_proj.bias": digest(norm)}
    first = whole | {
        "mlp.gate_up_proj.weight": digest(gate[:32], up[:32]),
        "mlp.down_proj.weight": digest(down[:, :32].contiguous()),
        "model.embed_tokens.weight": digest(torch.ones(64, 1)),
    }
    second = whole | {
        "mlp.gate_up_proj.weight": digest(gate[32:], up[32:]),
        "mlp.down_proj.weight": digest(down[:, 32:].contiguous()),
        "model.embed_tokens.weight": digest(torch.ones(6, 1), torch.zeros(58, 1)),
    }
    assert sent.verify(of_ranks(first, second)) == 10
    with pytest.raises(WeightSyncError, match=r"down_proj.weight, mlp.gate_up_proj.weight, model.embed_tokens.weight$"):
        sent.verify(of_ranks(second, first))
    assert sent.verify(of_ranks(first)) == 0


def test_every_process_has_a_multiple_of_32_of_the_intermediate_size_the_last_of_them_zeros() -> None:
    gate, up = torch.arange(70.0) + 1, torch.arange(70.0) + 100
    down = torch.arange(70.0).reshape(1, 70) + 1
    one, two = SentWeights(dtype="float32"), SentWeights(dtype="float32", ranks=2)
    for sent in (one, two):
        for name, tensor in (("gate_proj.bias", gate), ("up_proj.bias", up), ("down_proj.weight", down)):
            sent.add(f"mlp.{name}", tensor)
    fused, name = "mlp.gate_up_proj.bias", "mlp.down_proj.weight"
    whole = {fused: digest(gate, torch.zeros(26), up, torch.zeros(26)), name: digest(down[0], torch.zeros(26))}
    first = {fused: digest(gate[:64], up[:64]), name: digest(down[0, :64])}
    second = {
        fused: digest(gate[64:], torch.zeros(58), up[64:], torch.zeros(58)),
        name: digest(down[0, 64:], torch.zeros(58)),
    }
    assert one.verify(of_ranks(whole)) == 2
    assert two.verify(of_ranks(first, second)) == 4


def test_heads_are_filled_up_where_processes_outnumber_those_of_keys_and_values() -> None:
    sent = SentWeights(dtype="float32", ranks=4, kv_heads=2)
    query, key, value = torch.arange(8.0) + 1, torch.arange(4.0) + 1, torch.arange(4.0) + 9
    for name, tensor in (("q", query), ("k", key), ("v", value)):
        sent.add(f"attn.{name}_proj.bias", tensor)
    sent.add("attn.o_proj.weight", query.reshape(1, 8))
    heads = [
        (query[:4], key[:2], value[:2]),
        (query[4:], key[2:], value[2:]),
        *[(torch.zeros(4), torch.zeros(2), torch.zeros(2))] * 2,
    ]
    ranks = [{"attn.qkv_proj.bias": digest(*held), "attn.o_proj.weight": digest(held[0])} for held in heads]
    assert sent.verify(of_ranks(*ranks)) == 8


def test_weights_differ_after_spoiling_and_are_equal_after_restoring_in_every_process() -> None:
    began = [of_ranks({"a": "1", "b": "2"}, {"a": "3", "b": "4"})]
    require_all_overwritten(began, [of_ranks({"a": "5", "b": "6"}, {"a": "7", "b": "8"})])
    require_restored(began, began)
    with pytest.raises(WeightSyncError, match=r"http://a .* b afterwards"):
        require_all_overwritten(began, [of_ranks({"a": "5", "b": "6"}, {"a": "7", "b": "4"})])
    with pytest.raises(WeightSyncError, match=r"http://a .*: a\."):
        require_restored(began, [of_ranks({"a": "1", "b": "2"}, {"a": "9", "b": "4"})])


def test_weights_are_compared_in_the_dtype_that_the_engine_keeps() -> None:
    weight = torch.tensor([1.0, 1.0 + 2**-12])
    sent = SentWeights(dtype="bfloat16")
    sent.add("norm", weight)
    assert sent.verify(held(norm=digest(weight.to(torch.bfloat16).view(torch.int16)))) == 1


def test_engines_that_hash_otherwise_are_compared_among_their_like_and_with_the_same_hash() -> None:
    weight = torch.arange(3.0)
    fast, slow = held("http://a", norm=xxhash.xxh3_128_hexdigest(weight.numpy())), held("http://b", norm=digest(weight))
    require_agreement([fast, slow])
    assert (fast.digits, slow.digits) == (XXH3_DIGITS, SHA_DIGITS)
    for engine in (fast, slow):
        sent = SentWeights(dtype="float32", digits=engine.digits)
        sent.add("norm", weight)
        assert sent.verify(engine) == 1
        weight.view(torch.uint8)[5] ^= 1
        sent.add("norm", weight)
        with pytest.raises(WeightSyncError, match=f"{engine.url} .*: norm"):
            sent.verify(engine)
        weight.view(torch.uint8)[5] ^= 1


def test_rows_of_the_embedding_are_filled_up_to_64() -> None:
    embedding = torch.ones(70, 2)
    sent = SentWeights(dtype="float32")
    sent.add("model.embed_tokens.weight", embedding)
    assert sent.verify(held(**{"model.embed_tokens.weight": digest(embedding, torch.zeros(58, 2))})) == 1


def test_hashing_leaves_a_weight_that_can_be_offloaded() -> None:
    weight = torch.ones(4)
    SentWeights(dtype="float32").add("norm", weight)
    weight.untyped_storage().resize_(0)
