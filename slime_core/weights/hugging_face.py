"""Hugging Face folders: reads the headers of a checkpoint's weights, and writes folders for disk and checkpoints.

A safetensors file starts with the length of its header, then the header as JSON, then the bytes of the weights
(safetensors, "Format"). Reading reads headers only, because files may be large.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from slime_core.errors import WeightSyncError
from slime_core.untrusted import as_object, open_regular, read_object

if TYPE_CHECKING:
    import torch


DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""safetensors' name of a dtype -> torch's name, and the bytes of a number."""

ITEM_BYTES = dict(DTYPES.values())

INDEX = "model.safetensors.index.json"
"""File that names the file of each weight, if there are several."""

SHARD_BYTES = 5 * 10**9
"""Size at which a new file starts, as in transformers."""

HEADER_BYTES = 128 * 2**10
"""Bytes reserved for the header of a file, which is written last: enough for about a thousand weights."""

COPY_BYTES = 64 * 2**20
"""Bytes of a weight that are copied from a GPU at once."""

ENTRY_BYTES = 160
"""Upper bound of the bytes that a header needs for one weight, without its name."""

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "*.py",
)
"""Files of a model other than its weights: its configuration, tokenizer, chat template and code."""


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


def expected_specs(folder: Path) -> dict[str, WeightSpec]:
    """Return the weights that an engine started from ``folder`` expects: those of its safetensors files, by name.

    Reads the headers only.

    Raises:
        WeightSyncError: there is no safetensors file in ``folder``, or a header cannot be read.
    """
    specs: dict[str, WeightSpec] = {}
    for file in weight_files(folder):
        with _opened(file) as content:
            for name in content.keys():  # noqa: SIM118 (it is not a mapping)
                entry = content.get_slice(name)
                if (dtype := entry.get_dtype()) not in DTYPES:
                    raise WeightSyncError(f"{file} holds weights of dtype {dtype}; known are {', '.join(DTYPES)}")
                specs[name] = WeightSpec(name, DTYPES[dtype][0], tuple(entry.get_shape()))
    return specs


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: those that its index names; without an index, all.

    Raises:
        WeightSyncError: the folder has no such file, or the index is malformed or names files of other folders.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.exists():
        files = [folder / name for name in sorted(set(weight_map(index).values()))]
    if not files:
        raise WeightSyncError(f"{folder} holds no *.safetensors file. Convert the checkpoint.")
    return files


def weight_map(index: Path) -> dict[str, str]:
    """Read an index: name of a weight -> name of the file, in the folder of ``index``, that holds it.

    Raises:
        WeightSyncError: ``index`` cannot be read, is not an index, or names files of other folders.
    """
    try:
        file_names = as_object(read_object(index).get("weight_map"))
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f'{index} is not an index of weights: {error}; accepted: {{"weight_map": {{NAME: FILE}}}}. '
            "Download it again."
        ) from error
    for name, file in file_names.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise WeightSyncError(
                f"{index} says that {name!r:.80} is in {file!r:.80}; accepted: the name of a file in the same "
                "folder. Download it again from a source that you trust."
            )
    return file_names


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Context that opens ``file`` and checks its header and size, to read names, dtypes and shapes.

    Raises:
        WeightSyncError: ``file`` is incomplete, or not a safetensors file.
    """
    try:
        open_regular(file).close()  # the library would wait for the writer of a FIFO
        with safe_open(file, framework="numpy") as content:
            yield content
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(
            f"{file} is incomplete or no safetensors file: {error}. Download or copy it again."
        ) from error


def require_complete_files(folder: Path) -> None:
    """Check that every safetensors file of the checkpoint has the size that its header states.

    Raises:
        WeightSyncError: a size differs, as after an interrupted download; or the folder has no such file, or a header
            cannot be read.
    """
    expected_specs(folder)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 [bytes]; not copied if it is contiguous."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, not copied if it is contiguous. Do not keep them longer than ``tensor``.

    Uses DLPack: after ``Tensor.numpy`` the owner cannot release the memory any more (torch's "not resizable"), and an
    offloaded learner has to.
    """
    import numpy as np

    return np.from_dlpack(flat_bytes(tensor)).data


def spec_of(name: str, tensor: torch.Tensor) -> WeightSpec:
    """Return the spec of ``tensor`` under ``name``."""
    return WeightSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


# --- Writing ----------------------------------------------------------------------------------------------------------


