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
    ("key", "names"),
    [
        (
            "optimizer.state.exp_avg.decoder.b",
            ["--only-train-params-name-list", "--freeze-params-name-list", "--hf-checkpoint c/step-000001/hf"],
        ),
        ("decoder.b", []),
    ],
)
def test_state_that_a_frozen_weight_lacks_is_distinguished_from_another_model(
    monkeypatch: pytest.MonkeyPatch, key: str, names: list[str]
) -> None:
    missing = KeyError(f"{key} from model not in state dict: ['decoder.a']")  # in Megatron's words

    def load(wanted: object, folder: str) -> None:
        raise CheckpointException("load", {0: (missing, None)})  # type: ignore[dict-item]

    monkeypatch.setattr(sharded.dist_checkpointing, "load", load)
    with pytest.raises(CheckpointError) as caught:
        sharded._read({}, FOLDER)
    text = str(caught.value)
    assert text.startswith(f"{FOLDER} ")
    assert str(missing) in text
    assert [word.strip(".,") for word in text.split() if word.startswith("--")] == [name.split()[0] for name in names]
    assert all(name in text for name in names)
