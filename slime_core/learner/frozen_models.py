"""Weights of the frozen roles, which are loaded into the actor's model for one forward pass. ``rank.py`` uses them.

    actor       trains; the model holds its weights outside of ``weights_of``
    reference   start of the KL divergence: the start weights, or a copy of the actor that is refreshed
    old_actor   a copy of the actor with the weights that the engines serve
    teacher     the model from which the actor is distilled

Only the actor changes by training. The weights of another role change when they are loaded or copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slime_core.config.model_config import config_folder, torch_dist_folder
from slime_core.config.schema import RunConfig
from slime_core.learner.checks import require_same_model
from slime_core.learner.objective import Objective
from slime_core.learner.trained_model import ACTOR, OLD_ACTOR, REFERENCE, TEACHER, TrainedModel

if TYPE_CHECKING:
    from slime_core.checkpoint.sharded import StateCopy
    from slime_core.learner.advantages import TokenEstimation

Weights = dict[str, torch.Tensor]


class FrozenModels:
    """Reference, teacher and old actor, as far as the run reads them. Methods are collective.

    Arguments:
        actor: holds the start weights; every role runs in its model.
        reads_reference: whether the run reads log-probabilities of the reference.
        config: the run's settings.
        folder: Hugging Face folder of the start weights.
        original: context in which the actor's model computes as before plugins wrapped it; None if they did not.

    Attributes:
        old_actor_differs: there is an old actor, and the actor has trained since its copy; the old log-probabilities
            are then those of the old actor.

    Raises:
        ConfigError: a role's folder describes another model than the actor's.
    """

    def __init__(
        self,
        actor: TrainedModel,
        *,
        reads_reference: bool,
        config: RunConfig,
        folder: Path,
        original: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._actor = actor
        self._original = original or nullcontext
        self._unwrapped: set[str] = set()  # roles that the model computes as before plugins wrapped it
        self._config = config
        self._start_folder = folder
        self._snapshots = WeightSnapshots(actor.chunks)
        self.old_actor_differs = False
        self._reference_was_updated = False
        if reads_reference:
            self._load_role(REFERENCE, config.model.ref_load)
        if config.algorithm.use_opd:
            self._load_role(TEACHER, config.algorithm.opd_teacher_load)

    def _load_role(self, role: str, folder: Path | None) -> None:
        start = self._config.model.initial_megatron_checkpoint or self._start_folder
        self._unwrapped.add(role)
        if folder is None or folder == start:
            if self._original is nullcontext or self._config.algorithm.ref_update_interval:
                self._snapshots.snapshot(role)
            return
        trusts = self._config.model.trust_remote_code
        stored = torch_dist_folder(folder)
        described = folder if stored is None else config_folder(stored)
        if described is not None:  # a folder of Megatron has no config; its tensors are compared when they are read
            require_same_model(described, self._start_folder, role=role, trust_remote_code=trusts)
        self._snapshots.load(role, lambda: self._actor.load_weights(folder))

    @contextmanager
    def weights_of(self, role: str) -> Iterator[None]:
        """Context in which the model holds the weights of ``role``."""
        unwrapped = self._original() if role in self._unwrapped else nullcontext()
        copied = self._snapshots.weights_of(role) if role in self._snapshots else nullcontext()
        with unwrapped, copied:
            yield

    def trained(self, rollout: int) -> None:
        """Refresh the reference if it is due, after the actor's steps of ``rollout``."""
        interval = self._config.algorithm.ref_update_interval
        if REFERENCE in self._snapshots and interval and (rollout + 1) % interval == 0:
            self._snapshots.snapshot(REFERENCE)
            self._unwrapped.discard(REFERENCE)
            self._reference_was_updated = True
        self.old_actor_differs = OLD_ACTOR in self._snapshots

    def published(self) -> None:
        """Copy the actor, whose weights the engines now hold, to the old actor if the run has one."""
        if self._config.algorithm.keep_old_actor:
            self._snapshots.snapshot(OLD_ACTOR)
        self.old_actor_differs = False

    def copy(self, folder: Path) -> list[StateCopy]:
        """Copy the roles that have changed since the start, for ``folder``."""
        from slime_core.checkpoint import sharded

        if REFERENCE not in self._snapshots or not self._reference_was_updated:
            return []
        with self._snapshots.weights_of(REFERENCE):
            return [sharded.copy_weights(folder / REFERENCE, chunks=self._actor.chunks)]

    def load(self, folder: Path) -> None:
        """Load the roles that a :meth:`copy` wrote, in spite of ``ref_load``; roles that it did not write stay."""
        from slime_core.checkpoint import sharded

        reference = folder / REFERENCE
        if REFERENCE in self._snapshots and reference.is_dir():
            self._snapshots.load(REFERENCE, lambda: sharded.load_weights(reference, chunks=self._actor.chunks))
            self._unwrapped.discard(REFERENCE)
            self._reference_was_updated = True


