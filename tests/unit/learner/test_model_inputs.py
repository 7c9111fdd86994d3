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
    with pytest.raises(RunError) as caught:
        NamedSpec(None, "model spec 'seeing' of plugin 'mine' 1.0", {"pixels"}).require_inputs({"sound", "pixels"})
    assert str(caught.value) == (
        "the samples carry sound in multimodal_train_inputs, and the model of model spec 'seeing' of plugin 'mine' 1.0 "
        "takes pixels; training would go on without what the engine was shown. Use a model spec whose traits declare "
        "them (ModelSpecTraits.inputs), or leave them out of the samples"
    )


def test_ranks_that_share_a_row_are_refused() -> None:
    with pytest.raises(RunError) as caught:
        NamedSpec(None, "spec", {"pixels"}).require_inputs({"pixels"}, context=2)
    assert str(caught.value) == (
        "the samples carry pixels in multimodal_train_inputs, and context_parallel_size = 2 gives a rank parts of a "
        "row: nothing says which of these belong to its tokens. Leave --context-parallel-size out"
    )
