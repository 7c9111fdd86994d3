"""Model, optimizer and schedule of a learner in Megatron's torch_dist format; loads in any parallel layout.

Random state is left out: training uses no random numbers (no dropout, data order comes from the seed and the cursor).
A folder can come from a stranger, and torch keeps parts of it as pickles. Reading takes from them numbers, texts and
torch's own records, and runs no code.
"""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import dict_utils, mapping
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from torch.distributed.checkpoint import filesystem, metadata, planner, planner_helpers, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from slime_core.errors import CheckpointError

SHARED = Path("/dev/shm")
MEMORY = re.compile(r"shared memory|/dev/shm|shm_open|\bshm\b|/torch_\d")
"""What errors of torch and of Python say of a full /dev/shm."""

RECORDS = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem"))
"""Modules whose records and enumerations describe a checkpoint."""

ENUMS = (metadata._MEM_FORMAT_ENCODING, planner.WriteItemType)
HARMLESS = {("torch", "Size"), ("torch.serialization", "_get_layout")}
FOREIGN = "No code of it was run. It was not written by a run, or was changed: take another checkpoint."

MB = 2**20
SMALL_BYTES = 4 * MB

UNREADABLE = (dist_checkpointing.core.CheckpointingException, CheckpointException, KeyError, OSError, EOFError)
"""What Megatron and torch raise for a checkpoint that they cannot read."""

NOT_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|.*_extra_state")
"""Keys of tensors in a checkpoint that are no weights of the model."""


def save(folder: Path, *, chunks: Sequence[Any], optimizer: Any, schedule: Any) -> None:
    """Write the learner's state into ``folder``, which exists and is empty. Collective over all ranks.

    Raises:
        CheckpointError: a rank could not write its part.
    """
    state = _state(chunks, optimizer, loading=False) | {"schedule": schedule.state_dict()}
    _agree_on_steps(state["optimizer"])
    _write(state, folder)


def save_weights(folder: Path, *, chunks: Sequence[Any], fill: Callable[[torch.Tensor], None] | None = None) -> None:
    """Write the chunks' weights into ``folder``, which is created. Collective over all ranks.

    Arguments:
        fill: called with each parameter, or part of one, just before it is written, to load its weights; parameters
            are then written one after the other. None: the chunks hold their weights.

    Raises:
        CheckpointError: a rank could not write its part.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()  # rank 0 checks that it exists and is empty before any rank writes
    except OSError as problem:
        raise CheckpointError(f"{folder} cannot be made: {problem}. Free space, then resume.") from problem
    _write(_model(chunks, _metadata()), folder, strategy=None if fill is None else _OneByOne(fill))


def _write(state: dict[str, Any], folder: Path, *, strategy: Any = None) -> None:
    try:
        with _local_results_queue():
            dist_checkpointing.save(state, str(folder), strategy)
    except (CheckpointException, OSError, RuntimeError) as problem:  # torch's file writer raises a bare RuntimeError
        cause = _first(problem) if isinstance(problem, CheckpointException) else problem
        raise CheckpointError(f"{folder} cannot be written: {cause}. {_next_step(folder, str(cause))}") from problem


class _OneByOne(torch_dist.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Writes with torch's own writer: one tensor after the other, without copies of the whole state."""

    def __init__(self, fill: Callable[[torch.Tensor], None]) -> None:
        super().__init__("torch_dist", 1)
        self._fill = fill

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        state, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state_dict_saver.save(
            torch_dist.mcore_to_pyt_state_dict(state, False),
            storage_writer=_Writer(checkpoint_dir),
            planner=_Filling(self._fill),
        )


class _Writer(filesystem.FileSystemWriter):
    def storage_meta(self) -> metadata.StorageMeta | None:
        return None  # torch would record the path of the folder on this machine


class _Filling(torch_dist.MCoreSavePlanner):  # type: ignore[misc]
    def __init__(self, fill: Callable[[torch.Tensor], None]) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._fill = fill

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        if isinstance(found, torch.Tensor):
            self._fill(found)
        return found


