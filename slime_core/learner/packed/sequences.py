"""How samples stand in a packed row: each as a sequence of its own, or several behind the prompt that they share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime_core.ops.prompts import same_prompts
from slime_core.types import TrainBatch

__all__ = ["Sequences", "lay_out", "ranges"]


@dataclass(frozen=True, slots=True)
class Sequences:
    """b samples as s sequences of a row, t tokens altogether.

    Example: the prompt 5 14 with the responses 7 1 and 8, shared, make the row 5 14 7 1 8: ``lengths = [2, 2, 1]``,
    ``continues = [-1, 0, 0]``, ``positions_T = [0, 1, 2, 3, 2]``, ``prompts_end = [1, 1]``, ``responses_at = [2, 4]``.

    Arguments:
        places_T: int64 [t], where each token stands among those of the shard; of a shared prompt, its first sample's.
        positions_T: int64 [t], place of each token in its sample.
        lengths: int64 [s].
        continues: int64 [s], the number of the sequence that each one continues; -1: it starts by itself.
        prompts_end, responses_at: int64 [b], place in the row of the last token of each sample's prompt, and of the
            first of its response, or where that would be.
    """

    places_T: np.ndarray
    positions_T: np.ndarray
    lengths: np.ndarray
    continues: np.ndarray
    prompts_end: np.ndarray
    responses_at: np.ndarray

    @property
    def shares(self) -> bool:
        """Whether any sequence continues another."""
        return bool((self.continues >= 0).any())

    def predictors(self, responses_b: np.ndarray) -> np.ndarray:
        """Place in the row of the token that predicts each response token, given their numbers: int64 [u]."""
        places_U = ranges(self.responses_at - 1, responses_b)
        some = responses_b > 0
        places_U[(np.cumsum(responses_b) - responses_b)[some]] = self.prompts_end[some]
        return places_U


def lay_out(shard: TrainBatch, members: np.ndarray, starts: np.ndarray, *, share: bool) -> Sequences:
    """The samples ``members`` of ``shard`` as sequences; with ``share``, equal prompts of several stand once.

    Arguments:
        starts: int64 [b], where the samples begin among the tokens of the shard.
    """
    lengths = shard.lengths_B[members]
    prompts = lengths - shard.response_lengths_B[members]
    groups = [[member] for member in range(len(members))]
    if share:
        groups = same_prompts([shard.tokens_T[start : start + n] for start, n in zip(starts, prompts, strict=True)])
    heads, own = np.empty(len(members), np.int64), np.empty(len(members), np.int64)
    table: list[tuple[int, int, int, int]] = []  # place in the shard, tokens, position of the first, what it continues
    for group in groups:
        first, number = group[0], len(table)
        heads[group] = number
        if len(group) == 1:
            own[first] = number
            table.append((starts[first], lengths[first], 0, -1))
            continue
        own[group] = number + 1 + np.arange(len(group))
        table.append((starts[first], prompts[first], 0, -1))
        table += [(starts[i] + prompts[i], lengths[i] - prompts[i], prompts[i], number) for i in group]
    places, sizes, positions, continues = np.array(table, np.int64).T
    offsets = np.cumsum(sizes) - sizes
    return Sequences(
        places_T=ranges(places, sizes),
        positions_T=ranges(positions, sizes),
        lengths=sizes,
        continues=continues,
        prompts_end=offsets[heads] + prompts - 1,
        responses_at=offsets[own] + np.where(own == heads, prompts, 0),
    )


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``[s, s + 1, ..., s + n - 1]`` for every pair of ``starts`` and ``lengths``, one after the other."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    steps = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return np.asarray(np.repeat(starts, lengths) + steps, dtype=np.int64)
