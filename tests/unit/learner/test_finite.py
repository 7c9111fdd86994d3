from __future__ import annotations

import math

import pytest
import torch

from slime_core.errors import NonFiniteError
from slime_core.learner.finite import refuse_non_finite_weights


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_not_finite_is_named(bad, dtype):
    chunks = [torch.nn.Linear(3, 3).to(dtype), torch.nn.Linear(3, 2).to(dtype)]
    with torch.no_grad():
        chunks[1].weight[1, 2] = bad
    with pytest.raises(NonFiniteError) as caught:
        refuse_non_finite_weights(chunks, rollout=4)
    assert str(caught.value) == (
        "rollout 4: the optimizer left NaN or infinity in 1 weights of this rank, weight among them. Nothing of this "
        "rollout was published or saved. Lower --lr, or resume from the last checkpoint with --load."
    )


def test_chunks_of_the_same_names_are_all_looked_at():
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    with torch.no_grad():
        first.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="in 1 weights"):
        refuse_non_finite_weights([first, second], rollout=0)


@pytest.mark.parametrize("largest", [0.0, 1.0, 3e38])
def test_large_weights_are_still_finite(largest):
    """A sum of squares would not be."""
    chunk = torch.nn.Linear(40, 40)
    with torch.no_grad():
        chunk.weight.fill_(largest)
    refuse_non_finite_weights([chunk], rollout=0)
