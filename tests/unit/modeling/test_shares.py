from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from slime_core.modeling.rows import Share, Spans, zigzag


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
    assert second.rest.slots_T.tolist() == [0]
    assert second.spans.cu_queries.tolist() == [0, 1, 2, 4]
    assert second.spans.rows_K.tolist() == [0, 1, 4, 5, 5, 6, 7]
    first = share([0, 3, 8], num_tokens=4, rank=0)
    assert first.sizes == (0, 2, 2, 0)
    assert [keys.tolist() for keys in first.keys] == [[], [5, 6, 7, 2, 3]]
    assert first.rest.slots_T.tolist() == [0, 1]


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
    assert found.rest.slots_T.numel() == len(rest_1) + len(rest_2)
    assert seen_by_spans(found.spans, gathered if found.exchanges else held) == {
        token: list(range(start_of[token], token + 1)) for token in held.tolist()
    }


def seen_by_spans(spans: Spans, tokens_of_keys: np.ndarray) -> dict[int, list[int]]:
    """Token -> the tokens that it sees, read off the spans one query after the other."""
    rows = range(spans.cu_keys[-1]) if spans.rows_K is None else spans.rows_K.tolist()
    keys, found = [int(tokens_of_keys[row]) for row in rows], {}
    for (q, q_end), (k, k_end) in zip(
        pairwise(spans.cu_queries.tolist()), pairwise(spans.cu_keys.tolist()), strict=True
    ):
        for place in range(q_end - q):
            seen = keys[k : k_end - (q_end - q) + place + 1]
            found[seen[-1]] = seen
    return found


# --- Sequences that continue others -----------------------------------------------------------------------------------
