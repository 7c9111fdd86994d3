"""Three ways in which the bytes of a publication reach the engines.

    DistributedTransport   one broadcast per bucket over a process group of learner rank 0 and all engines
    TensorTransport        one block of shared memory per bucket and learner rank, read by the engine processes that
                           ``holders`` assigns to the rank (on the same machine)
    DiskTransport          one Hugging Face folder per version, which the engines read

:class:`~slime_core.weights.publisher.Publisher` compares the weights with the plan and sends them through a transport,
in the planned buckets: ``start``, one ``send`` per bucket, ``drain``, ``commit``. After :meth:`Transport.commit` all
engines report the version and have flushed the cache of earlier weights.

**Shared memory.** A server takes, for each of its processes, a pickle of one flat tensor and a list of the positions of
the weights in it (sglang 0.5.23, srt/model_executor/model_runner_components/weight_updater.py,
``_update_weights_from_flattened_bucket``). Of the tensor the pickle holds a handle only; its bytes are in shared
memory:

    on a CPU    a file in /dev/shm; torch starts a helper for it, ``torch_shm_manager``, which ends after the last
                process that it served.
    on GPUs     a CUDA IPC handle for an engine's process on a GPU that this process sees too; all others read the file
                in /dev/shm, which is right on every machine, and slower.

Trust: the learner only writes pickles, it reads none. A server unpickles what it receives, from a list of allowed names
(srt/utils/common.py, ``SafeUnpickler``), so a client that reaches its port decides what it loads: servers listen on
loopback unless other nodes have to reach them. Nothing of sglang is imported here: the list's entries are plain
namespaces, which are allowed and have the attributes that the server reads.

Each learner rank shares its copy of a bucket with the engine processes that ``holders`` gives it; the first rank
collects the handles and passes them on. So the weights of colocated engines stay on their GPU, and engines may be on
several nodes.

**Files.** The slowest transport; it needs a folder that learner and engines share, but no network between the processes
and no extra memory. Each version is written under a draft name and renamed, so an engine never reads an incomplete one.
"""

from __future__ import annotations

import base64
import io
import os
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing import get_sharing_strategy, set_sharing_strategy
from torch.multiprocessing.reductions import reduce_tensor

from slime_core.errors import WeightSyncError
from slime_core.weights import Backend
from slime_core.weights.engine_control import Bucket, EngineControl, Sending, serve_store
from slime_core.weights.hugging_face import HuggingFaceFolder, flat_bytes


class Background:
    """Runs calls in a separate thread, one after the other, while its owner prepares the next call.

    A call's kernels run on the CUDA stream of the owner.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._running: Future[None] | None = None

    def start(self, call: Callable[[], None]) -> None:
        """Wait for the previous call, raise its error if it failed, and start ``call``."""
        self.finish()
        self._running = self._thread.submit(_on_stream, _current_stream(), call)

    def finish(self) -> None:
        """Wait for the running call; raise its error if it failed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def _current_stream() -> torch.cuda.Stream | None:
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _on_stream(stream: torch.cuda.Stream | None, call: Callable[[], None]) -> None:
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        call()


class UpdateGroup:
    """Rank 0's side of a process group of learner rank 0 and all processes of all engines.

    The group exists in addition to the default groups of learner and engines. A server joins it with
    ``init_custom_process_group`` (sglang 0.5.23, srt/utils/common.py:2859): a TCP store, under a prefix of its name,
    and torch's private helper for groups outside the default one. Rank 0 serves the store and calls the same helper,
    so sglang is not imported here; both run the same torch.

    Arguments:
        control: the engines; their ranks start at 1, in its order.
        backend: ``"nccl"`` if engines and learner have separate GPUs, else ``"gloo"``.
        address: of this process as the engines see it; a free port is chosen.
        timeout_s: limit for joining, and of each broadcast.

    Raises:
        WeightSyncError: an engine refused, or not all joined within ``timeout_s``.
    """

    def __init__(
        self,
        control: EngineControl,
        *,
        backend: Backend,
        address: str = "127.0.0.1",
        timeout_s: float = 120.0,
    ) -> None:
        control.check_alive()  # rank 0 cannot stop waiting for a member that never joins
        self._control = control
        limit = timedelta(seconds=timeout_s)
        world_size = 1 + sum(control.ranks)
        # Rank 0 serves it: it has to live as long as the group.
        self._store = store = serve_store(address, world_size=world_size, timeout=limit)
        self.name = f"slime-weights-{store.port}"  # torch accepts each name once per process
        with ThreadPoolExecutor(1, thread_name_prefix="update-group") as thread:
            engines = thread.submit(
                control.init_group, master_address=address, master_port=store.port, group=self.name, backend=backend
            )
            try:
                self._process_group = _create(
                    self.name, backend=backend, store=store, world_size=world_size, timeout=limit
                )
            except (RuntimeError, ValueError) as error:
                engines.result()  # an engine's own error explains more than our time-out
                raise WeightSyncError(
                    f"update group {self.name} over {address}:{store.port} was not formed: {error}"
                ) from error
            engines.result()

    def broadcast(self, flat: torch.Tensor) -> Sending:
        """Start sending ``flat`` to every engine, and return at once. Keep the tensor until you have waited for the
        result."""
        sending: Sending | None = dist.broadcast(flat, src=0, group=self._process_group, async_op=True)
        if sending is None:
            raise WeightSyncError(f"update group {self.name}: this process is not a member")
        return sending

    def close(self) -> None:
        """Destroy the group on all engines and here; engines that have died are not an error."""
        with suppress(WeightSyncError):
            self._control.destroy_group(self.name)
        dist.destroy_process_group(self._process_group)


