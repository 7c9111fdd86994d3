"""Lets plugins wrap the actor's model before Megatron does, and choose what leaves it.

A model spec does not know the modules that plugins add. It loads and exports views of the chunks, which lack these
children (:class:`~slime_core.learner.trained_model.NamedSpec`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.contracts import LearnerInfo, WrappedModel
from slime_core.contracts.learning import NamedTensors
from slime_core.errors import PluginError, SlimeError
from slime_core.learner.trained_model import NamedSpec
from slime_core.plugins.lifecycle import Hooks
from slime_core.user_code.failures import boundary

if TYPE_CHECKING:
    import torch

HOOK = "slime_wrap_model"


class WrappedSpec:
    """A model spec and its chunks, after the call of ``slime_wrap_model``. Methods are collective.

    Arguments:
        spec: built the chunks.
        chunks: of this rank, with the start weights.
        hooks: of this rank.
        learner: for the hook.
        folder: Hugging Face folder of the model, for the hook.

    Attributes:
        chunks: as the plugins left them.
        spec: the same model spec, without the children that plugins added to chunks.
        model: the replacements of all plugins.

    Raises:
        PluginError: two plugins replace the same part, or a plugin returned something other than a ``WrappedModel``.
    """

    def __init__(
        self, spec: NamedSpec, chunks: list[torch.nn.Module], *, hooks: Hooks, learner: LearnerInfo, folder: Path
    ) -> None:
        self.spec = spec
        self.chunks = chunks
        self._plugins = hooks.implementers(HOOK)
        before = self._children()
        returned = hooks.call(
            HOOK, spec=spec.spec, chunks=chunks, learner=learner, folder=folder, export_weights=self._base_weights
        )
        self.model = _merged(returned, self._plugins)
        self.spec = replace(spec, added=self._children() - before)

    def published(self) -> NamedTensors:
        """Return an iterator over the weights for engines, with Hugging Face names."""
        return self._exported(self.model.published)

    def saved(self) -> NamedTensors:
        """Return an iterator over the tensors for the folder ``hf`` of a checkpoint."""
        return self._exported(self.model.saved or self.model.published)

    def _base_weights(self) -> NamedTensors:
        return self.spec.export_weights(self.chunks)

    def _exported(self, export: Callable[[], NamedTensors] | None) -> NamedTensors:
        return self._base_weights() if export is None else self._attributed(export)

    def _attributed(self, export: Callable[[], NamedTensors]) -> NamedTensors:
        with boundary(self._plugins, "exporting weights", locate=True, passes=(SlimeError,)):
            yield from export()

    def _children(self) -> frozenset[str]:
        return frozenset(name for chunk in self.chunks for name, _ in chunk.named_children())


def _merged(returned: Sequence[object], plugins: str) -> WrappedModel:
    merged = WrappedModel()
    for model in returned:
        if not isinstance(model, WrappedModel):
            raise PluginError(f"{HOOK} of {plugins} returned {model!r:.80}; accepted: None or a WrappedModel.")
        if twice := sorted(merged.replaced & model.replaced):
            raise PluginError(
                f"{HOOK}: two of the plugins {plugins} replace {', '.join(twice)} of the model, and it can have one. "
                "Run without one of them."
            )
        merged = replace(merged, **{name: getattr(model, name) for name in model.replaced})
    return merged
