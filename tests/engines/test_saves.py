"""A checkpoint that is written while the state changes, and whose writer is killed."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_core.checkpoint.folder import Retention, RunState, by_step, draft_of, find
from slime_core.errors import CheckpointError
from tests.engines.families import build, write

# Megatron warns about its own calls, and calls what torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

KILLS = 50
LONGEST_DELAY_S = 0.005
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")
"""Events of ``sys.audit`` (Python documentation, "Audit events table")."""


class Trained:
    """A small model with Adam's state, and its checkpoints in ``folder``."""

    def __init__(self, model: Path, layout: Any, folder: Path) -> None:
        from slime_core.config.learning import OptimizerConfig
        from slime_core.learner.actor import SaveSettings
        from slime_core.learner.optimizer import build_optimizer, build_schedule, wrap

        settings = OptimizerConfig(lr=1e-2)
        _, self.chunks = build("qwen3", model, layout)
        self._model = wrap(self.chunks, bf16=False)
        self.optimizer = build_optimizer(self._model, settings, bf16=False)
        self.schedule = build_schedule(self.optimizer, settings, num_steps=4)
        self.saving = SaveSettings(folder, model, retention=Retention(interval=1))

    @property
    def state(self) -> dict[str, Any]:
        return {"chunks": self.chunks, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self) -> None:
        for part in self.chunks[0].parameters():
            part.main_grad.normal_()
        self.optimizer.step()
        self.schedule.step(increment=1)

    def tensors(self) -> list[torch.Tensor]:
        """Weights, means and step counts."""
        (adam,) = [part.optimizer for part in self.optimizer.chained_optimizers]
        moments = [value for held in adam.state.values() for value in held.values()]
        return [one.detach().clone() for one in (*self.chunks[0].parameters(), *moments)]

    def begin(self, step: int) -> Callable[[], None]:
        """Copy the state; what is returned makes it a checkpoint."""
        from slime_core.checkpoint import sharded
        from slime_core.learner.actor import complete

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
    trained.step()
    expected, finish = trained.tensors(), trained.begin(1)
    trained.step()
    assert not equal(trained.tensors(), expected)
    finish()
    assert equal(trained.loaded(1), expected)


@pytest.mark.parametrize("file", ["torch_dist/__0_0.distcp", "torch_dist/common.pt", "torch_dist/.metadata.tmp"])
def test_a_full_disk_leaves_the_former_checkpoint_and_no_draft(trained: Trained, file: str) -> None:
    trained.step()
    expected = trained.tensors()
    trained.begin(1)()
    trained.step()
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
    trained.step()
    former = trained.tensors()
    trained.begin(1)()
    trained.step()
    latter = trained.tensors()
    operations = in_child(trained.begin(2))
    shutil.rmtree(by_step(folder)[2])
    outcomes = []
    for _ in range(KILLS):
        finish = trained.begin(2)
        in_child(finish, dies_at=dice.randint(1, operations), after_s=dice.uniform(0, LONGEST_DELAY_S))
        found, is_begun = by_step(folder), draft_of(folder, 2).exists()
        assert found.keys() <= {1, 2}
        if 2 in found:
            assert equal(trained.loaded(2), latter)
            shutil.rmtree(found[2])
        assert find(folder).state.step == 1
        assert equal(trained.loaded(1), former)
        outcomes.append("complete" if 2 in found else "half-written" if is_begun else "not begun")
        restore(trained, latter)
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})  # of docs/results.md
    assert outcomes.count("half-written") >= KILLS / 4


def restore(trained: Trained, tensors: list[torch.Tensor]) -> None:
    (adam,) = [part.optimizer for part in trained.optimizer.chained_optimizers]
    live = [*trained.chunks[0].parameters(), *(value for held in adam.state.values() for value in held.values())]
    with torch.no_grad():
        for target, value in zip(live, tensors, strict=True):
            target.copy_(value)


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