def _create(name: str, *, backend: Backend, store: Any, world_size: int, timeout: timedelta) -> Any:
    # torch 2.13, distributed_c10d.py: private, but the only way to a group whose members share no default group.
    process_group, _ = c10d._new_process_group_helper(
        world_size,
        0,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[process_group] = {rank: rank for rank in range(world_size)}
    return process_group


def flatten(tensors: Sequence[torch.Tensor], *, into: torch.Tensor | None = None) -> torch.Tensor:
    """Concatenate the bytes of ``tensors`` on their device, uint8 [bytes]; a copy.

    Arguments:
        into: uint8 of the same size that receives the bytes. None: the copy is new memory.
    """
    return torch.cat([flat_bytes(tensor) for tensor in tensors], out=into)


class ReusedMemory:
    """Host memory that buckets use one after the other. Allocating new pages per bucket would take longer than filling
    them."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def fill(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the bytes of ``tensors``, uint8 [bytes], valid until the next call."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if self._memory is None or len(self._memory) < nbytes:
            self.free()
            self._memory = self._allocate(nbytes)
        return flatten(tensors, into=self._memory[:nbytes])

    def free(self) -> None:
        """Release the memory."""
        self._memory = None

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class Transport(ABC):
    """Carries publications to all engines, one at a time. The learner's first rank uses it; so does every rank if
    engines read the memory of several ranks (:class:`TensorTransport`).

    Arguments:
        control: the engines; None if this rank only shares memory.
        buffers: host memory, used in turn, because one bucket is sent or read while the next is copied.
    """

    def __init__(self, control: EngineControl | None, buffers: Sequence[ReusedMemory] = ()) -> None:
        self._control = control
        self._buffers = list(buffers)
        self._version = ""
        self._background = Background("send-weights")

    def start(self, version: str) -> None:
        """Start a publication of ``version``; the engines are paused."""
        self._version = version
        if self._control is not None:
            self._control.begin_update()

    @abstractmethod
    def send(self, bucket: Bucket, tensors: Sequence[torch.Tensor], *, last: bool) -> None:
        """Send ``tensors``, the weights of ``bucket`` in its order. Do not change them before :meth:`drain`.

        Returns before the engines have loaded them, so that the caller can gather the next bucket. On GPUs it first
        waits for the bucket before, so that no more than two buckets take memory: one in transit, one being filled.

        Arguments:
            last: no bucket follows.

        Raises:
            WeightSyncError: an engine refused or died, at this bucket or the previous bucket, or the bytes cannot be
                sent.
        """

    def raise_together(self, failure: WeightSyncError | None) -> None:
        """Raise ``failure`` on every rank that sends, so that none waits for a rank that has given up."""
        if failure is not None:
            raise failure

    def drain(self) -> None:
        """Wait for buckets in transit and free shared memory; call it after the last bucket or a failure.

        Raises:
            WeightSyncError: an engine refused or died.
        """
        try:
            self._background.finish()
        finally:
            for buffer in self._buffers:
                buffer.free()

    def commit(self) -> None:
        """Let the engines switch to the new version and flush their cache.

        Raises:
            WeightSyncError: an engine refused or died, or the bytes cannot be sent.
        """
        if self._control is not None:
            self._control.end_update()

    def close(self) -> None:
        """Release all resources, in this process and on the engines."""
        self._background.close()


class DistributedTransport(Transport):
    """A :class:`Transport` by broadcast, over any network, to engines on devices other than the learner's.

    Arguments:
        control: the engines.
        group: this process and all processes of the engines; closed with the transport.
    """

    _control: EngineControl

    def __init__(self, control: EngineControl, group: UpdateGroup) -> None:
        super().__init__(control, [ReusedMemory(), ReusedMemory()])
        self._group = group

    def send(self, bucket: Bucket, tensors: Sequence[torch.Tensor], *, last: bool) -> None:
        if tensors[0].is_cuda:
            self._background.finish()
        send = partial(self._group.broadcast, flatten(tensors) if tensors[0].is_cuda else self._flat(tensors))
        version = self._version if last else None
        self._background.start(
            partial(self._control.update_from_distributed, bucket, group=self._group.name, send=send, version=version)
        )

    def close(self) -> None:
        super().close()
        self._group.close()

    def _flat(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the bytes of ``tensors``, valid until the next call but one; a single weight is not copied."""
        if len(tensors) == 1:
            return flat_bytes(tensors[0])
        self._buffers.reverse()
        return self._buffers[0].fill(tensors)


SHARED = Path("/dev/shm")
SHARE_ATTEMPTS = 10
"""torch waits one second for its helper (libshm/socket.h), which a busy machine may not have scheduled by then."""


DEVICE_ARGUMENT = 6
"""Position of the device's index in a pickled CUDA tensor; a server also takes a GPU's UUID there, because its numbers
may be others than ours (srt/utils/patch_torch.py)."""

MB = 10**6


class TensorTransport(Transport):
    """A :class:`Transport` through memory that learner ranks share with engines.

    Arguments:
        urls: all engines.
        control: of these engines; None on every rank but the first.
        holders: for each process of each engine, the learner rank whose memory it reads.
        gpus: UUID of the GPU of each of these processes, in the same form; empty: unknown, so all processes read from
            /dev/shm.

    Raises:
        WeightSyncError: an engine that reads this rank's memory runs on another machine.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        control: EngineControl | None,
        holders: Sequence[Sequence[int]],
        gpus: Sequence[Sequence[str]] = (),
    ) -> None:
        super().__init__(control, [SharedBlock(), SharedBlock()])
        self._holders = holders
        self._is_alone = held_by_first_rank(holders)
        rank = 0 if self._is_alone else dist.get_rank()
        self._places = [
            (engine, process)
            for engine, of_engine in enumerate(holders)
            for process, holder in enumerate(of_engine)
            if holder == rank
        ]
        self._gpus = [gpus[engine][process] if gpus else "" for engine, process in self._places]
        self._in_transit = False
        self._copies: Sequence[torch.Tensor] = ()  # of the bucket in transit
        self._failure: WeightSyncError | None = None  # of sharing the bucket in transit
        _require_local([urls[engine] for engine in dict.fromkeys(engine for engine, _ in self._places)])

    def send(self, bucket: Bucket, tensors: Sequence[torch.Tensor], *, last: bool) -> None:
        """Send as the base class says. Collective, unless the engines read only the first rank's memory."""
        copies_ahead = self._is_alone and not tensors[0].is_cuda
        if copies_ahead:
            self._buffers.reverse()
        else:
            self._finish()
        payloads_here: Payloads = {}
        try:
            copies = _shared(tensors, self._gpus, self._buffers[0])
            payloads_here = {place: _payload(bucket, copy) for place, copy in zip(self._places, copies, strict=True)}
            self._copies = copies
        except WeightSyncError as problem:
            self._failure = problem
        gathered = payloads_here if self._is_alone else _gather(payloads_here)
        if self._control is not None and len(gathered) == sum(map(len, self._holders)):
            payloads = [
                [gathered[engine, process] for process in range(len(holders))]
                for engine, holders in enumerate(self._holders)
            ]
            version = self._version if last else None
            self._background.start(partial(self._control.update_from_tensor, payloads, version=version))
        self._in_transit = True
        if self._is_alone and self._failure is not None:
            self._finish()

    def drain(self) -> None:
        try:
            self._finish()
        finally:
            super().drain()

    def _finish(self) -> None:
        """Wait until the engines have read the bucket in transit, if there is one, and release it; collective as
        :meth:`send`.

        Raises:
            WeightSyncError: an engine refused the bucket or died, or a rank could not share it; on every rank.
        """
        if not self._in_transit:
            return
        self._in_transit, failure, self._failure = False, self._failure, None
        try:
            self._background.finish()
        except WeightSyncError as problem:
            failure = problem
        try:
            self.raise_together(failure)
        finally:
            on_gpu = any(copy.is_cuda for copy in self._copies)
            self._copies = ()
            if on_gpu:
                torch.cuda.ipc_collect()  # frees blocks that the engines have closed

    def raise_together(self, failure: WeightSyncError | None) -> None:
        """See the base class; collective, unless the engines read only the first rank's memory."""
        if self._is_alone:
            super().raise_together(failure)
            return
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, None if failure is None else str(failure))
        first = next((message for message in failures if message is not None), None)
        if first is not None:
            raise failure or WeightSyncError(first)


