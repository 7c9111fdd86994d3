from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import WeightSyncError
from slime_core.weights.hugging_face import require_complete_files

NAME = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ARITHMETIC / "model" / NAME, tmp_path)
    return tmp_path


def test_a_whole_file_passes(folder: Path) -> None:
    require_complete_files(folder)


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_file_of_another_length_than_its_header_says_is_refused(folder: Path, difference: int) -> None:
    size = (folder / NAME).stat().st_size
    os.truncate(folder / NAME, size + difference)
    with pytest.raises(WeightSyncError, match=NAME):
        require_complete_files(folder)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip file", b"\x02" + bytes(7) + b"[]", b"\xff" * 9])
def test_a_malformed_safetensors_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / NAME).write_bytes(content)
    with pytest.raises(WeightSyncError, match=NAME):
        require_complete_files(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"no \*\.safetensors file"):
        require_complete_files(tmp_path)
