from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_core.modeling.rows import Sequences, zigzag


def test_a_rank_takes_an_early_and_a_late_chunk():
    assert zigzag(8, rank=0, size=2).tolist() == [0, 1, 6, 7]
    assert zigzag(8, rank=1, size=2).tolist() == [2, 3, 4, 5]
    assert zigzag(5, rank=0, size=1).tolist() == [0, 1, 2, 3, 4]


def test_all_ranks_together_hold_every_token_once():
    held = np.concatenate([zigzag(48, rank=rank, size=4) for rank in range(4)])
    assert sorted(held.tolist()) == list(range(48))


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


def test_a_sequence_over_the_whole_row_enters_every_chunk_but_the_first():
    assert share([0, 8], num_tokens=4, rank=0).keys.tolist() == [2, 8]
    assert share([0, 8], num_tokens=4, rank=1).keys.tolist() == [4, 6]


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


# --- Sequences that continue others -----------------------------------------------------------------------------------