Payloads = dict[tuple[int, int], str]
"""Engine and process -> the pickle that it reads."""


def held_by_first_rank(holders: Sequence[Sequence[int]]) -> bool:
    """Return whether all engines read the memory of the learner's first rank."""
    return not any(any(of_engine) for of_engine in holders)


def _gather(payloads: Payloads) -> Payloads:
    """Return the payloads of all ranks on the first rank, and nothing on the other ranks."""
    by_rank: list[Payloads] | None = [{} for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather_object(payloads, by_rank)
    return {place: payload for of_rank in by_rank or () for place, payload in of_rank.items()}


def _require_local(urls: Sequence[str]) -> None:
    remote = [url for url in urls if not _is_here(urlsplit(url).hostname or "")]
    if remote:
        raise WeightSyncError(
            f"The transport tensor shares memory, but engine {remote[0]} is "
            "not on the machine of the learner rank that serves it. Choose --update-weight-transport distributed, or "
            "disk with a shared folder."
        )


def _is_here(host: str) -> bool:
    """Return whether ``host`` is an address of this machine: other addresses cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _shared(tensors: Sequence[torch.Tensor], gpus: Sequence[str], block: ReusedMemory) -> list[torch.Tensor]:
    """Copy ``tensors`` to flat memory that the process of each of ``gpus`` can read: on that GPU or in ``block``."""
    copies = {}
    if tensors[0].is_cuda:
        flat = flatten(tensors)
        copies = {uuid: flat.to(device) for uuid, device in _visible_gpus().items() if uuid in gpus}
    if all(uuid in copies for uuid in gpus):
        return [copies[uuid] for uuid in gpus]
    host = block.fill([tensor.cpu() for tensor in tensors])
    return [copies.get(uuid, host) for uuid in gpus]


class SharedBlock(ReusedMemory):
    """A file of /dev/shm that buckets use one after the other.

    :meth:`free` removes its name, even if no engine has opened it; its memory is released when the last process closes
    it. :meth:`fill` raises a WeightSyncError if /dev/shm is too full.
    """

    def free(self) -> None:
        """Remove the file's name, and release the memory in this process."""
        if self._memory is not None:
            self._memory = None
            self._file.unlink(missing_ok=True)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        storage = _new_shared(nbytes)
        # torch removes the name when its reference count reaches zero. The count is wrong once a server refuses a
        # handle without opening it, so one extra reference is counted, and the name is removed explicitly.
        storage._shared_incref()
        _, handle, _ = storage._share_filename_cpu_()
        self._file = SHARED / handle.decode().lstrip("/")
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))