def _next_step(folder: Path, cause: str) -> str:
    """What to do: the writers hand their data over in /dev/shm, so that may be what is full."""
    room, shared = shutil.disk_usage(folder).free, shutil.disk_usage(SHARED).free if SHARED.is_dir() else None
    if shared is None or not (MEMORY.search(cause) or shared < min(room, SMALL_BYTES)):
        return f"Free space there ({room // MB} MB are free), then resume."
    return (
        f"{SHARED}, through which processes hand over data, has {shared // MB} MB free (the folder: {room // MB} MB). "
        "Give the machine more shared memory (docker run --shm-size) or end what fills it, then resume."
    )


@contextmanager
def _local_results_queue() -> Iterator[None]:
    """Keep the reports of a save's writers in a queue of this process, which reads them.

    For asynchronous saves, Megatron spawns a process on each rank that holds nothing but these reports
    (dist_checkpointing/strategies/filesystem_async.py:51): four seconds of a core at the first save, and its memory to
    the end of the run.
    """
    before, filesystem_async._results_queue = filesystem_async._results_queue, SimpleQueue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


def load(folder: Path, *, chunks: Sequence[Any], optimizer: Any, schedule: Any) -> None:
    """Put the state in ``folder`` into the learner. Collective over all ranks.

    The learning rate follows the settings of this run, from the step at which the checkpoint was taken.

    Raises:
        CheckpointError: the folder is no such checkpoint, or is of another model.
    """
    found = _read(_state(chunks, optimizer, loading=True) | {"schedule": schedule.state_dict()}, folder)
    _put(found, chunks)
    optimizer.load_state_dict(_regrouped(found["optimizer"], num_parts=len(optimizer.chained_optimizers)))
    _continue_schedule(schedule, optimizer, num_steps=found["schedule"]["num_steps"])


def load_weights(folder: Path, *, chunks: Sequence[Any]) -> None:
    """Load what :func:`save_weights` wrote into the chunks, in any layout. Collective over all ranks.

    Raises:
        CheckpointError: the folder holds no weights, or those of another model.
    """
    _put(_read(_model(chunks, _metadata()), folder), chunks)


