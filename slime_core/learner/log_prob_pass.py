"""Fills the columns of a rollout's micro-batches that forward passes compute: log-probabilities of roles, values.

RequiredColumns  which columns the loss or the advantage estimator reads; no other column is computed
LogProbPass      one forward pass for each role that is read, then the critic's
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch

from slime_core.config.schema import RunConfig
from slime_core.learner.critic.critic import Critic
from slime_core.learner.frozen_models import ACTOR, OLD_ACTOR, REFERENCE, TEACHER, FrozenModels
from slime_core.learner.loss.advantages import TokenEstimation
from slime_core.learner.loss.objective import Objective
from slime_core.learner.micro_batches import MicroBatch
from slime_core.learner.routing_replay import RoutingReplay
from slime_core.plugins.contracts import LearnerInfo
from slime_core.plugins.lifecycle import LifecycleHooks

__all__ = ["LogProbPass", "RequiredColumns"]


class RequiredColumns:
    """The columns that the loss and the advantage estimator of a run read.

    Arguments:
        objective: the loss.
        estimation: the estimator of scope ``token``; None: the sampler estimates.
        loss_reads: the columns of the policy loss's traits.
        distils: a teacher's log-probabilities are subtracted from the advantages.
    """

    def __init__(
        self,
        objective: Objective,
        estimation: TokenEstimation | None,
        *,
        loss_reads: AbstractSet[str],
        distils: bool = False,
    ) -> None:
        self._objective = objective
        self._loss_reads = loss_reads
        self._distils = distils
        self._estimator_reads = estimation.reads if estimation is not None else frozenset[str]()

    def roles(self, num_steps: int, *, old_actor_differs: bool = False) -> list[str]:
        """The roles whose log-probabilities are computed before the ``num_steps`` optimizer steps of a rollout.

        Without a step, what only the loss would read is left out, and so is the teacher, whose log-probabilities change
        the actor's advantages.

        Arguments:
            old_actor_differs: the old log-probabilities are those of the old actor, and the actor has trained since.
        """
        wanted = {
            REFERENCE: self.reference if num_steps else "ref_log_probs" in self._estimator_reads,
            TEACHER: self._distils and num_steps > 0,
            OLD_ACTOR if old_actor_differs else ACTOR: self.old(num_steps, old_actor_differs=old_actor_differs),
        }
        return [role for role, is_wanted in wanted.items() if is_wanted]

    @property
    def reference(self) -> bool:
        """Log-probabilities of the reference."""
        return self._objective.uses_reference or "ref_log_probs" in self._estimator_reads

    @property
    def values(self) -> bool:
        """Values of the critic."""
        return "values" in self._estimator_reads

    def old(self, num_steps: int, *, old_actor_differs: bool = False) -> bool:
        """Log-probabilities of the actor before the first of ``num_steps`` optimizer steps, or of the old actor.

        With one step the actor's current log-probabilities are those before it, bit for bit: the same weights, the
        same packing. So the loss needs no second pass for them. Where the engine's are used instead, nothing needs one.
        """
        if self._objective.old_from_engine:
            return False
        if num_steps == 0:
            return "log_probs" in self._estimator_reads
        of_loss = "old_log_probs" in self._loss_reads or self._objective.reads_old or self._distils
        named = self._objective.of_logits is not None  # a loss of logits finds them in its batch
        return named or ((num_steps > 1 or old_actor_differs) and of_loss) or "log_probs" in self._estimator_reads


class LogProbPass:
    """The forward passes before the optimizer steps of a rollout. Collective over all ranks.

    Arguments:
        model: of the actor, in DDP; every role runs in it.
        columns: which columns the run reads.
        frozen: puts the weights of a role into the model.
        critic: on the actor's ranks; None: there is none, or it has ranks of its own.
        objective: may take the old log-probabilities from the engine.
        replay: keeps the expert routes of passes of the actor.
        hooks: ``slime_before_log_probs`` is called before each role's pass.
        learner: argument of that hook.
    """

    def __init__(
        self,
        model: list[Any],
        *,
        columns: RequiredColumns,
        frozen: FrozenModels,
        critic: Critic | None,
        objective: Objective,
        replay: RoutingReplay,
        config: RunConfig,
        hooks: LifecycleHooks,
        learner: LearnerInfo,
    ) -> None:
        self._model = model
        self._columns = columns
        self._frozen = frozen
        self._critic = critic
        self._objective = objective
        self._replay = replay
        self._hooks = hooks
        self._learner = learner
        self._chunk_size = config.learner.log_probs_chunk_size

    def run(
        self, micro_batches: Sequence[MicroBatch], *, num_steps: int, critic_values_U: np.ndarray | None = None
    ) -> None:
        """Fill every column that a model computes and something reads.

        Arguments:
            num_steps: optimizer steps that will read them.
            critic_values_U: float32 [u], values of a separate critic in the order of the shard; None: there is none.
        """
        for role in self._columns.roles(num_steps, old_actor_differs=self._frozen.old_actor_differs):
            with self._frozen.weights_of(role):
                self._fill_log_probs(micro_batches, role)
        if self._objective.old_from_engine:
            self._objective.take_from_engine(micro_batches)
        if self._critic is not None:
            self._critic.fill_values(micro_batches)
        if critic_values_U is not None:
            known_U = torch.as_tensor(critic_values_U, device=micro_batches[0].tokens_1T.device)
            for micro in micro_batches:
                micro.values_U = known_U[micro.places_U]

    def _fill_log_probs(self, micro_batches: Sequence[MicroBatch], role: str) -> None:
        """One pass of ``role``, whose weights the model holds; earlier pipeline stages have no log-probabilities."""
        from slime_core.learner.forward_backward import compute_log_probs

        self._hooks.call("slime_before_log_probs", role=role, learner=self._learner)
        with self._replay.record_or_replay(micro_batches, role):
            found = compute_log_probs(self._model, micro_batches, chunk_size=self._chunk_size)
        for micro, log_probs_U in zip(micro_batches, found, strict=False):
            if role == REFERENCE:
                micro.ref_log_probs_U = log_probs_U
            elif role == TEACHER:
                micro.teacher_log_probs_U = log_probs_U
            else:
                micro.old_log_probs_U = log_probs_U
