"""Name, dtype and shape of every weight, compared before anything is sent; and the buckets in which weights are sent.

Specs are read from the headers of a checkpoint. A bucket is one broadcast in the server's ``flattened_bucket`` format:
the bytes of its weights one after another, nothing between them. The server views each weight at its offset, which has
to be a multiple of the item size, so a bucket holds one dtype (sglang 0.5.23, srt/weight_sync/tensor_bucket.py,
``FlattenedTensorBucket.empty``).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import WeightSyncError
from slime_core.untrusted import as_object, open_regular, parse_json, read_object

if TYPE_CHECKING:
    import torch


DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""safetensors' names of dtypes -> torch's."""

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

TIED = "lm_head.weight"
"""The output weight that a model with tied embeddings may leave out, or repeat."""

MOST_HEADER = 100_000_000
"""Bytes of a header, as the safetensors library has it."""

SHOWN = 8
"""Names listed of one kind of mistake: enough to see the pattern."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One full (unsharded) weight under its Hugging Face name.

    Example: ``WeightSpec("model.norm.weight", "float32", (64,))`` holds 256 bytes.

    Arguments:
        name: Hugging Face name.
        dtype: torch's name of the dtype, without ``torch.``.
        shape: sizes of all dimensions.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def expected_specs(folder: Path | str) -> dict[str, WeightSpec]:
    """The weights that an engine started from ``folder`` expects: those of its safetensors files, by name.

    Reads the headers only.

    Raises:
        WeightSyncError: there is no safetensors file in ``folder``, or a header cannot be read.
    """
    files = weight_files(Path(folder))
    return {spec.name: spec for file in files for spec in _header(file)}


def is_tied(folder: Path | str) -> bool:
    """Whether the model of ``folder`` uses its embedding as output weight."""
    return bool(_config(folder).get("tie_word_embeddings", False))


def num_kv_heads(folder: Path | str) -> int:
    """Key-value heads of the model of ``folder``; 0: its config does not say."""
    return int(_config(folder).get("num_key_value_heads") or 0)


def require_matching_specs(
    specs: Sequence[WeightSpec], expected: Mapping[str, WeightSpec], *, tied: bool = False, dtype: str | None = None
) -> None:
    """Return if ``specs`` can be sent to engines that expect ``expected``.

    Arguments:
        specs: of the weights to send.
        expected: result of :func:`expected_specs`.
        tied: the model uses its embedding as output weight: that one may be absent on either side.
        dtype: what the engines compute in, if not in the dtype of their checkpoint; both are accepted, an engine casts.

    Raises:
        WeightSyncError: weights are missing, unknown, duplicate, or of another shape or dtype; lists them.
    """
    sent = {spec.name: spec for spec in specs}
    ignored = {TIED} if tied else set()
    both = [(sent[name], expected[name]) for name in sent if name in expected]
    mistakes = {
        "missing": sorted(set(expected) - set(sent) - ignored),
        "unknown to the engines": sorted(set(sent) - set(expected) - ignored),
        "sent twice": sorted({spec.name for spec in specs if specs.count(spec) > 1}) if len(sent) < len(specs) else [],
        "wrong shape": [f"{a.name}: {a} instead of {b}" for a, b in both if a.shape != b.shape],
        "wrong dtype": [f"{a.name}: {a} instead of {b}" for a, b in both if a.dtype not in (b.dtype, dtype)],
    }
    if any(mistakes.values()):
        raise WeightSyncError(
            f"The learner exports {len(specs)} weights, the engines expect {len(expected)}; they differ, "
            "so nothing was sent. "
            + "; ".join(f"{kind}: {_listed(names)}" for kind, names in mistakes.items() if names)
            + ". The learner has to export the names and shapes of the checkpoint that the engines were started from."
        )


def _config(folder: Path | str) -> dict[str, Any]:
    try:
        return read_object(Path(folder) / "config.json")
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"{Path(folder) / 'config.json'} cannot be read: {error}") from error


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, or all.

    Raises:
        WeightSyncError: there is none, or the index is none or names files of other folders.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in sorted(set(weight_map(index).values()))]
    if not files:
        raise WeightSyncError(f"{folder} holds no *.safetensors file. Convert the checkpoint.")
    return files


def weight_map(index: Path) -> dict[str, str]:
    """Name of a weight -> name of the file in the folder of ``index`` that holds it.

    Raises:
        WeightSyncError: ``index`` cannot be read, is no index, or names files of other folders.
    """
    try:
        found = as_object(read_object(index).get("weight_map"))
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f'{index} is no index of weights: {error}. Expected is {{"weight_map": {{NAME: FILE}}}}; download it again.'
        ) from error
    for name, file in found.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise WeightSyncError(
                f"{index} says that {name!r:.80} is in {file!r:.80}; accepted is the name of a file in the same "
                "folder. Download it again from a source that you trust."
            )
    return found


def _header(file: Path) -> Iterator[WeightSpec]:
    for name, entry in _read_header(file)[1].items():
        yield WeightSpec(name, _dtype(entry.get("dtype"), file), tuple(entry["shape"]))


def _read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Bytes of the header's JSON, and name -> entry.

    Raises:
        WeightSyncError: it cannot be read, or is none.
    """
    # The format: 8 bytes of little-endian length, that much JSON, then the data (safetensors, "Format").
    try:
        with open_regular(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > MOST_HEADER:
                raise ValueError(
                    f"it says to have {length:,} bytes; safetensors has headers of at most {MOST_HEADER:,}"
                )
            header = as_object(parse_json(stream.read(length)))
        entries = {name: as_object(entry) for name, entry in header.items() if name != "__metadata__"}
        for name, entry in entries.items():
            sizes = [*entry["shape"], *entry["data_offsets"]]
            if len(entry["data_offsets"]) != 2 or not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
                raise ValueError(f"{name!r:.80} has no shape and no place in the file")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightSyncError(
            f"{file}: its safetensors header cannot be read: {error!r}. Download or copy it again."
        ) from error
    return length, entries


def _dtype(name: object, file: Path) -> str:
    if not isinstance(name, str) or name not in DTYPES:
        raise WeightSyncError(f"{file} holds weights of dtype {name}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


def require_complete_files(folder: Path) -> None:
    """Return if the size of every safetensors file of the checkpoint is that of its header.

    Raises:
        WeightSyncError: one differs, as after an interrupted download; or there is none, or a header cannot be read.
    """
    for file in weight_files(folder):
        expected, found = _described_size(file), file.stat().st_size
        if expected != found:
            raise WeightSyncError(
                f"{file} is incomplete: its header describes {expected:,} bytes, and the file has {found:,}. "
                "Download or copy it again."
            )


def _described_size(file: Path) -> int:
    length, entries = _read_header(file)
    return 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights of one dtype that are sent together, in this order."""

    specs: tuple[WeightSpec, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def names(self) -> list[str]:
        """Hugging Face names."""
        return [spec.name for spec in self.specs]

    @property
    def dtypes(self) -> list[str]:
        """torch's names of the dtypes."""
        return [spec.dtype for spec in self.specs]

    @property
    def shapes(self) -> list[list[int]]:
        """Sizes."""
        return [list(spec.shape) for spec in self.specs]


def plan_buckets(specs: Sequence[WeightSpec], *, bytes_limit: int) -> list[Bucket]:
    """Every weight in exactly one bucket, in the order in which the buckets are complete when weights arrive as in
    ``specs``.

    Inside a bucket the order of ``specs`` is kept. At most one bucket a dtype is open at a time.

    Arguments:
        specs: all weights in the order of the export.
        bytes_limit: largest bucket in bytes; one larger weight gets a bucket of its own.
    """
    done: list[Bucket] = []
    opened: dict[str, list[WeightSpec]] = {}
    for spec in specs:
        current = opened.setdefault(spec.dtype, [])
        if current and sum(one.nbytes for one in current) + spec.nbytes > bytes_limit:
            done.append(Bucket(tuple(current)))
            current.clear()
        current.append(spec)
    return done + [Bucket(tuple(rest)) for rest in opened.values() if rest]


def flatten(tensors: Sequence[torch.Tensor], *, into: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 [bytes]: the bytes of ``tensors`` one after the other, a copy on their device.

    Arguments:
        into: uint8, large enough: the copy is its beginning. None: the copy is new memory.
    """
    import torch

    pieces = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    if into is None:
        return torch.cat(pieces)
    return torch.cat(pieces, out=into[: sum(map(len, pieces))])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, uncopied if it is contiguous. Do not keep them longer than ``tensor``.

    DLPack, because memory that ``Tensor.numpy`` has seen cannot be released by its owner any more (torch's "not
    resizable"), as an offloaded learner does.
    """
    import numpy as np
    import torch

    return np.from_dlpack(tensor.detach().contiguous().reshape(-1).view(torch.uint8)).data


def checksum(flat: torch.Tensor, *, start: int = 0) -> int:
    """CRC-32 of the bytes of a flattened bucket, continuing from ``start``."""
    return zlib.crc32(flat.cpu().numpy().tobytes(), start)


def spec_of(name: str, tensor: torch.Tensor) -> WeightSpec:
    """The spec of ``tensor`` under ``name``."""
    return WeightSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
