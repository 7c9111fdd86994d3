from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_core.modeling.rows import Packing, Positions, Spans


def test_lengths_up_to_the_same_power_of_two_share_a_batch():
    ends = torch.tensor([0, 4, 5, 8])
    packing = Packing.of(ends, num_tokens=8)
    assert packing.shapes == ((1, 1), (2, 4))
    assert packing.rows_S.tolist() == [4, 0, 1, 2, 3, 5, 6, 7, 7]
    assert packing.slots_T.tolist() == [1, 2, 3, 4, 0, 5, 6, 7]
    assert Positions.of(ends, num_tokens=8).positions_T.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]


def test_empty_sequences_take_no_slot_and_the_tail_is_a_sequence_of_its_own():
    ends = torch.tensor([0, 2, 2])
    assert Packing.of(ends, num_tokens=4).shapes == ((2, 2),)
    assert Positions.of(ends, num_tokens=4).positions_T.tolist() == [0, 1, 0, 1]
    assert Spans.of(ends, num_tokens=4).cu_queries.tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("lengths", "moves"), [((4, 4), False), ((5,), False), ((2, 4), False), ((3, 4), True), ((4, 2), True)]
)
def test_tokens_that_are_in_their_slots_are_not_copied(lengths, moves):
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    packing = Packing.of(ends, num_tokens=sum(lengths))
    assert packing.moves == moves
    values_TNH = torch.randn(sum(lengths), 2, 3)
    batches = list(packing.pad(values_TNH))
    assert (batches[0].data_ptr() == values_TNH.data_ptr()) != moves
    assert torch.equal(packing.unpad(batches), values_TNH.flatten(1))


def test_the_packing_of_a_row_is_computed_once():
    ends = torch.tensor([0, 3, 5])
    assert Packing.of(ends, num_tokens=5) is Packing.of(ends, num_tokens=5)
    assert Spans.of(ends, num_tokens=5) is Spans.of(ends, num_tokens=5)
    assert Positions.of(ends, num_tokens=5) is Positions.of(ends, num_tokens=5)
    assert Spans.of(ends, num_tokens=6).cu_keys.tolist() == [0, 3, 5, 6]


def test_a_row_shorter_than_its_sequences_is_refused():
    for one in (Packing, Positions, Spans):
        with pytest.raises(ValueError, match="ends at 5, but the packed row holds 4"):
            one.of(torch.tensor([0, 3, 5]), num_tokens=4)


def continued(lengths: list[int], continues: list[int]) -> Packing:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return Packing.of(ends, num_tokens=int(ends[-1]), continues=torch.tensor(continues, dtype=torch.int32))


def test_a_short_continuation_brings_the_keys_before_it():
    packing = continued([2, 1, 2], [-1, 0, 0])
    ends, before = torch.tensor([0, 2, 3, 5]), torch.tensor([-1, 0, 0])
    assert Positions.of(ends, num_tokens=5, continues=before).positions_T.tolist() == [0, 1, 2, 2, 3]
    assert packing.shapes == ((1, 2), (1, 1), (1, 2))
    assert packing.rows_S.tolist() == [0, 1, 2, 3, 4]
    assert packing.shared.lengths == (2, 3, 4)
    assert packing.shared.rows_K.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4]


def test_a_third_sequence_brings_the_keys_of_both_before_it():
    """2 tokens; after them 1 and 3 others; after the 1, another 2."""
    ends, before = torch.tensor([0, 2, 3, 5, 8]), torch.tensor([-1, 0, 1, 0])
    assert Positions.of(ends, num_tokens=8, continues=before).positions_T.tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    spans = Spans.of(ends, num_tokens=8, continues=before)
    assert spans.cu_keys.tolist() == [0, 2, 5, 10, 15]
    assert spans.rows_K.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7]
    packing = Packing.of(ends, num_tokens=8, continues=before)
    assert packing.shapes == ((1, 2), (1, 1), (1, 5), (1, 2))
    assert packing.rows_S.tolist() == [0, 1, 2, 0, 1, 5, 6, 7, 3, 4]
    assert packing.slots_T.tolist() == [0, 1, 2, 8, 9, 5, 6, 7]
    assert packing.shared.rows_K.tolist() == [0, 1, 0, 1, 2, 0, 1, 5, 6, 7, 0, 1, 2, 3, 4]
    assert packing.shared.lengths == (2, 3, 5, 5)


@pytest.mark.parametrize(
    ("continues", "found"), [([-1, 1], "1 continues sequence 1"), ([1, -1], "0 continues sequence 1")]
)
def test_a_sequence_continues_an_earlier_one(continues, found):
    for one in (Packing, Positions, Spans):
        with pytest.raises(ValueError, match=f"sequence {found}; accepted: an earlier one, or -1"):
            one.of(torch.tensor([0, 3, 5]), num_tokens=5, continues=torch.tensor(continues))


def test_a_long_continuation_brings_the_queries_before_it_as_well():
    packing = continued([1, 3], [-1, 0])
    assert packing.shapes == ((1, 1), (1, 4))
    assert packing.rows_S.tolist() == [0, 0, 1, 2, 3]
    assert packing.slots_T.tolist() == [0, 2, 3, 4]
    assert packing.shared.lengths == (1, 4)


def test_gradients_of_keys_add_up_over_all_slots_but_padding():
    packing = continued([2, 1, 2], [-1, 0, 0])
    values = torch.zeros(5, 1, 1, requires_grad=True)
    torch.cat([part.flatten() for part in packing.pad_keys(values)]).mul(2.0 ** torch.arange(9)).sum().backward()
    assert values.grad.flatten().tolist() == [1 + 4 + 32, 2 + 8 + 64, 16, 128, 256]


def attended(packing: Packing, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    parts = []
    for one, keys, values in zip(packing.pad(q), packing.pad_keys(k), packing.pad_keys(v), strict=True):
        s, m = one.size(2), keys.size(2)
        visible = torch.ones(s, m, dtype=torch.bool).tril(m - s)
        parts.append(torch.nn.functional.scaled_dot_product_attention(one, keys, values, attn_mask=visible))
    return packing.unpad(parts)


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("seed", range(6))
def test_continuations_are_attended_as_if_all_stood_alone(seed, depth):
    """Trees of one to five sequences, with empty and long ones."""
    random, torch_random = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    lengths, continues = [], []
    for _ in range(4):
        head = len(lengths)
        lengths.append(int(random.integers(1, 4)))
        continues.append(-1)
        for _ in range(random.integers(0, 5)):
            continues.append(head if depth == 1 else int(random.integers(head, len(lengths))))
            lengths.append(int(random.integers(0, 9)))
    ends = np.cumsum([0, *lengths])
    inputs = [torch.randn(ends[-1], 2, 4, generator=torch_random, requires_grad=True) for _ in range(3)]
    found = attended(continued(lengths, continues), *inputs)
    expected = torch.zeros_like(found)
    for number, before in enumerate(continues):
        own = keys = list(range(ends[number], ends[number + 1]))
        while before >= 0:
            keys, before = [*range(ends[before], ends[before + 1]), *keys], continues[before]
        q, k, v = (part[rows].transpose(0, 1) for part, rows in zip(inputs, (own, keys, keys), strict=True))
        visible = torch.ones(len(own), len(keys), dtype=torch.bool).tril(len(keys) - len(own))
        alone = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        expected[own] = alone.transpose(0, 1).flatten(1)
    assert torch.allclose(found, expected, atol=1e-6)
    weights = torch.randn(found.shape, generator=torch_random)
    gradients = zip(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    )
    for mine, theirs in gradients:
        assert torch.allclose(mine, theirs, atol=1e-5)
