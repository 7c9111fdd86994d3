"""Sharing memory with engines that have no model; what a real server reads is tested with real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import get_sharing_strategy

from slime_core.errors import WeightSyncError
from slime_core.weights import transports as module
from slime_core.weights.engine_control import Bucket, EngineControl
from slime_core.weights.hugging_face import WeightSpec
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

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.names, self.read = [], []

    def update_from_tensor(self, payloads, *, version=None):
        self.payloads = payloads
        self.names += shared_names()
        reader = [sys.executable, "-c", READER]
        found = subprocess.run(reader, input="\n".join(payloads[0]), text=True, capture_output=True, check=True)
        self.read.append(found.stdout)
        super().update_from_tensor(payloads, version=version)


def transport_of(control: EngineControl) -> TensorTransport:
    """All processes read from this one."""
    return TensorTransport(control.urls, control=control, holders=[(0,) * ranks for ranks in control.ranks])


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


def test_every_process_reads_each_bucket_from_one_of_two_blocks_that_are_gone_afterwards(engine):
    control = Recorder([engine.url], ranks_per_engine=2)
    transport = transport_of(control)
    transport.start("7")
    for number in range(4):
        transport.send(BUCKET, [TENSORS[0] + number, TENSORS[1]], last=number == 3)
    transport.drain()
    norms = [f"norm [{number}.0, {number + 1}.0, {number + 2}.0, {number + 3}.0]\n" for number in range(4)]
    assert control.read == [(norm + "gate [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]\n") * 2 for norm in norms]
    assert (len(control.payloads[0]), len(set(control.names)), shared_names()) == (2, 2, [])
    transport.commit()
    control.close()


def test_the_last_bucket_brings_the_version(engine):
    control = EngineControl([engine.url])
    transport = transport_of(control)
    transport.start("7")
    transport.send(BUCKET, TENSORS, last=False)
    transport.drain()
    assert control.version() == "default"
    transport.send(BUCKET, TENSORS, last=True)
    transport.drain()
    transport.commit()
    assert control.version() == "7"
    control.close()


def test_shared_memory_is_freed_when_an_engine_refuses(engine):
    control = EngineControl([engine.url])
    strategy = get_sharing_strategy()
    transport = transport_of(control)
    transport.send(BUCKET, TENSORS, last=True)
    with pytest.raises(WeightSyncError, match="must run between"):
        transport.drain()
    assert (shared_names(), get_sharing_strategy()) == ([], strategy)
    control.close()


def test_the_learners_own_weights_are_not_shared(engine):
    control = EngineControl([engine.url])
    transport = transport_of(control)
    source = [torch.zeros(4), torch.zeros(2, 3)]
    transport.start("7")
    transport.send(BUCKET, source, last=True)
    transport.drain()
    assert not any(tensor.is_shared() for tensor in source)
    control.close()


def test_a_helper_of_torch_that_a_busy_machine_starts_late_is_asked_again(monkeypatch):
    real, failures = module._storage, iter([RuntimeError("Shared memory manager connection has timed out")] * 3)

    def late(nbytes):
        for failure in failures:
            raise failure
        return real(nbytes)

    monkeypatch.setattr(module, "_storage", late)
    block = module.SharedBlock()
    block.fill([torch.zeros(4)])
    assert len(shared_names()) == 1
    block.free()
    assert shared_names() == []
    monkeypatch.setattr(module, "_storage", lambda nbytes: (_ for _ in ()).throw(RuntimeError("no such file")))
    with pytest.raises(RuntimeError, match="no such file"):
        block.fill([torch.zeros(4)])


HELPED = """
import os, sys
from pathlib import Path
import torch
from slime_core.weights import transports
folder = Path(sys.argv[1])
transports.start_helper(folder)
block = transports.SharedBlock()
block.fill([torch.zeros(4)])
print(len(list(folder.glob("torch-shm-dir-*"))), os.environ.get("TMPDIR"))
block.free()
"""


@pytest.mark.parametrize(("name", "found"), [("short", 1), ("l" * 107, 0)])
def test_the_socket_of_the_helper_is_in_the_folder_that_is_named_if_its_path_is_short(name, found):
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as temporary:
        folder = Path(temporary) / name
        folder.mkdir()
        command = [sys.executable, "-c", HELPED, str(folder)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout
    assert printed == f"{found} /tmp\n"


def test_a_larger_bucket_gets_a_larger_block_and_a_smaller_one_uses_it_again():
    block, names = module.SharedBlock(), []
    for length in (4, 8, 2):
        flat = block.fill([torch.full((length,), float(length))])
        assert flat.view(torch.float32).tolist() == [float(length)] * length
        names.append(shared_names())
    block.free()
    assert [len(one) for one in names] == [1, 1, 1]
    assert names[0] != names[1] == names[2]
    assert shared_names() == []


def test_a_full_shared_memory_is_an_error_and_no_signal(engine, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 39}))
    control = EngineControl([engine.url])
    with pytest.raises(WeightSyncError, match=r"/dev/shm has 0\.0 MB free.*--shm-size.*update-weight-buffer-size"):
        transport_of(control).send(BUCKET, TENSORS, last=True)
    assert shared_names() == []
    control.close()


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_an_engine_on_another_machine_is_refused(host):
    control = EngineControl(["http://127.0.0.1:1", f"http://{host}:80"])
    with pytest.raises(WeightSyncError, match=rf"http://{host}:80 "):
        transport_of(control)
    control.close()


RANK = """
import json, sys
import torch
import torch.distributed as dist
from slime_core.weights.engine_control import EngineControl
from slime_core.weights.engine_control import Bucket
from slime_core.weights.hugging_face import WeightSpec
from slime_core.weights.transports import TensorTransport