class StoredTensors:
    """The weights in a torch_dist folder, read one by one into the chunks of a model. Not collective.

    Arguments:
        folder: written by a run, by ``slime convert`` or by Megatron; only its weights are read, not its other state.

    Attributes:
        held: key -> shape and dtype of each stored weight.

    Raises:
        CheckpointError: the folder cannot be read, or names files of other folders.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _as_checkpoint_error(folder), _without_code():
            found = self._metadata = filesystem.FileSystemReader(folder).read_metadata()
        for place in (found.storage_data or {}).values():
            name = place.relative_path
            if Path(name).name != name or not (folder / name).is_file() or (folder / name).is_symlink():
                raise CheckpointError(
                    f"{folder / '.metadata'} says that weights are in {name!r:.80}; accepted is the name of a file in "
                    "the same folder, and that file. Copy the checkpoint again from a source that you trust."
                )
        self._tensors = {
            key: one
            for key, one in found.state_dict_metadata.items()
            if isinstance(one, metadata.TensorStorageMetadata) and not NOT_WEIGHTS.match(key)
        }
        self.held: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            key: (tuple(one.size), one.properties.dtype) for key, one in self._tensors.items()
        }

    def read(self, tensors: Sequence[Any]) -> None:
        """Fill ``tensors``, which :func:`sharded_tensors` returned, with the stored weights, cast to their dtype.

        Raises:
            CheckpointError: the folder lacks one, has it with another shape, or its files are damaged.
        """
        reader = filesystem.FileSystemReader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        with _as_checkpoint_error(self._folder), _without_code():
            for tensor in tensors:
                self._read(tensor, reader)

    def _read(self, tensor: Any, reader: filesystem.FileSystemReader) -> None:
        target = tensor.data.detach().view((1,) * tensor.prepend_axis_num + tuple(tensor.local_shape))
        part = metadata.ChunkStorageMetadata(torch.Size(tensor.global_offset), target.size())
        stored, padded = self.held[tensor.key][0], int(tensor.allow_shape_mismatch)
        if stored[padded:] != tuple(tensor.global_shape)[padded:]:
            raise CheckpointError(
                f"{self._folder}: {tensor.key} has shape {list(stored)}, the model {list(tensor.global_shape)}. Give a "
                "checkpoint of this very model."
            )
        items = planner_helpers.create_read_items_for_chunk_list(tensor.key, self._tensors[tensor.key], [part])
        if tensor.allow_shape_mismatch:
            target.zero_()  # the model may pad its vocabulary to more rows than are stored
        elif sum(item.lengths.numel() for item in items) != target.numel():
            raise CheckpointError(
                f"{self._folder} holds only a part of {tensor.key}, or parts of it twice. Copy the checkpoint again."
            )
        try:
            reader.read_data(planner.LoadPlan(items), _Into(target))
        except (AssertionError, RuntimeError, ValueError) as problem:  # torch raises these for a truncated file
            raise CheckpointError(
                f"{self._folder} cannot be loaded: {tensor.key}: {_first_line(problem)}. Copy the checkpoint again."
            ) from problem


class _Into(planner.LoadPlanner):
    """Reads into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def set_up_planner(
        self, state_dict: Any, metadata: metadata.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> planner.LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: planner.LoadPlan) -> planner.LoadPlan:
        raise NotImplementedError

    def load_bytes(self, read_item: planner.ReadItem, value: BytesIO) -> None:
        raise ValueError("it holds an object where a tensor was expected")

    def resolve_tensor(self, read_item: planner.ReadItem) -> torch.Tensor:
        found = self._target
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            found = found.narrow(dim, start, length)
        return found

    def commit_tensor(self, read_item: planner.ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: ``resolve_tensor`` returned a view of the target."""


def sharded_tensors(chunks: Sequence[Any]) -> list[Any]:
    """Megatron's ShardedTensor of each parameter and buffer of the chunks, or part of one; their data are views."""
    state = _model(chunks, _metadata())
    mapping.apply_factories(state)
    return [one for one in dict_utils.nested_values(state) if isinstance(one, mapping.ShardedTensor)]


def _read(wanted: dict[str, Any], folder: Path) -> Any:
    with _as_checkpoint_error(folder), _without_code():
        return dist_checkpointing.load(wanted, str(folder))


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Raise what reading fails with in the block as a CheckpointError that names ``folder``."""
    try:
        yield
    except pickle.UnpicklingError as problem:
        raise CheckpointError(f"{folder} cannot be loaded: {_first_line(problem)}. {FOREIGN}") from problem
    except UNREADABLE as problem:
        cause = _first(problem) if isinstance(problem, CheckpointException) else problem
        raise CheckpointError(f"{folder} cannot be loaded: {cause}. {_advice(str(cause), folder)}") from problem


class _Description(pickle.Unpickler):
    """Reads the ``.metadata`` of a checkpoint: records and enumerations of torch's, its dtypes and layouts."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in HARMLESS or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        if module in RECORDS and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module and (is_dataclass(found) or found in ENUMS):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


@contextmanager
def _without_code() -> Iterator[None]:
    """Torch reads a checkpoint without running code of it.

    torch 2.13 unpickles what describes the tensors (distributed/checkpoint/filesystem.py:930), and objects other than
    tensors (default_planner.py:387), whatever they hold. Megatron's ``common.pt`` is read with ``weights_only``.
    """
    reader: Any = filesystem
    reads, load = reader.pickle, torch.load

    def load_weights_only(*given: Any, **named: Any) -> Any:
        return load(*given, **{**named, "weights_only": True})

    reader.pickle = SimpleNamespace(**{**vars(pickle), "load": lambda file: _Description(file).load()})
    torch.load = load_weights_only
    try:
        with torch.serialization.safe_globals([BytesIO]):  # Transformer Engine keeps its state in one
            yield
    finally:
        reader.pickle, torch.load = reads, load


def _first_line(problem: BaseException) -> str:
    return str(problem).partition("\n")[0].rstrip(".")


def _advice(cause: str, folder: Path) -> str:
    if "UnpicklingError" in cause or "which no checkpoint needs" in cause or "Weights only load failed" in cause:
        return FOREIGN
    if not cause.strip('"').startswith("optimizer."):
        return "Give a checkpoint of this very model."
    return (
        "It has no optimizer state of this weight, which a run that freezes the weight does not write: resume with the "
        "--only-train-params-name-list and --freeze-params-name-list of the run that wrote it, or start again from its "
        f"weights with --hf-checkpoint {folder.parent / 'hf'}. If it froze nothing that trains now, it is of another "
        "model."
    )


def _put(found: dict[str, Any], chunks: Sequence[Any]) -> None:
    for key, chunk in zip(_keys(chunks), chunks, strict=True):
        chunk.load_state_dict(found[key])


def _continue_schedule(schedule: Any, optimizer: Any, *, num_steps: int) -> None:
    # Megatron's load_state_dict adds to the steps counted since construction, and asserts that no setting has changed.
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = schedule.max_lr, schedule.min_lr
    schedule.num_steps = 0
    schedule.step(increment=num_steps)


def _first(problem: CheckpointException) -> BaseException:
    """The error of the first rank that failed; the CheckpointException itself prints a traceback."""
    return next(iter(problem.failures.values()))[0]


def _state(chunks: Sequence[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    metadata = _metadata()
    model = _model(chunks, metadata)
    trained = model
    if _some_are_frozen(chunks):
        # A frozen layer or expert has no optimizer state, so a tensor over all of them would have holes.
        trained = _model(chunks, metadata | {"non_homogeneous_layers": True, "singleton_local_shards": True})
    return {**model, "optimizer": optimizer.sharded_state_dict(trained, is_loading=loading, metadata=metadata)}


def _some_are_frozen(chunks: Sequence[Any]) -> bool:
    """Whether a parameter is frozen on any rank, because all ranks have to name the same tensors."""
    return any(_gathered(any(not parameter.requires_grad for chunk in chunks for parameter in chunk.parameters())))


def _agree_on_steps(state: dict[Any, Any]) -> None:
    """Set the step count of all ranks to the largest: rank 0 writes it, and a rank without trained parameters has 0."""
    parts = [state] if "optimizer" in state else list(state.values())
    groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
    counted = max(_gathered(max((group.get("step") or 0 for group in groups), default=0)))
    if counted:
        for group in groups:
            group["step"] = counted


def _regrouped(stored: dict[Any, Any], *, num_parts: int) -> dict[Any, Any]:
    """``stored`` for an optimizer of ``num_parts``, whatever the number in the run that saved it.

    Experts that ranks share have an optimizer of their own, and so parameter groups of their own. Tensors are stored
    under the names of weights, but the settings of a group and its step count by optimizer and by kind.
    """
    saved = [stored] if "optimizer" in stored else [part for part in stored.values() if "optimizer" in part]
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    both = [{**group, "is_expert_parallel": experts} for experts in (True, False) for group in groups]
    settings = {**saved[0], "optimizer": {**saved[0]["optimizer"], "param_groups": [*both, *groups]}}
    if num_parts == 1:
        return {**settings, "param_state": stored["param_state"]}
    return {n: {**settings, "param_state": stored[n]["param_state"]} for n in range(num_parts)}


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }


def _model(chunks: Sequence[Any], metadata: dict[str, Any]) -> dict[str, Any]:
    # Chunk by chunk, not joined: a layer has the same name in each of them.
    return {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in zip(_keys(chunks), chunks, strict=True)}


def _keys(chunks: Sequence[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{position}" for position in range(len(chunks))]
