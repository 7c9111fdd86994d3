"""The function that a run names by path to be called between writing weights and loading them, as slime-compat adapts
it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from slime_core.plugins.discovery import COMPAT

__all__ = ["Written", "written_function"]

SETTING, TARGET = "custom_update_weight_post_write_path", "slime_compat.weights:PostWrite"


class Written(Protocol):
    """``custom_update_weight_post_write_path``."""

    def __call__(self, folder: Path | None, engine_urls: Sequence[str]) -> None:
        """A version of the weights lies in ``folder``, and no engine has read it. Collective.

        Arguments:
            folder: None on ranks that did not write.
        """
        ...


def written_function(options: Mapping[str, Any]) -> Written | None:
    """What the run names; None: nothing.

    Arguments:
        options: plugin -> its options object; functions by path are those of plugin ``compat``.

    Raises:
        PluginError: the function is not there, or cannot be called as slime calls it.
    """
    found = options.get(COMPAT)
    if found is None or SETTING not in found.sources:
        return None
    module, _, name = TARGET.partition(":")
    written: Written = getattr(importlib.import_module(module), name)(found)
    return written
