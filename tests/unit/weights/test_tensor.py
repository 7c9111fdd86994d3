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


def read_by_processes(payloads: list[str]) -> str:
    reader = [sys.executable, "-c", READER]
    return subprocess.run(reader, input="\n".join(payloads), text=True, capture_output=True, check=True).stdout


class Recorder(EngineControl):
    """Keeps the payloads, and what is in /dev/shm while an engine has them."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.names, self.read = [], []

    def update_from_tensor(self, payloads, *, version=None):
        self.payloads = payloads
        self.names += shared_names()
        self.read.append(read_by_processes(payloads[0]))
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


def test_the_last_bucket_brings_the_version_and_the_learner_s_weights_are_not_shared(engine):
    control = EngineControl([engine.url])
    transport, source = transport_of(control), [torch.zeros(4), torch.zeros(2, 3)]
    transport.start("7")
    for is_last, version in ((False, "default"), (True, "7")):
        transport.send(BUCKET, source, last=is_last)
        transport.drain()
        if is_last:
            transport.commit()
        assert control.version() == version
    assert not any(tensor.is_shared() for tensor in source)
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
import json, os, sys, threading
import torch
import torch.distributed as dist
from slime_core.errors import WeightSyncError
from slime_core.weights.engine_control import Bucket, EngineControl
from slime_core.weights.hugging_face import WeightSpec
from slime_core.weights.transports import SharedBlock, TensorTransport

rank, store, urls = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
bucket = Bucket((WeightSpec("norm", "float32", (2,)),))

def transport(control, *holders):
    return TensorTransport(urls, control=control if rank == 0 else None, holders=holders)
"""


def ranks_of(program: str, store: Path, *engines: FakeEngine) -> list[subprocess.Popen[str]]:
    """Two ranks that run ``program`` after ``RANK``."""
    end = "\ndist.destroy_process_group()\n"
    words = [sys.executable, "-c", RANK + program + end]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    urls = [engine.url for engine in engines]
    return [subprocess.Popen([*words, str(rank), str(store), *urls], **pipes) for rank in range(2)]


def printed_by(ranks: list[subprocess.Popen[str]]) -> list[list[str]]:
    printed = [rank.communicate("", timeout=900)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return printed


HANDS_OUT = """
class Recorder(EngineControl):
    def update_from_tensor(self, payloads, *, version=None):
        print(json.dumps([list(of_engine) for of_engine in payloads]), flush=True)
        sys.stdin.readline()  # the test reads what is shared before the ranks take it back

sender = transport(Recorder(urls, ranks_per_engine=(1, 2)), (1,), (0, 1))
sender.start("7")
sender.send(bucket, [torch.full((2,), 10.0 + rank)], last=True)
sender.drain()
sender.commit()
"""


def test_each_rank_hands_its_own_copy_to_the_processes_that_it_holds(tmp_path):
    """Ranks send different weights here, so that the payloads tell whose memory each process reads."""
    with FakeEngine() as first, FakeEngine() as second:
        ranks = ranks_of(HANDS_OUT, tmp_path / "store", first, second)
        payloads = json.loads(ranks[0].stdout.readline())
        lines = read_by_processes([payload for of_engine in payloads for payload in of_engine]).splitlines()
        printed_by(ranks)
    assert [len(of_engine) for of_engine in payloads] == [1, 2]
    assert lines == ["norm [11.0, 11.0]", "norm [10.0, 10.0]", "norm [11.0, 11.0]"]
    left = tuple(f"torch_{rank.pid}_" for rank in ranks)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(left)]


SENDER = """
sender = transport(EngineControl(urls, ranks_per_engine=2), (0, 1))
"""
FULL_MEMORY = """
def full(block, tensors):
    raise WeightSyncError("/dev/shm is full")

if rank == 1:
    SharedBlock.fill = full
sender.start("7")
"""
TWICE = """
# Without a start the engine refuses the bucket. The refusal ends the next call: another bucket, or the last wait.
for following in (lambda: sender.send(bucket, [torch.ones(2)], last=True), sender.drain):
    try:
        sender.send(bucket, [torch.ones(2)], last=False)
        following()
    except WeightSyncError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("fault", "words"), [("", "must run between"), (FULL_MEMORY, "/dev/shm")], ids=["engine", "memory of rank 1"]
)
def test_every_rank_raises_what_stopped_one_of_them(fault, words, tmp_path):
    with FakeEngine() as engine:
        first, second = printed_by(ranks_of(SENDER + fault + TWICE, tmp_path / "store", engine))
    assert first == second
    assert [words in line for line in first] == [True, True]


GATED = """
gate = threading.Event()

def say(text):
    os.write(1, f"{text}\\n".encode())  # whole lines, from two threads

class Slow(EngineControl):
    def update_from_tensor(self, payloads, *, version=None):
        assert gate.wait(100), "the next bucket is not gathered before this one is loaded"
        say(f"loaded {version}")

sender = transport(Slow(urls, ranks_per_engine=2), (0, 1))
sender.start("7")
for number in (1, 2):
    gathered = torch.full((2,), 1.0)
    dist.all_reduce(gathered)
    say(f"gathered {number}")
    if number == 2:
        gate.set()
    sender.send(bucket, [gathered], last=number == 2)
    say(f"sent {number}")
sender.drain()
"""


def test_ranks_gather_the_next_bucket_while_engines_load_the_one_that_they_share(tmp_path):
    with FakeEngine() as engine:
        first, second = printed_by(ranks_of(GATED, tmp_path / "store", engine))
    # The second bucket is copied once the first is loaded: two buckets take memory.
    steps = ["gathered 1", "sent 1", "gathered 2", "sent 2"]
    assert second == steps
    assert [line for line in first if not line.startswith("loaded")] == steps
    assert first.index("loaded None") < first.index("sent 2")
