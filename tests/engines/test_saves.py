"""A checkpoint that is written while the state changes, and whose writer is killed; one that holds code."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from slime_core.checkpoint.folder import Retention, RunState, by_step, draft_of, find
from slime_core.errors import CheckpointError
from tests.checkpoints import write_copies
from tests.engines.families import build, write
from tests.engines.learners import OneRank
from tests.engines.learners import equal as same
from tests.processes import runs

# Megatron warns about its own calls, and calls what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

KILLS = 50
LONGEST_DELAY_S = 0.005
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")
"""Events of ``sys.audit`` (Python documentation, "Audit events table")."""


class Trained(OneRank):
    """A small model with Adam's state, and its checkpoints in ``folder``."""

    def __init__(self, model: Path, layout: Any, folder: Path) -> None:
        from slime_core.learner.background_save import SaveSettings

        super().__init__("qwen3", model, layout, lr=1e-2)
        self.saving = SaveSettings(folder, model, retention=Retention(interval=1))

    def live(self) -> list[torch.Tensor]:
        """Weights, means and step counts."""
        (adam,) = [part.optimizer for part in self.optimizer.chained_optimizers]
        moments = [value for state in adam.state.values() for value in state.values()]
        return [*self.chunks[0].parameters(), *moments]

    def tensors(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in self.live()]

    @torch.no_grad()
    def restore(self, tensors: list[torch.Tensor]) -> None:
        for target, value in zip(self.live(), tensors, strict=True):
            target.copy_(value)

    def begin(self, step: int) -> Callable[[], None]:
        """Copy the state; what is returned makes it a checkpoint."""
        from slime_core.checkpoint import sharded
        from slime_core.learner.background_save import complete

        copy = sharded.copy(draft_of(self.saving.folder, step) / "torch_dist", **self.state)
        return lambda: complete(lambda: [copy.write()], RunState(step), self.saving)

    def loaded(self, step: int) -> list[torch.Tensor]:
        from slime_core.checkpoint import sharded

        sharded.load(by_step(self.saving.folder)[step] / "torch_dist", **self.state)
        return self.tensors()


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) > 10 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 2048}
    return write("qwen3", tmp_path_factory.mktemp("model"), **sizes)


@pytest.fixture
def trained(megatron: Any, model: Path, tmp_path: Path) -> Trained:
    return Trained(model, megatron, tmp_path / "checkpoints")


def test_a_checkpoint_holds_the_state_at_the_call_whatever_is_trained_while_it_is_written(trained: Trained) -> None:
    trained.step(1)
    expected, finish = trained.tensors(), trained.begin(1)
    trained.step(2)
    assert not equal(trained.tensors(), expected)
    finish()
    assert equal(trained.loaded(1), expected)


@pytest.mark.parametrize("file", ["torch_dist/__0_0.distcp", "torch_dist/common.pt", "torch_dist/.metadata.tmp"])
def test_a_full_disk_leaves_the_former_checkpoint_and_no_draft(trained: Trained, file: str) -> None:
    trained.step(3)
    expected = trained.tensors()
    trained.begin(1)()
    trained.step(4)
    finish, path = trained.begin(2), draft_of(trained.saving.folder, 2) / file
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")  # the kernel answers every write there with ENOSPC
    with pytest.raises(CheckpointError, match=r"No space left .*\(\d+ MiB "):
        finish()
    assert os.listdir(trained.saving.folder) == ["step-000001"]
    assert equal(trained.loaded(1), expected)


@pytest.mark.long
def test_a_writer_that_is_killed_at_random_points_leaves_the_former_checkpoint(trained: Trained) -> None:
    """Seeded; by SIGKILL, at an operation on files or soon after, in a process of its own that holds the copy."""
    dice, folder = random.Random(0), trained.saving.folder
    trained.step(5)
    former = trained.tensors()
    trained.begin(1)()
    trained.step(6)
    latter = trained.tensors()
    operations = in_child(trained.begin(2))
    shutil.rmtree(by_step(folder)[2])
    outcomes = []
    for _ in range(KILLS):
        finish = trained.begin(2)
        in_child(finish, dies_at=dice.randint(1, operations), after_s=dice.uniform(0, LONGEST_DELAY_S))
        complete, is_begun = by_step(folder), draft_of(folder, 2).exists()
        assert complete.keys() <= {1, 2}
        if 2 in complete:
            assert equal(trained.loaded(2), latter)
            shutil.rmtree(complete[2])
        assert find(folder).state.step == 1
        assert equal(trained.loaded(1), former)
        outcomes.append("complete" if 2 in complete else "half-written" if is_begun else "not begun")
        trained.restore(latter)
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})  # of docs/results.md
    assert outcomes.count("half-written") >= KILLS / 4


