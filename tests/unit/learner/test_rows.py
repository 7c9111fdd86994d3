from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_core.learner.rows import Packing, Share, zigzag


def test_lengths_up_to_the_same_power_of_two_share_a_batch():
    packing = Packing.of(torch.tensor([0, 4, 5, 8]), num_tokens=8)
    assert packing.shapes == ((1, 1), (2, 4))
    assert packing.rows_S.tolist() == [4, 0, 1, 2, 3, 5, 6, 7, 7]
    assert packing.slots_T.tolist() == [1, 2, 3, 4, 0, 5, 6, 7]
    assert packing.positions_T.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]


def test_empty_sequences_take_no_slot_and_the_tail_is_a_sequence_of_its_own():
    packing = Packing.of(torch.tensor([0, 2, 2]), num_tokens=4)
    assert packing.shapes == ((2, 2),)
    assert packing.positions_T.tolist() == [0, 1, 0, 1]


def test_the_packing_of_a_row_is_computed_once():
    ends = torch.tensor([0, 3, 5])
    assert Packing.of(ends, num_tokens=5) is Packing.of(ends, num_tokens=5)


def test_a_row_shorter_than_its_sequences_is_refused():
    with pytest.raises(ValueError, match="ends at 5, but the packed row holds 4"):
        Packing.of(torch.tensor([0, 3, 5]), num_tokens=4)


def test_a_rank_takes_an_early_and_a_late_chunk():
    assert zigzag(8, rank=0, size=2).tolist() == [0, 1, 6, 7]
    assert zigzag(8, rank=1, size=2).tolist() == [2, 3, 4, 5]
    assert zigzag(5, rank=0, size=1).tolist() == [0, 1, 2, 3, 4]


def test_all_ranks_together_hold_every_token_once():
    held = np.concatenate([zigzag(48, rank=rank, size=4) for rank in range(4)])
    assert sorted(held.tolist()) == list(range(48))


def test_a_row_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="6 tokens cannot be split into 4"):
        zigzag(6, rank=0, size=2)


def share(ends: list[int], *, num_tokens: int, rank: int, size: int = 2) -> Share:
    return Share.of(torch.tensor(ends, dtype=torch.int32), num_tokens=num_tokens, rank=rank, size=size)


def test_two_sequences_over_two_ranks_by_hand():
    second = share([0, 3, 8], num_tokens=4, rank=1)
    assert second.sizes == (1, 1, 2, 0)
    assert [keys.tolist() for keys in second.keys] == [[0, 1, 4], [5, 6, 7]]
    assert second.rest.positions_T.tolist() == [0]
    first = share([0, 3, 8], num_tokens=4, rank=0)
    assert first.sizes == (0, 2, 2, 0)
    assert [keys.tolist() for keys in first.keys] == [[], [5, 6, 7, 2, 3]]
    assert first.rest.positions_T.tolist() == [0, 1]


def test_sequences_that_end_where_chunks_end_need_no_exchange():
    aligned = share([0, 2, 4, 8], num_tokens=4, rank=0)
    assert aligned.exchanges
    assert not share([0, 2, 4, 6, 8], num_tokens=4, rank=0).exchanges
    assert share([0, 2, 4, 6, 8], num_tokens=4, rank=1).sizes == (0, 2, 0, 2)


def test_a_sequence_over_the_whole_row_crosses_everywhere_but_at_its_start():
    assert share([0, 8], num_tokens=4, rank=0).sizes == (0, 2, 2, 0)
    assert share([0, 8], num_tokens=4, rank=1).sizes == (2, 0, 2, 0)
    assert share([0, 8], num_tokens=4, rank=1).rest.shapes == ()


@pytest.mark.parametrize("size", [2, 4])
def test_every_token_sees_the_tokens_of_its_sequence_up_to_itself(size):
    random = np.random.default_rng(size)
    for _ in range(12):
        ends = np.concatenate([[0], random.integers(1, 12, 6).cumsum()])
        row = int(ends[-1] + -ends[-1] % (2 * size))
        gathered = np.concatenate([zigzag(row, rank=rank, size=size) for rank in range(size)])
        for rank in range(size):
            check_share(ends.tolist(), row, gathered, rank, size)


def check_share(ends: list[int], row: int, gathered: np.ndarray, rank: int, size: int) -> None:
    held = zigzag(row, rank=rank, size=size)
    found = share(ends, num_tokens=len(held), rank=rank, size=size)
    start_of = {token: max(end for end in [*ends, 0] if end <= token) for token in range(row)}
    crossing_1, rest_1, crossing_2, rest_2 = torch.from_numpy(held).split(found.sizes)
    for crossing, keys in zip((crossing_1, crossing_2), found.keys, strict=True):
        seen = list(range(start_of[int(crossing[-1])], int(crossing[-1]) + 1)) if len(crossing) else []
        assert gathered[keys].tolist() == seen
    rest = torch.cat([rest_1, rest_2]).tolist()
    assert found.rest.positions_T.tolist() == [token - start_of[token] for token in rest]


# --- Sequences that continue others -----------------------------------------------------------------------------------


def continued(lengths: list[int], continues: list[int]) -> Packing:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return Packing.of(ends, num_tokens=int(ends[-1]), continues=torch.tensor(continues, dtype=torch.int32))


def test_a_short_continuation_brings_the_keys_before_it():
    packing = continued([2, 1, 2], [-1, 0, 0])
    assert packing.positions_T.tolist() == [0, 1, 2, 2, 3]
    assert packing.shapes == ((1, 2), (1, 1), (1, 2))
    assert packing.rows_S.tolist() == [0, 1, 2, 3, 4]
    assert packing.shared.lengths == (2, 3, 4)
    assert packing.shared.rows_K.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4]


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


@pytest.mark.parametrize("seed", range(6))
def test_continuations_are_attended_as_if_all_stood_alone(seed):
    """Groups of one to four, of equal and other prompt lengths, with empty and long responses."""
    random, torch_random = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    lengths, continues = [], []
    for _ in range(4):
        head = len(lengths)
        lengths.append(int(random.integers(1, 4)))
        continues.append(-1)
        for _ in range(random.integers(0, 5)):
            lengths.append(int(random.integers(0, 9)))
            continues.append(head)
    ends = np.cumsum([0, *lengths])
    inputs = [torch.randn(ends[-1], 2, 4, generator=torch_random, requires_grad=True) for _ in range(3)]
    found = attended(continued(lengths, continues), *inputs)
    expected = torch.zeros_like(found)
    for number, before in enumerate(continues):
        own = list(range(ends[number], ends[number + 1]))
        keys = own if before < 0 else [*range(ends[before], ends[before + 1]), *own]
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
