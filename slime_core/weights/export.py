"""Writes full weights as a Hugging Face folder: safetensors, config, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.weights.specs import DTYPES, bytes_of

if TYPE_CHECKING:
    import torch


SHARD_BYTES = 5 * 10**9
"""Size at which a new file starts, as in transformers."""

HEADER_BYTES = 128 * 2**10
"""Bytes that each file has for its header, which is written last: for about a thousand weights."""

COPY_BYTES = 64 * 2**20
"""Bytes of a weight that are copied from a GPU at once."""

ENTRY_BYTES = 160
"""Bytes that a header needs for one weight, its name aside, at most."""

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
"""Files of a model beside its weights: what describes it, its tokenizer, its chat template, its own code."""


def write(folder: Path, weights: Iterable[tuple[str, torch.Tensor]], *, template: Path, writes: bool) -> None:
    """Write a folder that transformers and SGLang load: ``weights`` and the small files of ``template``.

    Each weight is written when it comes, so that no copy of the model is made.

    Arguments:
        weights: full tensors under Hugging Face names; every rank iterates to the end, because gathering is collective.
        template: folder whose config and tokenizer belong to the weights.
        writes: whether this rank writes; the others only gather.
    """
    if not writes:
        for _ in weights:
            continue
        return
    whole = HuggingFaceFolder(folder)
    for name, weight in weights:
        whole.add({name: weight})
    whole.finish(template=template)


class HuggingFaceFolder:
    """Writes a loadable folder: :meth:`add` weights, then :meth:`finish`.

    Several ranks can write parts of one folder: all of them :meth:`close`, and one finishes with the parts of all.

    Arguments:
        folder: is created, and must not exist, unless ``rank`` is given.
        rank: of several that write into the folder, which exists.

    Raises:
        OSError: it exists, or cannot be made.
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
        """The files that this object wrote, complete, under provisional names."""
        self._end_part()
        return self._parts

    def finish(self, *, template: Path, parts: Sequence[WrittenFile] | None = None) -> None:
        """Name the files and copy the small ones; transformers and SGLang can load the folder then.

        Arguments:
            template: folder whose config and tokenizer belong to the weights.
            parts: the files of all ranks; None: this object wrote all.
        """
        _name(self._folder, self.close() if parts is None else parts)
        copy_small_files(template, self._folder)

    def _end_part(self) -> None:
        if self._open is not None:
            self._parts.append(self._open.close())
            self._open = None


def copy_small_files(template: Path, folder: Path) -> None:
    """Copy what is in a Hugging Face folder beside its weights."""
    for file in (file for pattern in COPIED for file in sorted(template.glob(pattern))):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written under a provisional name, because its final one holds the number of files."""

    path: Path
    names: tuple[str, ...]
    nbytes: int


class _OpenPart:
    """A safetensors file that grows: room for the header, then the weights; the header is written at the end.

    A header may end in spaces (safetensors, "Format").
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, dict[str, Any]] = {}
        self._nbytes = 0
        self._header = 0
        path.touch(exist_ok=False)

    def has_room(self, name: str, weight: torch.Tensor) -> bool:
        """Whether ``weight`` can be appended: a file has a size, and a weight lies at a multiple of its item size."""
        fits = self._nbytes + weight.nbytes <= SHARD_BYTES and self._nbytes % weight.itemsize == 0
        return fits and self._header + len(json.dumps(name)) + ENTRY_BYTES <= HEADER_BYTES - 64

    def append(self, name: str, weight: torch.Tensor) -> None:
        import torch

        end = self._nbytes + weight.nbytes
        names = {known: written for written, known in DTYPES.items()}
        dtype = names[str(weight.dtype).removeprefix("torch.")]
        place = {"dtype": dtype, "shape": list(weight.shape), "data_offsets": [self._nbytes, end]}
        with self._path.open("r+b") as stream:
            stream.seek(HEADER_BYTES + self._nbytes)
            for piece in weight.detach().contiguous().reshape(-1).view(torch.uint8).split(COPY_BYTES):
                stream.write(bytes_of(piece.cpu()))
        self._entries[name] = place
        self._header += len(json.dumps(name)) + ENTRY_BYTES
        self._nbytes = end

    def close(self) -> WrittenFile:
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._entries}).encode()
        with self._path.open("r+b") as stream:
            stream.write((HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(HEADER_BYTES - 8))
        return WrittenFile(self._path, tuple(self._entries), self._nbytes)


def _name(folder: Path, parts: Sequence[WrittenFile]) -> None:
    """Give every file its final name, and write the index where there are several."""
    if len(parts) == 1:
        parts[0].path.rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        final = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        part.path.rename(folder / final)
        places |= dict.fromkeys(part.names, final)
    index = {"metadata": {"total_size": sum(part.nbytes for part in parts)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
