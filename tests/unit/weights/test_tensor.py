"""Sharing memory with engines that have no model; what a real server reads is tested with real servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.multiprocessing import get_sharing_strategy

from slime_core.errors import WeightSyncError
from slime_core.weights import transports as module
from slime_core.weights.engine_control import EngineControl
from slime_core.weights.specs import Bucket, WeightSpec
from slime_core.weights.transports import TensorTransport
from slime_testing.fake_engine import FakeEngine

BUCKET = Bucket((WeightSpec("norm", "float32", (4,)), WeightSpec("gate", "float32", (2, 3))))
TENSORS = [torch.arange(4.0), torch.arange(6.0).reshape(2, 3)]

READER = """
import base64, pickle, sys
import torch
for line in sys.stdin:
    read = pickle.loads(base64.b64decode(line))
    for one in read["metadata"]:
        print(one.name, read["flattened_tensor"][one.start_idx:one.end_idx].view(one.dtype).reshape(one.shape).tolist())
"""
"""What a server does with the payloads of its processes, here one after the other."""


class Recorder(EngineControl):
    """Keeps the payloads, and what is in /dev/shm while an engine has them."""

    names: list[str]

    def update_from_tensor(self, payloads, *, version=None, flush_cache=False):
        self.payloads, self.names = payloads, shared_names()
        self.read = subprocess.run(
            [sys.executable, "-c", READER], input="\n".join(payloads[0]), text=True, capture_output=True, check=True
        ).stdout
        super().update_from_tensor(payloads, version=version, flush_cache=flush_cache)


def shared_names() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's helper listens at a socket below this folder, and the path of a socket has 107 bytes at most."""
    monkeypatch.setenv("TMPDIR", "/tmp")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as found:
        yield found


def test_every_process_of_an_engine_reads_all_weights_from_one_block_that_is_gone_afterwards(engine):
    control = Recorder([engine.url], ranks_per_engine=2)
    transport = TensorTransport(control)
    transport.start("7")
    transport.send(BUCKET, TENSORS, last=False)
    assert control.read == "norm [0.0, 1.0, 2.0, 3.0]\ngate [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]\n" * 2
    assert (len(control.payloads[0]), len(control.names), shared_names()) == (2, 1, [])
    transport.end()
    control.close()


def test_the_last_bucket_brings_the_version(engine):
    control = EngineControl([engine.url])
    transport = TensorTransport(control)
    transport.start("7")
    transport.send(BUCKET, TENSORS, last=False)
    assert control.version() == "default"
    transport.send(BUCKET, TENSORS, last=True)
    transport.end()
    assert control.version() == "7"
    control.close()


def test_shared_memory_is_freed_when_an_engine_refuses(engine):
    control = EngineControl([engine.url])
    strategy = get_sharing_strategy()
    with pytest.raises(WeightSyncError, match="must run between"):
        TensorTransport(control).send(BUCKET, TENSORS, last=True)
    assert (shared_names(), get_sharing_strategy()) == ([], strategy)
    control.close()


def test_the_learners_own_weights_are_not_shared(engine):
    control = EngineControl([engine.url])
    transport = TensorTransport(control)
    source = [torch.zeros(4), torch.zeros(2, 3)]
    transport.start("7")
    transport.send(BUCKET, source, last=True)
    assert not any(tensor.is_shared() for tensor in source)
    control.close()


def test_a_full_shared_memory_is_an_error_and_no_signal(engine, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 39}))
    control = EngineControl([engine.url])
    with pytest.raises(WeightSyncError, match=r"/dev/shm has 0\.0 MB free.*--shm-size.*update-weight-buffer-size"):
        TensorTransport(control).send(BUCKET, TENSORS, last=True)
    assert shared_names() == []
    control.close()


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_an_engine_on_another_machine_is_refused(host):
    control = EngineControl(["http://127.0.0.1:1", f"http://{host}:80"])
    with pytest.raises(WeightSyncError, match=rf"engine http://{host}:80 is not on the learner's machine. Choose"):
        TensorTransport(control)
    control.close()
