"""Saves and loads model, optimizer and schedule of a learner in Megatron's torch_dist format, in any parallel layout.

    copy, StateCopy, finish        a checkpoint in the background: each rank copies its part, writes it, rank 0 finishes
    load                           continues from it
    copy_weights, save_weights     the weights alone; ``save_weights`` reads them as it writes, without a copy
    load_weights, StoredTensors    the weights alone, of any torch_dist folder
    sharded_tensors                Megatron's description of each weight of a model

The ranks of the learner call it, and programs that convert checkpoints.

Random state is left out: training uses no random numbers (no dropout; the order of data comes from seed and cursor).
A folder may come from an untrusted source, and torch stores parts of it as pickles. Reading accepts only numbers,
strings and torch's own records in them, and runs no code.
"""

from __future__ import annotations

import os
import pickle
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import dict_utils, mapping
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from torch.distributed.checkpoint import (
    default_planner,
    filesystem,
    metadata,
    planner,
    planner_helpers,
    state_dict_saver,
    storage,
)
from torch.distributed.checkpoint.api import CheckpointException

from slime_core.checkpoint.folder import writing
from slime_core.errors import CheckpointError

COMMON = "common.pt"
"""The part that is not a tensor: settings of parameter groups, step counts, the schedule."""

OF_ADAM = ("param", "exp_avg", "exp_avg_sq")
TORCH_SAVE = filesystem.SerializationFormat.TORCH_SAVE
NO_TRANSFORMS = filesystem._StorageWriterTransforms()

RECORDS = tuple(f"torch.distributed.checkpoint.{name}" for name in ("metadata", "planner", "filesystem"))
"""Modules whose records and enumerations describe a checkpoint."""

ENUMS = (metadata._MEM_FORMAT_ENCODING, planner.WriteItemType)
HARMLESS = {("torch", "Size"), ("torch.serialization", "_get_layout")}
FOREIGN = "No code of it was run. It was not written by a run, or was changed: take another checkpoint."

UNREADABLE = (dist_checkpointing.core.CheckpointingException, CheckpointException, KeyError, OSError, EOFError)
"""Errors of Megatron and torch about a checkpoint that they cannot read."""

NOT_WEIGHTS = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|.*_extra_state")
"""Keys of tensors in a checkpoint that are not weights of the model."""


Stores = Callable[[str], bool]
"""Returns whether a checkpoint holds the parameter or buffer with this name in a chunk."""


def copy(
    folder: Path, *, chunks: Sequence[Any], optimizer: Any, schedule: Any, stores: Stores | None = None
) -> StateCopy:
    """Copy the learner's state, to write it into ``folder`` later. Collective over all ranks; writes nothing.

    Arguments:
        stores: None: the checkpoint holds all weights.
    """
    gathers = _Gathers()
    with gathers.replacing_gathers_of(optimizer):
        state = _state(chunks, optimizer, loading=False, stores=stores) | {"schedule": schedule.state_dict()}
    _agree_on_steps(state["optimizer"])
    return StateCopy(state, folder, gathers)


def copy_weights(folder: Path, *, chunks: Sequence[Any]) -> StateCopy:
    """Copy the chunks' weights, to write them into ``folder`` later. Collective over all ranks; writes nothing."""
    return StateCopy(_model(chunks), folder, _Gathers())


def save_weights(folder: Path, *, chunks: Sequence[torch.nn.Module], fill: Callable[[torch.Tensor], None]) -> None:
    """Write the chunks' weights into ``folder``, which is created, without copying them. Collective over all ranks.

    Arguments:
        fill: loads the weights of a parameter, or of its part on this rank; called just before that is written.
            Parameters are written one after the other.

    Raises:
        CheckpointError: a rank could not write its part.
    """
    state, common = save_preprocess(_model(chunks))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            _write_common(folder, _pickled(common))
        state_dict_saver.save(_flat(state), storage_writer=_Writer(folder), planner=_Planner(fill))
    except (CheckpointException, OSError, RuntimeError) as problem:  # torch's file writer raises a bare RuntimeError
        cause = _first(problem) if isinstance(problem, CheckpointException) else problem
        raise CheckpointError(f"{folder} cannot be written: {cause}. Free space there, then resume.") from problem


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """The part of a state that a rank has written.

    Arguments:
        folder: of the state.
        results: where each of its tensors is.
        description: of the tensors of all ranks; set by rank 0 only.
    """

    folder: Path
    results: list[storage.WriteResult]
    description: metadata.Metadata | None


