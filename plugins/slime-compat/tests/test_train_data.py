"""Columns for training as slime's users return them, and the samples that they become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slime_compat.calling import PathFunction
from slime_compat.signatures import Form
from slime_compat.train_data import converted
from slime_core import Sample, Status
from slime_core.errors import PluginError
from slime_core.types import LogProbs, TokenIds

LOADED: Any = PathFunction(None, Form("f"), frozenset(), "--flag mine.py")  # type: ignore[arg-type]


def sample(index: int, second: int, log_prob: float) -> Sample:
    return Sample(
        group_index=0,
        index=index,
        rollout_id=index,
        tokens=TokenIds([1, second, 3]),
        response_length=2,
        rollout_log_probs=LogProbs([log_prob, log_prob]),
        metadata={"who": second},
        status=Status.COMPLETED,
    )


SIBLINGS = [sample(5, 2, -1.0), sample(5, 4, -2.0), sample(6, 7, -4.0)]


def rows(samples: list[Sample], **changed: Any) -> list[Sample]:
    """Return what the columns of ``samples`` become, of a rollout of ``SIBLINGS``."""
    columns = {
        "tokens": [list(one.tokens) for one in samples],
        "response_lengths": [one.response_length for one in samples],
        "rewards": [1.0 for _ in samples],
        "loss_masks": [[1] * one.response_length for one in samples],
    }
    return converted(LOADED, {**columns, **changed}, SIBLINGS if len(samples) > 1 else SIBLINGS[:1])


def parents(samples: list[Sample]) -> list[tuple[Any, float]]:
    return [(row.metadata["who"], (row.rollout_log_probs or [0])[0]) for row in samples]


@pytest.mark.parametrize("indices", [{}, {"sample_indices": [5, 5, 6]}, {"sample_indices": torch.tensor([5, 5, 6])}])
def test_siblings_of_a_fan_out_keep_their_fields(indices: dict[str, Any]) -> None:
    assert parents(rows(SIBLINGS, **indices)) == [(2, -1.0), (4, -2.0), (7, -4.0)]


def test_rows_in_another_order_are_distinguished_by_index_and_tokens() -> None:
    assert parents(rows([SIBLINGS[2], SIBLINGS[1]], sample_indices=[6, 5])) == [(7, -4.0), (4, -2.0)]


@pytest.mark.parametrize(
    ("samples", "changed", "message"),
    [
        (SIBLINGS[:2], {"tokens": [[9, 9, 9], [1, 7, 3]], "sample_indices": [5, 6]}, "row 0 of sample_indices 5"),
        (SIBLINGS[:2], {}, "2 rows, and sample_indices"),
    ],
)
def test_rows_that_may_come_from_several_samples_are_refused(samples, changed: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        rows(samples, **changed)


@pytest.mark.parametrize("mask", [torch.tensor([1.0, 0.0]), np.array([True, False]), (1, 0), [np.int64(1), 0.0]])
def test_masks_of_any_kind_of_number_are_zeros_and_ones(mask: Any) -> None:
    (row,) = rows(SIBLINGS[:1], loss_masks=[mask], tokens=[np.array([1, 2, 3])])
    assert (list(row.loss_mask or ()), list(row.tokens)) == ([1, 0], [1, 2, 3])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_masks": [[0.5, 1]]}, "loss_masks"),
        ({"loss_masks": [[2, 1]]}, "2 among the loss_masks"),
        ({"loss_masks": [None]}, "0 of loss_masks"),
        ({"loss_masks": [[1]]}, "1 entries of loss_masks"),
        ({"tokens": [[1.0, 2, 3]]}, "1.0 among the tokens"),
        ({"tokens": [[1, 2, -3]]}, "-3 among the tokens"),
        ({"rewards": []}, "'rewards': 0"),
        ({"rewards": [None]}, "rewards"),
        ({"sample_indices": [9]}, "sample_indices"),
        ({"rollout_log_probs": [[0.0, float("nan")]]}, "rollout_log_probs"),
        ({"response_lengths": [None]}, "response_lengths None, 2"),
        ({"rollout_ids": []}, "{.*'rollout_ids': 0}"),
        ({"tokens": None}, "it returned dict without"),
    ],
)
def test_train_data_that_cannot_be_trained_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=rf"--flag mine.py.*{message}"):
        rows(SIBLINGS[:1], **changed)
