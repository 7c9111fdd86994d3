"""Fills the columns of a rollout's micro-batches that the learner computes.

    annotate    log-probabilities of the roles, values of the critic
    estimate    advantages and returns, from what was annotated

:mod:`slime_core.learner.columns` says which of them something reads; no other is filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from slime_core.config.schema import RunConfig
from slime_core.learner.cast import Cast
from slime_core.learner.critic.critic import Critic
from slime_core.learner.loss.advantages import OverShards, TokenEstimation, normalize
from slime_core.learner.loss.objective import Objective
from slime_core.learner.packed.batches import MicroBatch
from slime_core.learner.replay import Replay
from slime_core.learner.roles import REFERENCE, TEACHER
from slime_core.types import TrainBatch

__all__ = ["Annotator"]


class Annotator:
    """Methods are collective over all ranks.

    Arguments:
        model: of the actor, in DDP; all roles play in it.
        cast: says which roles have a pass, and has them play.
        critic: on the actor's ranks; None: there is none, or it is apart.
        objective: may take the old log-probabilities from the engine.
        estimation: of advantages token by token; None: the sampler has estimated them.
        replay: which passes keep routes.
        before_pass: called with the role whose log-probabilities come next.
    """

    def __init__(
        self,
        model: list[Any],
        cast: Cast,
        critic: Critic | None,
        objective: Objective,
        estimation: TokenEstimation | None,
        *,
        replay: Replay,
        config: RunConfig,
        before_pass: Callable[[str], None],
    ) -> None:
        self._model, self._cast, self._critic = model, cast, critic
        self._objective, self._estimation = objective, estimation
        self._replay, self._before_pass = replay, before_pass
        self._chunk_size = config.learner.log_probs_chunk_size
        self._normalizes = config.algorithm.normalize_advantages

    def annotate(self, micro_batches: list[MicroBatch], *, num_steps: int, values_U: np.ndarray | None = None) -> None:
        """Every micro-batch has the columns that a model computes and something reads.

        Arguments:
            num_steps: optimizer steps that will read them.
            values_U: float32 [u], those of a critic apart, in the order of the shard; None: there is none.
        """
        for role in self._cast.passes(num_steps):
            with self._cast.playing(role):
                self._note_log_probs(micro_batches, role)
        if self._objective.old_from_engine:
            self._objective.take_from_engine(micro_batches)
        if self._critic is not None:
            self._critic.annotate(micro_batches)
        if values_U is not None:
            _share_out(values_U, micro_batches)

    def estimate(self, shard: TrainBatch, micro_batches: list[MicroBatch]) -> torch.Tensor | None:
        """Every micro-batch has its advantages, and its returns where a critic learns them.

        Returns:
            What a critic is to learn, float32 [u] in the order of the shard; None: none does, or an earlier pipeline
            stage, which knows no log-probabilities and computes no loss.
        """
        from megatron.core import parallel_state

        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        returns_U = None if self._estimation is None else self._estimation.fill(shard, micro_batches)
        if self._normalizes:
            # Context-parallel ranks hold other tokens of the same rows, so they count like data-parallel ones.
            normalize(micro_batches, OverShards(parallel_state.get_data_parallel_group(with_context_parallel=True)))
        return returns_U

    def _note_log_probs(self, micro_batches: list[MicroBatch], role: str) -> None:
        """One pass of ``role``, which plays; earlier pipeline stages have nothing to note."""
        from slime_core.learner.passes import log_probs

        self._before_pass(role)
        with self._replay.kept(micro_batches, role):
            found = log_probs(self._model, micro_batches, chunk_size=self._chunk_size)
        for micro, log_probs_U in zip(micro_batches, found, strict=False):
            _put(micro, role, log_probs_U)


def _share_out(values_U: np.ndarray, micro_batches: list[MicroBatch]) -> None:
    known_U = torch.as_tensor(values_U, device=micro_batches[0].tokens_1T.device)
    for micro in micro_batches:
        micro.values_U = known_U[micro.places_U]


def _put(micro: MicroBatch, role: str, log_probs_U: torch.Tensor) -> None:
    if role == REFERENCE:
        micro.ref_log_probs_U = log_probs_U
    elif role == TEACHER:
        micro.teacher_log_probs_U = log_probs_U
    else:
        micro.old_log_probs_U = log_probs_U