class StateCopy:
    """A copy in host memory of this rank's part of a state.

    Building it is collective and writes nothing. :meth:`write` may run in another thread while the state changes. The
    state is complete on disk once :func:`finish` has run with the parts of all ranks.

    Arguments:
        state: as Megatron shards it.
        folder: of the state; :meth:`write` creates it.
        gathers: parts of the optimizer's tensors that other ranks still have to send.
    """

    def __init__(self, state: dict[str, Any], folder: Path, gathers: _Gathers) -> None:
        self._folder = folder
        self._gathers = gathers
        sharded, common = save_preprocess(state)
        self._rank = dist.get_rank()
        self._common = _pickled(common) if self._rank == 0 else b""
        writer = _Writer(folder, held=gathers.storages)
        plans = save_state_dict_async_plan(_flat(sharded), writer, None, 0, planner=_Planner())
        (_, self._description, _), *_ = plans
        self._items = deque(writer.items)

    def write(self) -> WrittenPart:
        """Write this rank's part, and release the copy. Collective over ranks whose optimizers share a state.

        Raises:
            CheckpointError: a file cannot be written; the message names it.
        """
        self._gathers.run()
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            with writing(self._folder / COMMON):
                _write_common(self._folder, self._common)
        return WrittenPart(self._folder, self._write_tensors() if self._items else [], self._description)

    def _write_tensors(self) -> list[storage.WriteResult]:
        path, results = self._folder / f"__{self._rank}_0.distcp", []
        with writing(path), path.open("wb") as file:
            while self._items:
                item, value = self._items.popleft()
                if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() != value.nbytes:
                    value = value.clone()  # a view would be written with all of the storage under it
                results.append(filesystem._write_item(NO_TRANSFORMS, file, value, item, path.name, TORCH_SAVE))
            file.flush()
            os.fsync(file.fileno())
        return results


def finish(parts: Sequence[WrittenPart]) -> None:
    """Write the description of each state. Not collective.

    Arguments:
        parts: of all ranks.

    Raises:
        CheckpointError: a description cannot be written.
    """
    for folder in dict.fromkeys(part.folder for part in parts):
        of_folder = [part for part in parts if part.folder == folder]
        (description,) = [part.description for part in of_folder if part.description is not None]
        with writing(folder / ".metadata"):
            _Writer(folder).finish(description, [part.results for part in of_folder])


def _pickled(common: dict[str, Any]) -> bytes:
    torch.save(common, stream := BytesIO())
    return stream.getvalue()


def _write_common(folder: Path, common: bytes) -> None:
    (folder / COMMON).write_bytes(common)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """Convert ``state`` for torch: by the names under which Megatron stores tensors."""
    flat, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(state, True)
    converted: dict[str, Any] = torch_dist.mcore_to_pyt_state_dict(flat, False)
    return converted


