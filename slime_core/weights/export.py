"""Writes full weights as a Hugging Face folder: safetensors, config, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


SHARD_BYTES = 5 * 10**9
"""Size at which a new file starts, as in transformers."""

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def write(folder: Path, weights: Iterable[tuple[str, torch.Tensor]], *, template: Path, writes: bool) -> None:
    """Write a folder that transformers and SGLang load: ``weights`` and the small files of ``template``.

    At most one file's worth of weights is held at a time.

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
    for held in _parts(weights):
        whole.add(held)
    whole.finish(template=template)


class HuggingFaceFolder:
    """Writes a loadable folder: :meth:`add` weights part by part, then :meth:`finish`.

    Arguments:
        folder: is created, and must not exist.

    Raises:
        OSError: it exists, or cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._parts: list[_Part] = []

    def add(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Write ``weights``, full tensors on the CPU that share no memory, to a file of their own.

        Raises:
            OSError, safetensors.SafetensorError: the file cannot be written.
        """
        self._parts.append(_write_part(self._folder, len(self._parts), weights))

    def finish(self, *, template: Path) -> None:
        """Name the files and copy the small ones; transformers and SGLang can load the folder then.

        Arguments:
            template: folder whose config and tokenizer belong to the weights.
        """
        _name(self._folder, self._parts)
        for name in COPIED:
            if (template / name).is_file():
                shutil.copyfile(template / name, self._folder / name)


@dataclass(frozen=True, slots=True)
class _Part:
    """A file that was written under a provisional name, because its final one holds the number of files."""

    path: Path
    names: tuple[str, ...]
    nbytes: int


def _parts(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    held: dict[str, torch.Tensor] = {}
    size = 0
    for name, weight in weights:
        if held and size + weight.nbytes > SHARD_BYTES:
            yield held
            held, size = {}, 0
        held[name] = weight.detach().to("cpu", copy=True).contiguous()
        size += weight.nbytes
    yield held


def _write_part(folder: Path, number: int, held: Mapping[str, torch.Tensor]) -> _Part:
    from safetensors.torch import save_file

    path = folder / f".part-{number:05d}"
    save_file(dict(held), path, metadata={"format": "pt"})
    return _Part(path, tuple(held), sum(tensor.nbytes for tensor in held.values()))


def _name(folder: Path, parts: Sequence[_Part]) -> None:
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