class Recorder(EngineControl):
    def update_from_tensor(self, payloads, *, version=None):
        print(json.dumps([list(of_engine) for of_engine in payloads]), flush=True)
        sys.stdin.readline()  # the test reads what is shared before the ranks take it back

rank, store, urls = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
control = Recorder(urls, ranks_per_engine=(1, 2)) if rank == 0 else None
transport = TensorTransport(urls, control=control, holders=((1,), (0, 1)))
bucket = Bucket((WeightSpec("norm", "float32", (2,)),))
transport.start("7")
transport.send(bucket, [torch.full((2,), 10.0 + rank)], last=True)
transport.drain()
transport.commit()
dist.destroy_process_group()
"""


def test_each_rank_hands_its_own_copy_to_the_processes_that_it_holds(tmp_path):
    """Ranks send different weights here, so that the payloads tell whose memory each process reads."""
    with FakeEngine() as one, FakeEngine() as two:
        words = [str(tmp_path / "store"), one.url, two.url]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        payloads = json.loads(ranks[0].stdout.readline())
        lines = [payload for of_engine in payloads for payload in of_engine]
        read = subprocess.run(
            [sys.executable, "-c", READER], input="\n".join(lines), text=True, capture_output=True, check=True
        ).stdout
        ranks[0].communicate("go on\n", timeout=900)
        ranks[1].communicate(timeout=900)
    assert [len(of_engine) for of_engine in payloads] == [1, 2]
    assert read.splitlines() == ["norm [11.0, 11.0]", "norm [10.0, 10.0]", "norm [11.0, 11.0]"]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"torch_{one.pid}_" for one in ranks))]


REFUSED = """
import sys
import torch
import torch.distributed as dist
from slime_core.errors import WeightSyncError
from slime_core.weights.engine_control import Bucket, EngineControl
from slime_core.weights.hugging_face import WeightSpec
from slime_core.weights.transports import SharedBlock, TensorTransport

rank, store, failing, url = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
control = EngineControl([url], ranks_per_engine=2) if rank == 0 else None
transport = TensorTransport([url], control=control, holders=((0, 1),))
bucket = Bucket((WeightSpec("norm", "float32", (2,)),))
if failing == "memory of rank 1":
    transport.start("7")
    if rank == 1:
        def full(block, tensors):
            raise WeightSyncError("/dev/shm is full")
        SharedBlock.fill = full
# Without a start the engine refuses the bucket. The refusal ends the next call: another bucket, or the last wait.
for following in (lambda: transport.send(bucket, [torch.ones(2)], last=True), transport.drain):
    try:
        transport.send(bucket, [torch.ones(2)], last=False)
        following()
    except WeightSyncError as error:
        print(error, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("failing", "words"), [("engine", "must run between"), ("memory of rank 1", "/dev/shm")])
def test_every_rank_raises_what_stopped_one_of_them(failing, words, tmp_path):
    with FakeEngine() as engine:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", REFUSED, str(rank), str(tmp_path / "store"), failing, engine.url],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        printed = [rank.communicate(timeout=900)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert printed[0] == printed[1]
    assert [words in line for line in printed[0]] == [True, True]


GATED = """
import os, sys, threading
import torch
import torch.distributed as dist
from slime_core.weights.engine_control import Bucket, EngineControl
from slime_core.weights.hugging_face import WeightSpec
from slime_core.weights.transports import TensorTransport

gate = threading.Event()

def say(text):
    os.write(1, f"{text}\\n".encode())  # whole lines, from two threads

class Slow(EngineControl):
    def update_from_tensor(self, payloads, *, version=None):
        assert gate.wait(100), "the next bucket is not gathered before this one is loaded"
        say(f"loaded {version}")

rank, store, url = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
transport = TensorTransport([url], control=Slow([url], ranks_per_engine=2) if rank == 0 else None, holders=((0, 1),))
bucket = Bucket((WeightSpec("norm", "float32", (2,)),))
transport.start("7")
for number in (1, 2):
    gathered = torch.full((2,), 1.0)
    dist.all_reduce(gathered)
    say(f"gathered {number}")
    if number == 2:
        gate.set()
    transport.send(bucket, [gathered], last=number == 2)
    say(f"sent {number}")
transport.drain()
dist.destroy_process_group()
"""


def test_ranks_gather_the_next_bucket_while_engines_load_the_one_that_they_share(tmp_path):
    with FakeEngine() as engine:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", GATED, str(rank), str(tmp_path / "store"), engine.url],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        printed = [rank.communicate(timeout=240)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    # The second bucket is copied once the first is loaded: two buckets take memory.
    steps = ["gathered 1", "sent 1", "gathered 2", "sent 2"]
    assert printed[1] == steps
    assert [line for line in printed[0] if not line.startswith("loaded")] == steps
    assert printed[0].index("loaded None") < printed[0].index("sent 2")
