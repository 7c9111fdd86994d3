"""The roles beside the actor in the course of a run: where they start, when they change, what a checkpoint keeps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from slime_core.config.schema import RunConfig
from slime_core.learner.columns import Columns
from slime_core.learner.model.same_model import require_same_model
from slime_core.learner.roles import OLD_ACTOR, REFERENCE, TEACHER, Roles
from slime_core.learner.trained import TrainedModel

__all__ = ["Cast"]


class Cast:
    """Reference, teacher and old actor, those of them that a run reads. Methods are collective.

    Arguments:
        actor: holds the start weights; all roles play in its model.
        columns: say which roles are read.
        config: the run's settings.
        folder: Hugging Face folder of the start weights.

    Raises:
        ConfigError: a role's folder describes another model than the actor's.
    """

    def __init__(self, actor: TrainedModel, columns: Columns, *, config: RunConfig, folder: Path) -> None:
        self._actor, self._columns, self._config, self._start = actor, columns, config, folder
        self._roles, self._behind = Roles(actor.chunks), False
        self._has_moved = False  # the reference is no longer what its folder holds
        if columns.reference:
            self._read(REFERENCE, config.model.ref_load or folder)
        if config.algorithm.use_opd:
            self._read(TEACHER, config.algorithm.opd_teacher_load or folder)

    def _read(self, role: str, folder: Path) -> None:
        if folder == self._start:
            self._roles.remember(role)
            return
        require_same_model(folder, self._start, role=role, trust_remote_code=self._config.model.trust_remote_code)
        self._roles.read(role, lambda: self._actor.load_weights(folder))

    def passes(self, num_steps: int) -> list[str]:
        """The roles whose log-probabilities are computed before the ``num_steps`` optimizer steps of a rollout."""
        return self._columns.passes(num_steps, behind=self._behind)

    def playing(self, role: str) -> AbstractContextManager[None]:
        """The model holds the weights of ``role`` inside the block."""
        return self._roles.playing(role)

    def trained(self, rollout: int) -> None:
        """The actor has had its steps of ``rollout``."""
        interval = self._config.algorithm.ref_update_interval
        if REFERENCE in self._roles and interval and (rollout + 1) % interval == 0:
            self._roles.remember(REFERENCE)
            self._has_moved = True
        self._behind = OLD_ACTOR in self._roles

    def published(self) -> None:
        """The engines hold the actor's weights."""
        if self._config.algorithm.keep_old_actor:
            self._roles.remember(OLD_ACTOR)
        self._behind = False

    def save(self, folder: Path) -> None:
        """Write the roles that have changed since their start into ``folder``, made if there are any."""
        from slime_core.checkpoint import sharded

        if REFERENCE in self._roles and self._has_moved:
            with self._roles.playing(REFERENCE):
                sharded.save_weights(folder / REFERENCE, chunks=self._actor.chunks)

    def load(self, folder: Path) -> None:
        """Continue with the roles that :meth:`save` wrote, whatever ``ref_load`` says; those it did not write stay."""
        from slime_core.checkpoint import sharded

        if REFERENCE in self._roles and (folder / REFERENCE).is_dir():
            self._roles.read(REFERENCE, lambda: sharded.load_weights(folder / REFERENCE, chunks=self._actor.chunks))
            self._has_moved = True