def write(folder: Path, weights: Iterable[tuple[str, torch.Tensor]], *, template: Path) -> None:
    """Write a folder that transformers and SGLang load: ``weights`` and the small files of ``template``.

    Each weight is written as soon as ``weights`` yields it, so no copy of the model is made.

    Arguments:
        weights: full tensors under Hugging Face names.
        template: folder whose config and tokenizer belong to the weights.
    """
    export = HuggingFaceFolder(folder)
    for name, weight in weights:
        export.add({name: weight})
    export.finish(template=template)


class HuggingFaceFolder:
    """Writes a loadable folder: :meth:`add` weights, then :meth:`finish`.

    Several ranks can write parts of one folder: every rank calls :meth:`close`, and one rank calls :meth:`finish` with
    the parts of all ranks.

    Arguments:
        folder: is created and must not exist; with ``rank``, it must exist.
        rank: number of this rank, if several ranks write into the folder.

    Raises:
        OSError: the folder exists, or cannot be created.
    """

    def __init__(self, folder: Path, *, rank: int | None = None) -> None:
        if rank is None:
            folder.mkdir(parents=True)
        self._folder = folder
        self._rank = rank or 0
        self._parts: list[WrittenFile] = []
        self._open: _OpenPart | None = None

    def add(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Write ``weights``, full tensors.

        Raises:
            OSError: the file cannot be written.
        """
        for name, weight in weights.items():
            if self._open is not None and not self._open.has_room(name, weight):
                self._end_part()
            if self._open is None:
                number = len(self._parts)
                self._open = _OpenPart(self._folder / f".part-{self._rank:05d}-{number:05d}")
            self._open.append(name, weight)

    def close(self) -> list[WrittenFile]:
        """Complete the last file; return the files that this object wrote, under provisional names."""
        self._end_part()
        return self._parts

    def finish(self, *, template: Path, parts: Sequence[WrittenFile] | None = None) -> None:
        """Give every file its final name, and copy the small files; transformers and SGLang can then load the folder.

        Arguments:
            template: folder whose config and tokenizer belong to the weights.
            parts: the files of all ranks; None if this object wrote all files.
        """
        parts = self.close() if parts is None else parts
        if len(parts) == 1:
            parts[0].path.rename(self._folder / "model.safetensors")
        else:
            places: dict[str, str] = {}
            for number, part in enumerate(parts, start=1):
                final = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
                part.path.rename(self._folder / final)
                places |= dict.fromkeys(part.names, final)
            index = {"metadata": {"total_size": sum(part.nbytes for part in parts)}, "weight_map": places}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        copy_small_files(template, self._folder)

    def _end_part(self) -> None:
        if self._open is not None:
            self._parts.append(self._open.close())
            self._open = None


def copy_small_files(template: Path, folder: Path) -> None:
    """Copy the files of a Hugging Face folder other than its weights."""
    for file in (file for pattern in COPIED for file in sorted(template.glob(pattern))):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file under a provisional name, because the final name contains the number of files."""

    path: Path
    names: tuple[str, ...]
    nbytes: int


class _OpenPart:
    """A safetensors file that is being written: reserved bytes, then the weights; :meth:`close` fills in the header.

    A header may end in spaces (safetensors, "Format").
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, dict[str, Any]] = {}
        self._nbytes = 0
        self._header = 0
        path.touch(exist_ok=False)

    def has_room(self, name: str, weight: torch.Tensor) -> bool:
        """Return whether ``weight`` can be appended: files have a size limit, and weights start at a multiple of their
        item size."""
        fits = self._nbytes + weight.nbytes <= SHARD_BYTES and self._nbytes % weight.itemsize == 0
        return fits and self._header + len(json.dumps(name)) + ENTRY_BYTES <= HEADER_BYTES - 64

    def append(self, name: str, weight: torch.Tensor) -> None:
        end = self._nbytes + weight.nbytes
        name_of = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
        dtype = name_of[str(weight.dtype).removeprefix("torch.")]
        with self._path.open("r+b") as stream:
            stream.seek(HEADER_BYTES + self._nbytes)
            for piece in flat_bytes(weight).split(COPY_BYTES):
                stream.write(bytes_of(piece.cpu()))
        self._entries[name] = {"dtype": dtype, "shape": list(weight.shape), "data_offsets": [self._nbytes, end]}
        self._header += len(json.dumps(name)) + ENTRY_BYTES
        self._nbytes = end

    def close(self) -> WrittenFile:
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}).encode()
        with self._path.open("r+b") as stream:
            stream.write((HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(HEADER_BYTES - 8))
        return WrittenFile(self._path, tuple(self._entries), self._nbytes)