def _new_shared(nbytes: int) -> torch.UntypedStorage:
    """Allocate shared memory, as torch.multiprocessing's file_system strategy does."""
    free = shutil.disk_usage(SHARED).free
    if nbytes > free:  # writing to a full /dev/shm is no error but a SIGBUS
        raise WeightSyncError(
            f"{nbytes / MB:.1f} MB of weights are to be shared, but {SHARED} has {free / MB:.1f} MB free. Give "
            "it more (docker run --shm-size), or lower --update-weight-buffer-size."
        )
    for _ in range(SHARE_ATTEMPTS - 1):
        try:
            return _storage(nbytes)
        except RuntimeError as error:
            if "timed out" not in str(error):
                raise
    return _storage(nbytes)


HELPER_SOCKET = "/torch-shm-dir-XXXXXX/manager.sock"
LONGEST_SOCKET = 107


def start_helper(folder: Path) -> None:
    """Start torch's helper for shared memory, with its socket below ``folder``; it serves this process from now on.

    A killed helper leaves its folder behind, so give a ``folder`` that is removed or kept as a whole. If the path is
    too long for a socket, this function starts nothing; torch starts the helper at first use, in the folder for
    temporary files.
    """
    if len(os.fsencode(folder)) + len(HELPER_SOCKET) > LONGEST_SOCKET:
        return
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)  # torch reads it when it starts the helper, and never again
    try:
        _new_shared(1)
    finally:
        os.environ.pop("TMPDIR")
        os.environ.update({} if before is None else {"TMPDIR": before})