class WeightSnapshots:
    """Sets of weights in host memory, one of which is swapped into the model for the length of a ``with`` block.

    While the model holds a role, the role's copies in host memory hold the actor, so a swap needs no more device memory
    than the largest parameter. Buffers that are in checkpoints, such as the biases of routers, are weights; other
    buffers and the optimizer's state are not swapped.

    Arguments:
        chunks: hold the actor; parameters keep their storage.
    """

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._weights: dict[str, Weights] = {}

    def snapshot(self, role: str) -> None:
        """Copy the weights that the model holds now to ``role``."""
        copies = self._weights.get(role) or {name: _in_host_memory(tensor) for name, tensor in self._tensors()}
        with torch.no_grad():
            for name, tensor in self._tensors():
                copies[name].copy_(tensor)
        self._weights[role] = copies

    def load(self, role: str, load: Callable[[], None]) -> None:
        """Copy the weights that ``load`` puts into the model to ``role``, and restore the actor's.

        If ``load`` raises an error, the model holds the actor again and ``role`` is unchanged.
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
        """Context in which the model holds the weights of ``role``; after it, the actor's, bit for bit."""
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
            for name, tensor in self._tensors():
                before = tensor.detach().clone()
                tensor.copy_(copies[name])
                copies[name].copy_(before)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for position, chunk in enumerate(self._chunks):
            stored = chunk.state_dict().keys()
            buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name in stored)
            for name, tensor in (*chunk.named_parameters(), *buffers):
                yield f"{position}.{name}", tensor


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    # Pinned memory makes a swap as fast as the bus; without a GPU it has no use.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


@dataclass(frozen=True, slots=True)
class RequiredColumns:
    """The columns that the loss and the advantage estimator of a run read.

    Arguments:
        objective: the loss.
        estimation: the estimator of scope ``token``; None if the sampler estimates.
        loss_reads: the columns in the policy loss's traits.
        distils: whether the divergence from a teacher is subtracted from the advantages.
    """

    objective: Objective
    estimation: TokenEstimation | None
    _: KW_ONLY
    loss_reads: AbstractSet[str]
    distils: bool = False

    def roles(self, num_steps: int, *, old_actor_differs: bool = False) -> list[str]:
        """Return the roles whose log-probabilities are computed before the ``num_steps`` optimizer steps of a rollout.

        Without a step, columns that only the loss reads are left out, and so is the teacher, whose log-probabilities
        change the actor's advantages.

        Arguments:
            old_actor_differs: the old log-probabilities are those of the old actor, and the actor has trained since.
        """
        reads = {
            REFERENCE: self.reference if num_steps else "ref_log_probs" in self._estimator_reads,
            TEACHER: self.distils and num_steps > 0,
            OLD_ACTOR if old_actor_differs else ACTOR: self.old(num_steps, old_actor_differs=old_actor_differs),
        }
        return [role for role, is_read in reads.items() if is_read]

    @property
    def reference(self) -> bool:
        """True if the run reads log-probabilities of the reference."""
        return self.objective.algorithm.use_kl_loss or "ref_log_probs" in self._estimator_reads

    @property
    def values(self) -> bool:
        """True if the run reads values of the critic."""
        return "values" in self._estimator_reads

    def old(self, num_steps: int, *, old_actor_differs: bool = False) -> bool:
        """Return whether the old log-probabilities need a pass, of the actor before its steps or of the old actor.

        With one step the actor's current log-probabilities are those before the step, bit for bit: same weights, same
        packing. So the loss needs no second pass for them. It needs none either if it uses the engine's.
        """
        if self.objective.algorithm.use_rollout_logprobs:
            return False
        if num_steps == 0:
            return "log_probs" in self._estimator_reads
        of_loss = "old_log_probs" in self.loss_reads or self.objective.reads_old or self.distils
        named = self.objective.parts.of_logits is not None  # a loss of logits reads them from its batch
        return named or ((num_steps > 1 or old_actor_differs) and of_loss) or "log_probs" in self._estimator_reads

    @property
    def _estimator_reads(self) -> AbstractSet[str]:
        return frozenset() if self.estimation is None else self.estimation.reads
