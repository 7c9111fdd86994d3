from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_core.modeling.rows import Packing, Positions, Sequences, attend_padded, zigzag


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


# --- Rows that ranks share --------------------------------------------------------------------------------------------


def test_a_rank_takes_an_early_and_a_late_chunk():
    assert zigzag(8, rank=0, size=2).tolist() == [0, 1, 6, 7]
    assert zigzag(8, rank=1, size=2).tolist() == [2, 3, 4, 5]
    assert zigzag(5, rank=0, size=1).tolist() == [0, 1, 2, 3, 4]


def test_a_row_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"6 tokens .* 4"):
        zigzag(6, rank=0, size=2)


def share(ends: list[int], *, num_tokens: int, rank: int, size: int = 2) -> Sequences:
    return Sequences.of_rank(torch.tensor(ends, dtype=torch.int32), num_tokens=num_tokens, rank=rank, size=size)


def test_two_sequences_over_two_ranks_by_hand():
    second = share([0, 3, 8], num_tokens=4, rank=1)
    assert (second.queries.tolist(), second.keys.tolist()) == ([1, 1, 2], [3, 1, 3])
    assert second.rows_K.tolist() == [0, 1, 4, 5, 5, 6, 7]
    first = share([0, 3, 8], num_tokens=4, rank=0)
    assert (first.queries.tolist(), first.keys.tolist()) == ([2, 2], [2, 5])
    assert first.rows_K.tolist() == [0, 1, 5, 6, 7, 2, 3]


def test_sequences_that_end_where_chunks_end_need_no_exchange():
    assert share([0, 2, 4, 8], num_tokens=4, rank=0).exchanges
    aligned = share([0, 2, 4, 6, 8], num_tokens=4, rank=1)
    assert not aligned.exchanges
    assert (aligned.num_keys, aligned.rows_K.tolist()) == (4, [0, 1, 2, 3])


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
    assert seen_tokens(found, gathered if found.exchanges else held) == {
        token: list(range(start_of[token], token + 1)) for token in held.tolist()
    }


def seen_tokens(sequences: Sequences, tokens_of_keys: np.ndarray) -> dict[int, list[int]]:
    """Token -> the tokens that it sees, one query after the other."""
    keys, found = tokens_of_keys[sequences.rows_K].tolist(), {}
    for num_queries, num_keys in zip(sequences.queries.tolist(), sequences.keys.tolist(), strict=True):
        own, keys = keys[:num_keys], keys[num_keys:]
        for place in range(num_queries):
            seen = own[: num_keys - num_queries + place + 1]
            found[seen[-1]] = seen
    return found