class _Gathers:
    """Gathers the optimizer's tensors, of which each data-parallel rank has a part.

    Megatron gathers them in ``DistributedOptimizer.get_parameter_state_dp_zero``, which passes over all of them seven
    times before it returns (distrib_optimizer.py:977). Here each rank copies only its part to its place in a buffer;
    :meth:`run` sends the parts to the first rank of the group, which writes them.

    Attributes:
        storages: addresses of the buffers.
    """

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self._parts: list[tuple[dist.ProcessGroup, list[torch.Tensor]]] = []

    @contextmanager
    def replacing_gathers_of(self, optimizer: Any) -> Iterator[None]:
        """Inside the block, let the parts of ``optimizer`` copy their state here instead of gathering it."""
        parts = optimizer.chained_optimizers
        for part in parts:
            part.get_parameter_state_dp_zero = partial(self._copy, part)
        try:
            yield
        finally:
            for part in parts:
                del part.get_parameter_state_dp_zero

    def run(self) -> None:
        """Send the parts to the first rank of their group; nothing else uses these groups."""
        for group, parts in self._parts:
            for rank in range(1, group.size()):
                if group.rank() == rank and parts[rank].numel():
                    dist.send(parts[rank], group=group, group_dst=0)
                elif group.rank() == 0 and parts[rank].numel():
                    dist.recv(parts[rank], group=group, group_src=rank)
        self._parts.clear()

    def _copy(self, optimizer: Any, *, empty_data: bool = False, **_: Any) -> dict[Any, Any]:
        """Return the result of Megatron's method, filled with this rank's part only, or not at all.

        Places are those of Megatron's buffer. Megatron leaves out the padding between buckets, but then looks for
        parameters at their places in the buffer (distrib_optimizer.py:1500).
        """
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for number, ranges in enumerate(optimizer.gbuf_ranges):
            ((dtype, buckets),) = ranges.items()
            buffer, group = optimizer.buffers[number], optimizer.data_parallel_group_gloo
            buffers = {name: torch.empty(buffer.numel, dtype=torch.float32) for name in OF_ADAM}
            state[number] = {dtype: {**buffers, "numel_unpadded": buffer.numel_unpadded}}
            if empty_data:
                continue
            self.storages |= {tensor.untyped_storage().data_ptr() for tensor in buffers.values()}
            for bucket, local_ranges in zip(buffer.buckets, buckets, strict=True):
                start, size = bucket.offset, bucket.grad_data.numel() // group.size()
                end = start + bucket.numel_unpadded
                for name, flat in buffers.items():
                    parts = [
                        flat[start + rank * size : min(start + rank * size + size, end)] for rank in range(group.size())
                    ]
                    self._parts.append((group, parts))
                    self._fill(parts[group.rank()], name, local_ranges["param_map"], optimizer)
        return state

    def _fill(self, part: torch.Tensor, name: str, param_map: Any, optimizer: Any) -> None:
        for parameter, ranges in param_map.items():
            place, state = ranges["gbuf_local"], optimizer._get_main_param_and_optimizer_states(parameter)
            part[place.start : place.end].copy_(state[name].detach())


class _Writer(filesystem.FileSystemWriter):
    """torch's writer, except that it copies the tensors of a plan instead of writing them; see :class:`StateCopy`.

    Arguments:
        held: storages that are copies already.

    Attributes:
        items: the items that this rank has to write, with the copies.
    """

    def __init__(self, path: str | Path, *, held: Set[int] = frozenset()) -> None:
        super().__init__(path)
        self._held = held
        self.items: list[tuple[planner.WriteItem, torch.Tensor | BytesIO]] = []

    def storage_meta(self) -> metadata.StorageMeta | None:
        return None  # torch would record this machine's path of the folder

    def prepare_local_plan(self, plan: planner.SavePlan) -> planner.SavePlan:
        return plan  # torch would create the folder here, and a rank that fails would leave the other ranks waiting

    def prepare_write_data(self, plan: planner.SavePlan, source: planner.SavePlanner) -> None:
        """Copy the items of ``plan``, which are this rank's."""
        for item in plan.items:
            value = source.resolve_data(item)
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in self._held:
                value = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            self.items.append((item, value))


class _Planner(torch_dist.MCoreSavePlanner):  # type: ignore[misc]
    """Megatron's planner; calls ``fill`` with each tensor just before it is written."""

    def __init__(self, fill: Callable[[torch.Tensor], None] | None = None) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._fill = fill

    def resolve_data(self, write_item: Any) -> Any:
        value = super().resolve_data(write_item)
        if self._fill is not None and isinstance(value, torch.Tensor):
            self._fill(value)
        return value


