"""Which columns of a rollout a run reads, and so which passes through a model it needs; nothing else is computed."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from slime_core.learner.loss.advantages import TokenEstimation
from slime_core.learner.loss.objective import Objective
from slime_core.learner.roles import ACTOR, OLD_ACTOR, REFERENCE, TEACHER

__all__ = ["Columns"]


class Columns:
    """Asks the loss and the advantage estimator.

    Arguments:
        objective: the loss.
        estimation: the estimator of scope ``token``; None: the sampler estimates.
        loss_reads: the columns of the policy loss's traits.
        distils: a teacher's log-probabilities are taken off the advantages.
    """

    def __init__(
        self,
        objective: Objective,
        estimation: TokenEstimation | None,
        *,
        loss_reads: AbstractSet[str],
        distils: bool = False,
    ) -> None:
        self._objective, self._loss_reads, self._distils = objective, loss_reads, distils
        self._estimated = estimation.reads if estimation is not None else frozenset[str]()

    def passes(self, num_steps: int, *, behind: bool = False) -> list[str]:
        """The roles whose log-probabilities of a rollout are computed before its ``num_steps`` optimizer steps.

        Without a step, what the loss would read is left out, and the teacher, which changes the actor's advantages.

        Arguments:
            behind: the old log-probabilities are those of the old actor, and the actor has left it.
        """
        wanted = {
            REFERENCE: self.reference if num_steps else "ref_log_probs" in self._estimated,
            TEACHER: self._distils and num_steps > 0,
            OLD_ACTOR if behind else ACTOR: self.old(num_steps, behind=behind),
        }
        return [role for role, is_wanted in wanted.items() if is_wanted]

    @property
    def reference(self) -> bool:
        """Log-probabilities of the reference."""
        return self._objective.uses_reference or "ref_log_probs" in self._estimated

    @property
    def values(self) -> bool:
        """Values of the critic."""
        return "values" in self._estimated

    def old(self, num_steps: int, *, behind: bool = False) -> bool:
        """Log-probabilities of the actor before the first of ``num_steps`` optimizer steps, or of the old actor.

        With one step the actor's current log-probabilities are those before it, bit for bit: the same weights, the
        same packing. The loss needs no second pass for those. Where the engine's stand in for them, nothing needs one.
        """
        if self._objective.old_from_engine:
            return False
        if num_steps == 0:
            return "log_probs" in self._estimated
        of_loss = "old_log_probs" in self._loss_reads or self._objective.reads_old or self._distils
        named = self._objective.of_logits is not None  # a loss that is named by path finds them in its batch
        return named or ((num_steps > 1 or behind) and of_loss) or "log_probs" in self._estimated
