"""The processes of a conversion, and a model that allocates memory for only a few of its weights at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from slime_convert.formats import Shapes, compare, main_dtype
from slime_core import boundary
from slime_core.checkpoint import StoredTensors, sharded_tensors
from slime_core.errors import CheckpointError, ConfigError
from slime_core.modeling import MBridgeSpec
from slime_core.modeling.layout import ParallelLayout, initialize_model_parallel
from slime_core.modeling.spec import MappedWeight
from slime_core.weights import WeightSpec

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Limit of one collective operation; torch's own default for gloo is half an hour."""

BATCH_BYTES = 256 * 2**20
"""Bytes of weights that are read from a torch_dist folder together."""

MOST_PADDING = 8192
"""Limit on an embedding's rows beyond the vocabulary: Megatron pads to 128 times the tensor-parallel size."""

T = TypeVar("T")


def world_size() -> int:
    """Return the number of processes of a conversion: as torchrun started them, else 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def parallel_groups(layout: ParallelLayout) -> Iterator[None]:
    """Join the other processes and Megatron's parallel groups inside the context, on the CPU.

    A process that is already in Megatron's groups stays in them.
    """
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        yield
        return
    if world_size() == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    else:
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        initialize_model_parallel(layout, seed=0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def gather(value: T) -> list[T]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first(do: Callable[[], object]) -> None:
    """Call ``do`` on rank 0 only.

    Raises:
        CheckpointError: on the other ranks if it fails; rank 0 raises the original error.
    """
    problem: Exception | None = None
    if dist.get_rank() == 0:
        try:
            do()
        except Exception as error:
            problem = error
    failed: list[bool] = [problem is not None]
    dist.broadcast_object_list(failed, src=0)
    if problem is not None:
        raise problem
    if failed[0]:
        raise CheckpointError("the conversion stops here because rank 0 failed; its message says why")


class ConvertedModel:
    """A model whose weights have memory only inside :meth:`held`. Creating it is collective.

    Arguments:
        spec: the spec that builds it.
        config: the object of ``config.json``.
        dtype: dtype of the parameters.
        layout: the layout with which Megatron was initialised.

    Attributes:
        weights: weights of this rank.
        specs: Hugging Face name -> dtype and shape of this rank's weights.
        owned: names in ``specs`` that no lower rank has; a tied embedding is on two pipeline stages.
        tensors: Megatron's ShardedTensors of this rank.
    """

    def __init__(
        self, spec: MBridgeSpec, config: Mapping[str, Any], *, dtype: torch.dtype, layout: ParallelLayout
    ) -> None:
        # The initialisers do nothing, so that Linux maps no pages. perform_initialization=False would omit the
        # attributes that describe the split of a parameter (tensor_parallel/layers.py:265).
        methods = ("init_method", "embedding_init_method", "output_layer_init_method")
        settings: dict[str, Any] = {**dict.fromkeys(methods, _leave_alone), "calculate_per_token_loss": True}
        with boundary("the model spec", "building the model", locate=True, passes=(ConfigError, CheckpointError)):
            self.chunks = spec.build(config, dtype=dtype, parallel=layout, overrides=settings)
        self.weights = spec.mapped(self.chunks)
        self.tensors = sharded_tensors(self.chunks)
        self.specs = {name: weight_spec for weight in self.weights for name, weight_spec in _specs(weight)}
        on_lower_ranks = {name for names in gather(list(self.specs))[: dist.get_rank()] for name in names}
        self.owned = [name for name in self.specs if name not in on_lower_ranks]
        self._sizes = {_storage_id(weight.tensor): weight.tensor.untyped_storage().nbytes() for weight in self.weights}
        self._by_storage = {_storage_id(weight.tensor): weight for weight in self.weights}

    @contextmanager
    def held(self, weights: Sequence[MappedWeight]) -> Iterator[None]:
        """Allocate memory for ``weights`` inside the context; their content is lost when it ends."""
        storages = [weight.tensor.untyped_storage() for weight in weights]
        for storage in storages:
            if storage.nbytes() == 0:
                storage.resize_(self._sizes[storage._cdata])
        try:
            yield
        finally:
            for storage in storages:
                storage.resize_(0)

    def weight_of(self, tensor: torch.Tensor) -> MappedWeight:
        """Return the weight that ``tensor`` is, or is a part of."""
        return self._by_storage[_storage_id(tensor)]

    def tensors_of(self, weights: Sequence[MappedWeight]) -> list[Any]:
        """Return the ShardedTensors that are ``weights``, or parts of them."""
        storages = {_storage_id(weight.tensor) for weight in weights}
        return [tensor for tensor in self.tensors if _storage_id(tensor.data) in storages]

    def batches(self, requested: Iterable[str]) -> Iterator[list[MappedWeight]]:
        """Yield the weights with a name in ``requested``, about ``BATCH_BYTES`` at a time."""
        names = set(requested)
        batch: list[MappedWeight] = []
        for weight in (mapped for mapped in self.weights if names.intersection(mapped.names)):
            batch.append(weight)
            if sum(self._sizes[_storage_id(mapped.tensor)] for mapped in batch) >= BATCH_BYTES:
                yield batch
                batch = []
        if batch:
            yield batch


def _leave_alone(parameter: torch.Tensor) -> None:
    """Do nothing, as an initialiser."""


def _storage_id(tensor: torch.Tensor) -> int:
    """Return an id of the storage of ``tensor``, valid even while its memory is freed."""
    pointer: int = tensor.untyped_storage()._cdata
    return pointer


def _specs(weight: MappedWeight) -> Iterator[tuple[str, WeightSpec]]:
    dtype = str(weight.tensor.dtype).removeprefix("torch.")
    for name, shape in weight.shapes().items():
        yield name, WeightSpec(name, dtype, shape)


class TorchDistWeights:
    """The weights of a torch_dist folder with their Hugging Face names. Opening is collective, reading is not.

    Arguments:
        folder: the torch_dist folder.
        spec, config: of its model.
        layout: the layout with which Megatron was initialised.
        casts: name -> dtype of weights whose Hugging Face file has another dtype than the model.

    Attributes:
        specs: name -> dtype and shape of this rank's weights that no lower rank has.

    Raises:
        CheckpointError: the folder does not match the model.
    """

    def __init__(
        self,
        folder: Path,
        spec: MBridgeSpec,
        config: Mapping[str, Any],
        *,
        layout: ParallelLayout,
        casts: Mapping[str, str] | None = None,
    ) -> None:
        self._stored = StoredTensors(folder)
        self._casts = casts or {}
        sizes: dict[str, int] = {}
        for shape, dtype in self._stored.held.values():
            name = str(dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + torch.Size(shape).numel()
        self._model = ConvertedModel(spec, config, dtype=main_dtype(sizes), layout=layout)
        on_first_of = [stored for of_rank in gather(_described(self._model.tensors)) for stored in of_rank.items()]
        on_first(lambda: _require_fit(folder, self._stored, dict(on_first_of)))
        held = {name: self._model.specs[name] for name in self._model.owned}
        self.specs = {n: WeightSpec(n, self._casts.get(n, stored.dtype), stored.shape) for n, stored in held.items()}

    def parts(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield all weights of ``specs``, some at a time; each part is valid until the next."""
        for batch in self._model.batches(self.specs):
            with self._model.held(batch):
                yield {name: weight for name, weight in self._read(batch).items() if name in self.specs}

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return copies of the weights ``names``."""
        tensors: dict[str, torch.Tensor] = {}
        for batch in self._model.batches(names):
            with self._model.held(batch):
                tensors |= {name: tensor.clone() for name, tensor in self._read(batch).items() if name in names}
        return tensors

    def _read(self, batch: Sequence[MappedWeight]) -> dict[str, torch.Tensor]:
        self._stored.read(self._model.tensors_of(batch))
        exported = {name: tensor for weight in batch for name, tensor in weight.export().items()}
        return {
            n: tensor.to(getattr(torch, self._casts[n])) if n in self._casts else tensor
            for n, tensor in exported.items()
        }


Described = dict[str, tuple[tuple[int, ...], str, bool]]
"""Key -> shape, dtype, and True if the first dimension is a padded vocabulary."""


def _described(tensors: Sequence[Any]) -> Described:
    return {
        tensor.key: (
            tuple(tensor.global_shape),
            str(tensor.dtype).removeprefix("torch."),
            bool(tensor.allow_shape_mismatch),
        )
        for tensor in tensors
    }


def _require_fit(folder: Path, stored: StoredTensors, expected: Described) -> None:
    stored_shapes: Shapes = {
        key: (shape, str(dtype).removeprefix("torch.")) for key, (shape, dtype) in stored.held.items()
    }
    required = {key: (shape, dtype) for key, (shape, dtype, _) in expected.items()}
    for key, (shape, dtype, padded) in expected.items():
        rows = (
            stored_shapes[key][0][0]
            if padded and key in stored_shapes and len(stored_shapes[key][0]) == len(shape)
            else shape[0]
        )
        if rows != shape[0] and shape[0] < rows < shape[0] + MOST_PADDING:
            required[key] = ((rows, *shape[1:]), dtype)
    if differences := compare(stored_shapes, required):
        raise CheckpointError(
            f"{folder} does not fit the model of its config.json: {differences}. Give the folder that it was made from "
            "(--origin-hf-dir), or the number of rows without padding (--vocab-size)."
        )
