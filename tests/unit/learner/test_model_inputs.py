"""Who is handed what samples carry, and who is refused it."""

from __future__ import annotations

import numpy as np
import pytest

from slime_core.errors import RunError
from slime_core.learner.micro_batches import RowInputs
from slime_core.learner.trained_model import NamedSpec
from slime_core.opaque import column

PIXELS = {"pixels": column([np.array([[1.0], [2.0]]), np.array([[3.0]])], "float64")}


def test_rows_stand_in_the_order_of_the_samples_in_their_row() -> None:
    assert RowInputs(PIXELS, (1, 0)).tensors("cpu")["pixels"].tolist() == [[3], [1], [2]]
    assert RowInputs(PIXELS, (0,)).tensors("cpu")["pixels"].tolist() == [[1], [2]]


def test_a_model_gets_the_inputs_that_it_declares() -> None:
    NamedSpec(None, "spec", {"pixels", "grid"}).require_inputs({"pixels"})
    NamedSpec(None, "spec", {"pixels"}).require_inputs(set(), context=2)


def test_inputs_that_a_model_does_not_declare_are_refused_by_name() -> None:
    with pytest.raises(RunError, match=r" sound .*multimodal_train_.*'seeing' .* pixels;.*ModelSpecTraits\.inputs"):
        NamedSpec(None, "model spec 'seeing' of plugin 'mine' 1.0", {"pixels"}).require_inputs({"sound", "pixels"})


def test_ranks_that_share_a_row_are_refused() -> None:
    with pytest.raises(RunError, match=r" pixels .*multimodal_train_inputs.*context_parallel_size = 2"):
        NamedSpec(None, "spec", {"pixels"}).require_inputs({"pixels"}, context=2)