def in_child(work: Callable[[], None], *, dies_at: int = 0, after_s: float = 0.0) -> int:
    """Run ``work`` in a forked process; returns the number of its operations on files.

    Arguments:
        dies_at: the number of the operation at which the process is killed; 0: it ends by itself.
        after_s: so many seconds after that operation has begun.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        count = itertools.count(1)

        def on_event(event: str, _: object) -> None:
            if event in OPERATIONS and next(count) == dies_at:
                threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

        sys.addaudithook(on_event)
        code = 1
        try:
            work()
            os.write(writes, str(next(count) - 1).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writes)
    _, status = os.waitpid(child, 0)
    with open(reads, "rb") as pipe:
        printed = pipe.read()
    assert dies_at or status == 0
    return int(printed or 0)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def only_experts_train(chunks: list[Any]) -> None:
    """They have an optimizer of their own, as where ranks share them."""
    from slime_core.learner.freezing import freeze

    for name, parameter in chunks[0].named_parameters():
        parameter.allreduce = ".experts." not in name
    freeze(chunks, only=[r"\.experts\."])


@pytest.mark.parametrize(
    "how",
    [{"prepare": only_experts_train}, {"overlap_grad_reduce": True, "bucket_size": 3000}],
    ids=["experts train alone", "several buckets"],
)
def test_a_mixture_is_saved_and_resumed_exactly(megatron: Any, mixture: Path, tmp_path: Path, how: Any) -> None:
    from slime_core.checkpoint import sharded

    first, second = (OneRank("qwen3_moe", mixture, megatron, **how) for _ in range(2))
    start = first.weights()
    first.step(0)
    write_copies([sharded.copy(tmp_path, **first.state)])
    first.step(1)
    sharded.load(tmp_path, **second.state)
    second.step(1)
    assert same(first.weights(), second.weights())
    changed = {name for name, weight in first.weights().items() if not torch.equal(weight, start[name])}
    if "prepare" in how:
        assert changed == {name for name in start if ".experts." in name}
    else:
        assert changed == start.keys()
        assert len(first.model[0].bucket_groups) > 10


def test_saving_leaves_no_process(megatron: Any, mixture: Path, tmp_path: Path) -> None:
    from slime_core.checkpoint import sharded

    before = psutil.Process().children()
    _, chunks = build("qwen3_moe", mixture, megatron)
    write_copies([sharded.copy_weights(tmp_path / "weights", chunks=chunks)])
    assert [child for child in psutil.Process().children() if child not in before and runs(child)] == []


# --- Reading runs no code ---------------------------------------------------------------------------------------------


class Runs:
    """Makes a folder where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


@pytest.mark.parametrize("part", [".metadata", "an object", "common.pt"])
def test_reading_a_checkpoint_runs_no_code_of_it(megatron, tmp_path, part) -> None:
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
    with pytest.raises(CheckpointError):
        sharded._read(state(), folder)
    assert not made.exists()


class Reads:
    """Is unpickled as ``getattr(owner, name)``: so Python 3.11.0 to 3.11.3 pickle the members of enumerations."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return getattr, self.arguments


def test_enumerations_are_read_as_any_python_pickles_them(megatron) -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as FORMATS

    from slime_core.checkpoint.sharded import _Description

    member = FORMATS.TORCH_CONTIGUOUS_FORMAT
    for written in (member, Reads(FORMATS, member.name)):
        assert _Description(BytesIO(pickle.dumps(written))).load() is member
    for owner, name in ((FORMATS, "__class__"), (FORMATS, "mro"), (torch.Size, "__init__")):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            _Description(BytesIO(pickle.dumps(Reads(owner, name)))).load()


def test_a_ray_actor_installs_the_hook_for_itself(ray_session) -> None:
    import ray

    @ray.remote(num_cpus=0)
    def device_of_megatron() -> Any:
        from slime_core.modeling import prepare_megatron

        prepare_megatron()
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from megatron.core.utils import torch as torch_of_megatron

        return WrappedTorchNorm.__module__, torch_of_megatron.cuda.is_available()

    assert ray.get(device_of_megatron.remote()) == ("megatron.core.transformer.torch_norm", False)
