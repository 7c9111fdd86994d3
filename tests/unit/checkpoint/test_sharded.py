"""The messages for a checkpoint that does not fit the learner; tests/engines reads real ones."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ("cause", "disk_mb", "shared_mb", "advice"),
    [
        ("No space left on device", 0, 900, "Free space there (0 MB are free), then resume."),
        ("No space left on device", 900, 1, "/dev/shm, through which processes hand over data, has 1 MB free"),
        ("unable to allocate shared memory(shm) for file", 900, 9, "/dev/shm, through which processes hand over data"),
    ],
)
def test_a_full_shared_memory_is_not_blamed_on_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, disk_mb: int, shared_mb: int, advice: str
) -> None:
    def save(state: object, folder: str, strategy: object) -> None:
        raise RuntimeError(cause)

    def free(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=sharded.MB * (shared_mb if path == sharded.SHARED else disk_mb))

    monkeypatch.setattr(sharded.dist_checkpointing, "save", save)
    monkeypatch.setattr(sharded.shutil, "disk_usage", free)
    with pytest.raises(CheckpointError, match=re.escape(cause)) as caught:
        sharded._write({}, tmp_path)
    assert advice in str(caught.value)