def _storage(nbytes: int) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = torch.UntypedStorage._new_using_filename_cpu(nbytes)
    return storage


def _payload(bucket: Bucket, flat: torch.Tensor) -> str:
    """Return the payload of one process of a server: base64 of a pickle, which can be read only once."""
    strategy = get_sharing_strategy()
    # The default strategy passes file descriptors, which needs a common parent process: the server would die.
    set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump({"flattened_tensor": flat, "metadata": list(_places(bucket))})
    finally:
        set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode()


def _places(bucket: Bucket) -> Iterator[SimpleNamespace]:
    """Yield the attributes of ``FlattenedTensorMetadata`` (srt/weight_sync/tensor_bucket.py) of each weight."""
    start = 0
    for spec in bucket.specs:
        yield SimpleNamespace(
            name=spec.name,
            shape=torch.Size(spec.shape),
            dtype=getattr(torch, spec.dtype),
            start_idx=start,
            end_idx=start + spec.nbytes,
            numel=spec.nbytes,
        )
        start += spec.nbytes


class _Pickler(ForkingPickler):
    """Names a GPU by its UUID; everything else as torch.multiprocessing does."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce a CUDA tensor; return ``NotImplemented`` for any other object."""
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])


def _visible_gpus() -> dict[str, torch.device]:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {str(torch.cuda.get_device_properties(device).uuid): device for device in devices}


class DiskTransport(Transport):
    """A :class:`Transport` through a new folder inside ``folder``, which is removed when the transport is closed.
    Several runs may share ``folder``.

    Only the version that the engines hold stays there, because a server that fails to load the next version reads it
    again.

    Arguments:
        control: the engines; they see ``folder`` under the same path, and may read files of this user.
        folder: created if it is missing.
        template: folder whose config and tokenizer belong to the weights.
        on_written: called with the folder of each version before any engine reads it.
    """

    _control: EngineControl

    def __init__(
        self, control: EngineControl, *, folder: Path, template: Path, on_written: Callable[[Path], None] | None = None
    ) -> None:
        super().__init__(control)
        self._template = template
        self._on_written = on_written
        self._folder = folder.resolve()
        self._own_folder: Path | None = None
        self._held: Path | None = None

    def start(self, version: str) -> None:
        self._version = version
        with self._writing():
            if self._own_folder is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._own_folder = Path(tempfile.mkdtemp(prefix="slime-weights-", dir=self._folder))
            self._draft = self._own_folder / "draft"
            shutil.rmtree(self._draft, ignore_errors=True)
            self._export = HuggingFaceFolder(self._draft)

    def send(self, bucket: Bucket, tensors: Sequence[torch.Tensor], *, last: bool) -> None:
        self._background.start(partial(self._write, dict(zip(bucket.names, tensors, strict=True)), last=last))

    def commit(self) -> None:
        self._background.finish()
        folder, before = self._draft.with_name(f"version-{self._version}"), self._held
        with self._writing():
            shutil.rmtree(folder, ignore_errors=True)
            self._draft.rename(folder)
        self._held = folder
        if self._on_written is not None:
            self._on_written(folder)
        self._load(folder)
        if before is not None and before != folder:
            shutil.rmtree(before, ignore_errors=True)

    def close(self) -> None:
        super().close()
        self._remove()

    def _remove(self) -> None:
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def _write(self, weights: Mapping[str, torch.Tensor], *, last: bool) -> None:
        with self._writing():
            self._export.add(weights)
            if last:
                self._export.finish(template=self._template)

    def _load(self, folder: Path) -> None:
        try:
            self._control.update_from_disk(folder, version=self._version)
        except WeightSyncError as error:
            raise WeightSyncError(
                f"The engines could not load version {self._version} from {folder}: {error} If they run on another "
                "machine or in another container, they must see this folder under the same path: set "
                "--update-weight-disk-dir to a shared one, or choose --update-weight-transport distributed."
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Context for writing files; if it fails, all files of this transport are removed.

        Raises:
            WeightSyncError: writing failed; says why.
        """
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            self._remove()
            raise WeightSyncError(
                f"Version {self._version} of the weights cannot be written to {self._folder}: {error}. Free there: "
                f"{_free_mb(self._folder)} MB. Make room for two versions, or set --update-weight-disk-dir to a folder "
                "that learner and engines see and that the learner may write."
            ) from error


def _free_mb(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free // MB
