from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_core.modeling.rows import Packing, Positions, Sequences, attend_padded


def test_lengths_up_to_the_same_power_of_two_share_a_batch():
    ends = torch.tensor([0, 4, 5, 8])
    packing = Sequences.of(ends, num_tokens=8).packing
    assert packing.shapes == ((1, 1, 1), (2, 4, 4))
    assert packing.gather_queries.rows_S.tolist() == [4, 0, 1, 2, 3, 5, 6, 7, 7]
    assert packing.gather_tokens.rows_S.tolist() == [1, 2, 3, 4, 0, 5, 6, 7]
    assert Positions.of(ends, num_tokens=8).positions_T.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]


def test_empty_sequences_take_no_slot_and_the_tail_is_a_sequence_of_its_own():
    ends = torch.tensor([0, 2, 2])
    found = Sequences.of(ends, num_tokens=4)
    assert found.packing.shapes == ((2, 2, 2),)
    assert Positions.of(ends, num_tokens=4).positions_T.tolist() == [0, 1, 0, 1]
    assert found.spans.cu_queries.tolist() == [0, 2, 4]


@pytest.mark.parametrize(
    ("lengths", "moves"), [((4, 4), False), ((5,), False), ((2, 4), False), ((3, 4), True), ((4, 2), True)]
)
def test_tokens_that_are_in_their_slots_are_not_copied(lengths, moves):
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0)
    packing = Sequences.of(ends, num_tokens=sum(lengths)).packing
    values_TNH = torch.randn(sum(lengths), 2, 3)
    for batches in (list(packing.pad(values_TNH)), list(packing.pad_keys(values_TNH))):
        assert (batches[0].data_ptr() == values_TNH.data_ptr()) != moves
        assert torch.equal(packing.unpad(batches), values_TNH.flatten(1))


def test_the_sequences_of_a_row_are_computed_once():
    ends = torch.tensor([0, 3, 5])
    found = Sequences.of(ends, num_tokens=5)
    assert found is Sequences.of(ends, num_tokens=5)
    assert (found.packing, found.spans) == (found.packing, found.spans)
    assert Positions.of(ends, num_tokens=5) is Positions.of(ends, num_tokens=5)
    assert Sequences.of(ends, num_tokens=6).spans.cu_keys.tolist() == [0, 3, 5, 6]


def test_a_row_shorter_than_its_sequences_is_refused():
    for one in (Positions, Sequences):
        with pytest.raises(ValueError, match=r" 5, .* 4"):
            one.of(torch.tensor([0, 3, 5]), num_tokens=4)


def continued(lengths: list[int], continues: list[int]) -> Packing:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return Sequences.of(ends, num_tokens=int(ends[-1]), continues=torch.tensor(continues, dtype=torch.int32)).packing


def test_a_short_continuation_brings_the_keys_before_it():
    packing = continued([2, 1, 2], [-1, 0, 0])
    ends, before = torch.tensor([0, 2, 3, 5]), torch.tensor([-1, 0, 0])
    assert Positions.of(ends, num_tokens=5, continues=before).positions_T.tolist() == [0, 1, 2, 2, 3]
    assert packing.shapes == ((1, 2, 2), (1, 1, 3), (1, 2, 4))
    assert packing.gather_queries.rows_S is None
    assert packing.gather_keys.rows_S.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4]


def test_a_third_sequence_brings_the_keys_of_both_before_it():
    """2 tokens; after them 1 and 3 others; after the 1, another 2."""
    ends, before = torch.tensor([0, 2, 3, 5, 8]), torch.tensor([-1, 0, 1, 0])
    assert Positions.of(ends, num_tokens=8, continues=before).positions_T.tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    found = Sequences.of(ends, num_tokens=8, continues=before)
    assert found.spans.cu_keys.tolist() == [0, 2, 5, 10, 15]
    assert found.rows_K.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7]
    packing = found.packing
    assert packing.shapes == ((1, 2, 2), (1, 1, 3), (1, 5, 5), (1, 2, 5))
    assert packing.gather_queries.rows_S.tolist() == [0, 1, 2, 5, 5, 5, 6, 7, 3, 4]
    assert packing.gather_tokens.rows_S.tolist() == [0, 1, 2, 8, 9, 5, 6, 7]
    assert packing.gather_keys.rows_S.tolist() == [0, 1, 0, 1, 2, 0, 1, 5, 6, 7, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(("continues", "wrong"), [([-1, 1], 1), ([1, -1], 0)])
def test_a_sequence_continues_an_earlier_one(continues, wrong):
    for one in (Positions, Sequences):
        with pytest.raises(ValueError, match=f"sequence {wrong} continues sequence 1"):
            one.of(torch.tensor([0, 3, 5]), num_tokens=5, continues=torch.tensor(continues))


def test_a_long_continuation_has_as_many_queries_as_keys():
    packing = continued([1, 3], [-1, 0])
    assert packing.shapes == ((1, 1, 1), (1, 4, 4))
    assert packing.gather_queries.rows_S.tolist() == [0, 1, 1, 2, 3]
    assert packing.gather_tokens.rows_S.tolist() == [0, 2, 3, 4]


def test_gradients_of_keys_add_up_over_all_slots_but_padding():
    packing = continued([2, 1, 2], [-1, 0, 0])
    values = torch.zeros(5, 1, 1, requires_grad=True)
    torch.cat([part.flatten() for part in packing.pad_keys(values)]).mul(2.0 ** torch.arange(9)).sum().backward()
    assert values.grad.flatten().tolist() == [1 + 4 + 32, 2 + 8 + 64, 16, 128, 256]


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
    found = attend_padded(*inputs, continued(lengths, continues), scale=None)
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
