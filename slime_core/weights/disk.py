"""Weights travel as files: a Hugging Face folder a version, which learner and engines both see.

The slowest transport; it needs a shared folder, but no network between the processes and no extra memory. Each version
is written under a draft name and renamed, so that an engine never reads an incomplete one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.errors import WeightSyncError
from slime_core.weights.bucket import Bucket
from slime_core.weights.engine_control import EngineControl
from slime_core.weights.export import HuggingFaceFolder

if TYPE_CHECKING:
    import torch

__all__ = ["DiskTransport"]

MB = 10**6


class DiskTransport:
    """A :class:`~slime_core.weights.transport.Transport` through a folder of its own inside ``folder``, which is
    removed when the transport is closed; several runs may share ``folder``.

    Only the version that the engines hold stays there, because a server that fails to load the next one reads it again.

    Arguments:
        control: the engines; they see ``folder`` under the same path, and may read what this user writes.
        folder: made if it is missing.
        template: folder whose config and tokenizer belong to the weights.
        on_written: called with the folder of each version before any engine reads it.
    """

    def __init__(
        self, control: EngineControl, *, folder: Path, template: Path, on_written: Callable[[Path], None] | None = None
    ) -> None:
        self._control = control
        self._template = template
        self._on_written = on_written
        self._folder = folder.resolve()
        self._own: Path | None = None
        self._version = ""
        self._held: Path | None = None

    def begin(self, version: str) -> None:
        """See the protocol."""
        self._version = version
        with self._writing():
            if self._own is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._own = Path(tempfile.mkdtemp(prefix="slime-weights-", dir=self._folder))
            self._draft = self._own / "draft"
            shutil.rmtree(self._draft, ignore_errors=True)
            self._export = HuggingFaceFolder(self._draft)

    def send(self, bucket: Bucket, tensors: Sequence[torch.Tensor], *, last: bool) -> None:
        """See the protocol."""
        copies = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]
        with self._writing():
            self._export.add(dict(zip(bucket.names, copies, strict=True)))
            if last:
                self._export.finish(template=self._template)

    def end(self) -> None:
        """See the protocol."""
        whole, before = self._draft.with_name(f"version-{self._version}"), self._held
        with self._writing():
            shutil.rmtree(whole, ignore_errors=True)
            self._draft.rename(whole)
        self._held = whole
        if self._on_written is not None:
            self._on_written(whole)
        self._load(whole)
        if before is not None and before != whole:
            shutil.rmtree(before, ignore_errors=True)

    def close(self) -> None:
        """See the protocol."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def _load(self, folder: Path) -> None:
        try:
            self._control.update_from_disk(folder, version=self._version)
        except WeightSyncError as error:
            raise WeightSyncError(
                f"Asked the engines to load version {self._version} from {folder}; {error} If they run on another "
                "machine or in another container, they must see this folder under the same path: set "
                "--update-weight-disk-dir to a shared one, or choose --update-weight-transport distributed."
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """The block writes files; if it fails, everything that was written is removed.

        Raises:
            WeightSyncError: the block failed; says why.
        """
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            self.close()
            raise WeightSyncError(
                f"Asked to write version {self._version} of the weights to {self._folder}; {error}. Free there: "
                f"{_free_mb(self._folder)} MB. Make room for two versions, or set --update-weight-disk-dir to a folder "
                "that learner and engines see and that the learner may write."
            ) from error


def _free_mb(folder: Path) -> int:
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    return shutil.disk_usage(existing).free // MB