def load(folder: Path, *, chunks: Sequence[Any], optimizer: Any, schedule: Any, stores: Stores | None = None) -> None:
    """Load the state in ``folder`` into the learner. Collective over all ranks.

    The learning rate follows the settings of this run, from the step at which the checkpoint was taken.

    Arguments:
        stores: as for :func:`copy` when the checkpoint was written; other weights stay.

    Raises:
        CheckpointError: the folder is not such a checkpoint, or is of another model.
    """
    with _Gathers().replacing_gathers_of(optimizer):
        state = _state(chunks, optimizer, loading=True, stores=stores) | {"schedule": schedule.state_dict()}
    stored = _read(state, folder)
    for key, chunk in zip(_keys(chunks), chunks, strict=True):
        chunk.load_state_dict(stored[key], strict=stores is None)
    optimizer.load_state_dict(_regroup(stored["optimizer"], num_parts=len(optimizer.chained_optimizers)))
    _continue_schedule(schedule, optimizer, num_steps=stored["schedule"]["num_steps"])


def load_weights(folder: Path, *, chunks: Sequence[Any]) -> None:
    """Load the weights of a torch_dist folder into the chunks, in any layout. Not collective.

    Raises:
        CheckpointError: the folder holds no weights, or those of another model.
    """
    StoredTensors(folder).read(sharded_tensors(chunks))


