"""The messages for a checkpoint that does not fit the learner; tests/engines reads real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from torch.distributed.checkpoint.api import CheckpointException

from slime_core.checkpoint import sharded
from slime_core.errors import CheckpointError

FOLDER = Path("c/step-000001/torch_dist")


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        (
            "optimizer.state.exp_avg.decoder.b",
            "It has no optimizer state of this weight, which a run that freezes the weight does not write: resume with "
            "the --only-train-params-name-list and --freeze-params-name-list of the run that wrote it, or start "
            "again from its weights with --hf-checkpoint c/step-000001/hf. If it froze nothing that trains now, it "
            "is of another model.",
        ),
        ("decoder.b", "Give a checkpoint of this very model."),
    ],
)
def test_state_that_a_frozen_weight_lacks_is_distinguished_from_another_model(
    monkeypatch: pytest.MonkeyPatch, key: str, advice: str
) -> None:
    missing = KeyError(f"{key} from model not in state dict: ['decoder.a']")  # in Megatron's words

    def load(wanted: object, folder: str) -> None:
        raise CheckpointException("load", {0: (missing, None)})  # type: ignore[dict-item]

    monkeypatch.setattr(sharded.dist_checkpointing, "load", load)
    with pytest.raises(CheckpointError) as caught:
        sharded._read({}, FOLDER)
    assert str(caught.value) == f"{FOLDER} cannot be loaded: {missing}. {advice}"
