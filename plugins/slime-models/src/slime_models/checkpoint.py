"""Reads the ``config.json`` of a Hugging Face folder with the standard library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from slime_core.errors import ConfigError
from slime_core.types import JsonValue

__all__ = ["config_of_folder"]

MOST_BYTES = 2**20


def config_of_folder(folder: Path) -> Mapping[str, JsonValue]:
    """Return the object in ``folder/config.json``.

    Raises:
        ConfigError: the file does not exist, or is not a JSON object of at most 1 MiB.
    """
    file = folder / "config.json"
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{file} has more than 1 MiB. A Hugging Face folder's config.json has a few KiB.")
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as mistake:
        raise ConfigError(f"{file} cannot be read: {mistake}. Name a Hugging Face folder, which holds one.") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no JSON object. Name a Hugging Face folder.")
    return config
