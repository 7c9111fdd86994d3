"""Whether the safetensors files of a checkpoint are whole, told by their headers and sizes."""

from __future__ import annotations

import json
from pathlib import Path

from slime_core.errors import WeightSyncError
from slime_core.weights.specs import weight_files

__all__ = ["refuse_cut"]


def refuse_cut(folder: Path) -> None:
    """Returns if no file is shorter or longer than its header says.

    Raises:
        WeightSyncError: one is, as after a download that broke off; or there is none, or a header cannot be read.
    """
    for file in weight_files(folder):
        expected, found = _described_size(file), file.stat().st_size
        if expected != found:
            raise WeightSyncError(
                f"Asked for the weights of {file}; its header describes {expected:,} bytes, and it has {found:,}. "
                "Download or copy it again."
            )


def _described_size(file: Path) -> int:
    # The format: 8 bytes of little-endian length, that much JSON, then the data (safetensors, "Format").
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        return 8 + length + max(ends, default=0)
    except (OSError, OverflowError, MemoryError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(
            f"Asked for the weights of {file}; its safetensors header cannot be read: {error!r}. "
            "Download or copy it again."
        ) from error
