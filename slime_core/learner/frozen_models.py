"""Weights of other roles that are loaded into the actor's model for one forward pass, and when they change.

    actor       trains; the model holds its weights outside of ``weights_of``
    reference   the KL divergence is measured from it: the start weights, or a copy of the actor that is refreshed
    old_actor   a copy of the actor as the engines serve it
    teacher     the actor is distilled from it

Only the actor changes by training. The weights of another role change when they are loaded or copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from slime_core.config.schema import RunConfig
from slime_core.learner.same_model import require_same_model
from slime_core.learner.trained_model import TrainedModel

__all__ = ["ACTOR", "OLD_ACTOR", "REFERENCE", "TEACHER", "FrozenModels", "WeightSnapshots"]

ACTOR, REFERENCE, OLD_ACTOR, TEACHER = "actor", "reference", "old_actor", "teacher"

Weights = dict[str, torch.Tensor]


class FrozenModels:
    """Reference, teacher and old actor, as far as the run reads them. Methods are collective.

    Arguments:
        actor: holds the start weights; every role runs in its model.
        reads_reference: whether the run reads log-probabilities of the reference.
        config: the run's settings.
        folder: Hugging Face folder of the start weights.

    Raises:
        ConfigError: a role's folder describes another model than the actor's.
    """

    def __init__(self, actor: TrainedModel, *, reads_reference: bool, config: RunConfig, folder: Path) -> None:
        self._actor = actor
        self._config = config
        self._start_folder = folder
        self._snapshots = WeightSnapshots(actor.chunks)
        self._old_actor_differs = False
        self._reference_was_updated = False
        if reads_reference:
            self._load_role(REFERENCE, config.model.ref_load or folder)
        if config.algorithm.use_opd:
            self._load_role(TEACHER, config.algorithm.opd_teacher_load or folder)

    def _load_role(self, role: str, folder: Path) -> None:
        if folder == self._start_folder:
            self._snapshots.snapshot(role)
            return
        trusts = self._config.model.trust_remote_code
        require_same_model(folder, self._start_folder, role=role, trust_remote_code=trusts)
        self._snapshots.load(role, lambda: self._actor.load_weights(folder))

    @property
    def old_actor_differs(self) -> bool:
        """Whether an old actor is kept and the actor has trained since; the old log-probabilities are then its own."""
        return self._old_actor_differs

    def weights_of(self, role: str) -> AbstractContextManager[None]:
        """The model holds the weights of ``role`` inside the block."""
        return self._snapshots.weights_of(role)

    def trained(self, rollout: int) -> None:
        """Refresh the reference if it is due, after the actor's steps of ``rollout``."""
        interval = self._config.algorithm.ref_update_interval
        if REFERENCE in self._snapshots and interval and (rollout + 1) % interval == 0:
            self._snapshots.snapshot(REFERENCE)
            self._reference_was_updated = True
        self._old_actor_differs = OLD_ACTOR in self._snapshots

    def published(self) -> None:
        """Copy the actor, whose weights the engines now hold, to the old actor if the run keeps one."""
        if self._config.algorithm.keep_old_actor:
            self._snapshots.snapshot(OLD_ACTOR)
        self._old_actor_differs = False

    def save(self, folder: Path) -> None:
        """Write the roles that have changed since the start into ``folder``, which is made if there are any."""
        from slime_core.checkpoint import sharded

        if REFERENCE in self._snapshots and self._reference_was_updated:
            with self._snapshots.weights_of(REFERENCE):
                sharded.save_weights(folder / REFERENCE, chunks=self._actor.chunks)

    def load(self, folder: Path) -> None:
        """Load the roles that :meth:`save` wrote, whatever ``ref_load`` says; roles that it did not write stay."""
        from slime_core.checkpoint import sharded

        reference = folder / REFERENCE
        if REFERENCE in self._snapshots and reference.is_dir():
            self._snapshots.load(REFERENCE, lambda: sharded.load_weights(reference, chunks=self._actor.chunks))
            self._reference_was_updated = True


class WeightSnapshots:
    """Keeps sets of weights in host memory and swaps one into the model for the length of a ``with`` block.

    While the model holds a role, the role's buffers in host memory hold the actor: a swap needs no more device memory
    than the largest parameter. Buffers of modules and the optimizer's state stay with the actor.

    Arguments:
        chunks: hold the actor; parameters keep their storage.
    """

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._weights: dict[str, Weights] = {}

    def snapshot(self, role: str) -> None:
        """Copy the weights that the model holds now to ``role``."""
        copies = self._weights.get(role) or {name: _in_host_memory(parameter) for name, parameter in self._parameters()}
        with torch.no_grad():
            for name, parameter in self._parameters():
                copies[name].copy_(parameter)
        self._weights[role] = copies

    def load(self, role: str, load: Callable[[], None]) -> None:
        """Copy the weights that ``load`` puts into the model to ``role``, and put the actor's back.

        If ``load`` raises, the model holds the actor again and ``role`` is unchanged.
        """
        self.snapshot(ACTOR)
        try:
            load()
            self.snapshot(role)
        finally:
            self._swap(ACTOR)
            del self._weights[ACTOR]

    def __contains__(self, role: str) -> bool:
        return role in self._weights

    @contextmanager
    def weights_of(self, role: str) -> Iterator[None]:
        """The model holds the weights of ``role`` inside the block, and the actor's, to the bit, after it."""
        if role == ACTOR:
            yield
            return
        self._swap(role)
        try:
            yield
        finally:
            self._swap(role)

    def _swap(self, role: str) -> None:
        copies = self._weights[role]
        with torch.no_grad():
            for name, parameter in self._parameters():
                before = parameter.detach().clone()
                parameter.copy_(copies[name])
                copies[name].copy_(before)

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for position, chunk in enumerate(self._chunks):
            for name, parameter in chunk.named_parameters():
                yield f"{position}.{name}", parameter


def _in_host_memory(parameter: torch.Tensor) -> torch.Tensor:
    # Pinned memory makes a swap as fast as the bus; without a GPU there is nothing to pin for.
    return torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
