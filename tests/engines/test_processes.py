"""Ray actors have the import hook too; reading a foreign checkpoint runs no code."""

from __future__ import annotations

import os
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_core.errors import CheckpointError

# Megatron warns about its own calls, and calls what torch deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:megatron", "ignore:`load_state_dict` is deprecated:FutureWarning"
)


class Runs:
    """Makes a folder where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("part", [".metadata", "an object", "common.pt"])
def test_reading_a_checkpoint_runs_no_code_of_it(megatron, tmp_path, part):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject

    from slime_core.checkpoint import sharded

    def state(data: object = None) -> dict[str, Any]:
        return {"extra": ShardedObject("extra", data, (1,), (0,)), "step": 2}

    folder, made = tmp_path / "torch_dist", tmp_path / "made"
    folder.mkdir()
    dist_checkpointing.save(state(Runs(made) if part == "an object" else BytesIO(b"1")), str(folder))
    if part == "an object":
        made.exists() and made.rmdir()
    else:
        assert sharded._read(state(), folder)["extra"].getvalue() == b"1"
    if part == ".metadata":
        (folder / part).write_bytes(pickle.dumps(Runs(made)))
    if part == "common.pt":
        torch.save({"step": Runs(made)}, folder / part)
    with pytest.raises(CheckpointError, match="No code of it"):
        sharded._read(state(), folder)
    assert not made.exists()


class Reads:
    """Is unpickled as ``getattr(owner, name)``: so Python 3.11.0 to 3.11.3 pickle the members of enumerations."""

    def __init__(self, owner: object, name: str) -> None:
        self.given = owner, name

    def __reduce__(self) -> Any:
        return getattr, self.given


def test_enumerations_are_read_as_any_python_pickles_them(megatron):
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as FORMATS

    from slime_core.checkpoint.sharded import _Description

    member = FORMATS.TORCH_CONTIGUOUS_FORMAT
    for written in (member, Reads(FORMATS, member.name)):
        assert _Description(BytesIO(pickle.dumps(written))).load() is member
    for owner, name in ((FORMATS, "__class__"), (FORMATS, "mro"), (torch.Size, "__init__")):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            _Description(BytesIO(pickle.dumps(Reads(owner, name)))).load()


def test_a_ray_actor_installs_the_hook_for_itself(ray_session):
    import ray

    @ray.remote(num_cpus=0)
    class Rank:
        def device_of_megatron(self) -> Any:
            from slime_core.cpu.megatron import install

            install()
            from megatron.core.transformer.torch_norm import WrappedTorchNorm
            from megatron.core.utils import torch as torch_of_megatron

            return WrappedTorchNorm.__module__, torch_of_megatron.cuda.is_available()

    assert ray.get(Rank.remote().device_of_megatron.remote()) == ("megatron.core.transformer.torch_norm", False)
