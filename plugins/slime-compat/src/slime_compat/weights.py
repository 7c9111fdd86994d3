"""``custom_update_weight_post_write_path``: a function of slime's users, called between writing and loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime_compat.check import load_checked
from slime_compat.options import PathOptions
from slime_compat.training import TRAINING_FORMS
from slime_core import boundary

__all__ = ["PostWrite"]

SETTING = "custom_update_weight_post_write_path"


class PostWrite:
    """Hook ``slime_after_weight_write`` around ``hook(args, version_dir, rollout_engines)``.

    The hook is called on every rank, with the engines' addresses in place of slime's Ray handles; the engines load
    ``version_dir`` after it has returned on all ranks.
    """

    def __init__(self, options: PathOptions) -> None:
        loaded = load_checked(options, SETTING, TRAINING_FORMS)
        self._source = loaded.source
        self._function = loaded.function
        self._args = options.arguments

    def __call__(self, folder: Path | None, engine_urls: Sequence[str]) -> None:
        """Broadcast the folder of the weights to every rank, and call the function.

        Raises:
            PluginError: the hook failed.
        """
        written: list[Any] = [None if folder is None else str(folder)]
        dist.broadcast_object_list(written, src=0)
        with boundary(self._source, f"calling it with {written[0]}", locate=True):
            self._function(self._args, written[0], list(engine_urls))
        dist.barrier()