class StoredTensors:
    """Reads the weights in a torch_dist folder one by one into the chunks of a model. Not collective.

    Arguments:
        folder: of a run, of ``slime convert`` or of Megatron; only its weights are read.

    Attributes:
        held: key -> shape and dtype of each stored weight.

    Raises:
        CheckpointError: the folder cannot be read, or names files of other folders.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _reading(folder):
            self._metadata = filesystem.FileSystemReader(folder).read_metadata()
        for place in (self._metadata.storage_data or {}).values():
            name = place.relative_path
            if Path(name).name != name or not (folder / name).is_file() or (folder / name).is_symlink():
                raise CheckpointError(
                    f"{folder / '.metadata'} names {name!r:.80} as a file of weights; accepted: the name of a file in "
                    "the same folder, and that file. Copy the checkpoint again from a source that you trust."
                )
        self._tensors = {
            key: stored
            for key, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, metadata.TensorStorageMetadata) and not NOT_WEIGHTS.match(key)
        }
        self.held: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {
            key: (tuple(stored.size), stored.properties.dtype) for key, stored in self._tensors.items()
        }

    def read(self, tensors: Sequence[mapping.ShardedTensor]) -> None:
        """Fill ``tensors``, which :func:`sharded_tensors` returned, with the stored weights, cast to their dtype.

        Raises:
            CheckpointError: a tensor is missing or has another shape in the folder, or a file is damaged.
        """
        reader = filesystem.FileSystemReader(self._folder)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        with _reading(self._folder):
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


class _Into(default_planner.DefaultLoadPlanner):
    """Reads into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def load_bytes(self, read_item: planner.ReadItem, value: BytesIO) -> None:
        raise ValueError("it holds an object instead of a tensor")

    def lookup_tensor(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self._target


def sharded_tensors(chunks: Sequence[torch.nn.Module]) -> list[mapping.ShardedTensor]:
    """Return Megatron's ShardedTensor of each parameter and buffer, or of its part here; their data are views."""
    state = _model(chunks)
    mapping.apply_factories(state)
    return [value for value in dict_utils.nested_values(state) if isinstance(value, mapping.ShardedTensor)]


def _read(state: dict[str, Any], folder: Path) -> Any:
    with _reading(folder):
        return dist_checkpointing.load(state, str(folder))


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Context for reading ``folder``: unpickles no code, and turns read errors into a CheckpointError."""
    try:
        with _without_code():
            yield
    except pickle.UnpicklingError as problem:
        raise CheckpointError(f"{folder} cannot be loaded: {_first_line(problem)}. {FOREIGN}") from problem
    except UNREADABLE as problem:
        cause = _first(problem) if isinstance(problem, CheckpointException) else problem
        raise CheckpointError(f"{folder} cannot be loaded: {cause}. {_advice(str(cause), folder)}") from problem


class _Description(pickle.Unpickler):
    """Unpickles the ``.metadata`` of a checkpoint; allows only torch's records, enumerations, dtypes and layouts."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in HARMLESS or (module == "torch" and isinstance(vars(torch).get(name), torch.dtype)):
            return super().find_class(module, name)
        if module in RECORDS and "." not in name:
            kind = super().find_class(module, name)
            if isinstance(kind, type) and kind.__module__ == module and (is_dataclass(kind) or kind in ENUMS):
                return kind
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as a call of ``getattr``."""
    if kind not in ENUMS:
        raise pickle.UnpicklingError(
            "it names builtins.getattr of something other than an enumeration, which no checkpoint needs"
        )
    return kind[name]


@contextmanager
def _without_code() -> Iterator[None]:
    """Let torch read a checkpoint without running code of it.

    torch 2.13 unpickles the description of the tensors (distributed/checkpoint/filesystem.py:930), and objects other
    than tensors (default_planner.py:387), without restriction. Megatron's ``common.pt`` is read with ``weights_only``.
    """
    reader: Any = filesystem
    reads, load = reader.pickle, torch.load

    def load_weights_only(*arguments: Any, **options: Any) -> Any:
        return load(*arguments, **{**options, "weights_only": True})

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


def _continue_schedule(schedule: Any, optimizer: Any, *, num_steps: int) -> None:
    # Megatron's load_state_dict adds to the steps counted since construction, and asserts that no setting has changed.
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = schedule.max_lr, schedule.min_lr
    schedule.num_steps = 0
    schedule.step(increment=num_steps)


def _first(problem: CheckpointException) -> BaseException:
    """Return the error of the first rank that failed; the CheckpointException itself prints a traceback."""
    return next(iter(problem.failures.values()))[0]


def _state(chunks: Sequence[Any], optimizer: Any, *, loading: bool, stores: Stores | None) -> dict[str, Any]:
    model = trained = _model(chunks, stores)
    # All ranks have to name the same tensors, so the condition is whether any rank has a frozen parameter.
    if any(_all_gather(any(not parameter.requires_grad for chunk in chunks for parameter in chunk.parameters()))):
        # A frozen layer or expert has no optimizer state, so a tensor over all of them would have holes.
        trained = _model(chunks, stores, non_homogeneous_layers=True, singleton_local_shards=True)
    return {**model, "optimizer": optimizer.sharded_state_dict(trained, is_loading=loading, metadata=_metadata())}


def _agree_on_steps(state: dict[Any, Any]) -> None:
    """Set the step count of all ranks to the largest: rank 0 writes it, and without trained parameters has 0."""
    parts = [state] if "optimizer" in state else list(state.values())
    groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
    counted = max(_all_gather(max((group.get("step") or 0 for group in groups), default=0)))
    if counted:
        for group in groups:
            group["step"] = counted


def _regroup(stored: dict[Any, Any], *, num_parts: int) -> dict[Any, Any]:
    """Convert ``stored`` for an optimizer of ``num_parts`` parts, for any number of parts in the run that saved it.

    Experts that ranks share have a separate optimizer, and so separate parameter groups. Tensors are stored under the
    names of weights, but the settings of a group and its step count by optimizer and by kind of parameter.
    """
    saved = [stored] if "optimizer" in stored else [part for part in stored.values() if "optimizer" in part]
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    both = [{**group, "is_expert_parallel": experts} for experts in (True, False) for group in groups]
    settings = {**saved[0], "optimizer": {**saved[0]["optimizer"], "param_groups": [*both, *groups]}}
    if num_parts == 1:
        return {**settings, "param_state": stored["param_state"]}
    return {n: {**settings, "param_state": stored[n]["param_state"]} for n in range(num_parts)}


def _all_gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }


def _model(chunks: Sequence[Any], stores: Stores | None = None, **changes: bool) -> dict[str, Any]:
    metadata = _metadata() | changes
    # Chunk by chunk, not joined: a layer has the same name in each of them.
    states = [chunk.sharded_state_dict(metadata=metadata) for chunk in chunks]
    if stores is not None:
        states = [{name: tensor for name, tensor in state.items() if stores(name)} for state in states]
    return dict(zip(_keys(chunks), states, strict=True))


def _keys(chunks: Sequence[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{position}" for position in range(len(chunks))]
