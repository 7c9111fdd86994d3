"""How far generation may run ahead of training."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.config.schema import RunConfig

__all__ = ["AsyncPolicy"]


@dataclass(frozen=True, slots=True)
class AsyncPolicy:
    """How far generation may run ahead of training.

    Example, 8 groups a rollout, one rollout ahead, samples at most 2 trained rollouts old: ``AsyncPolicy(8, ahead=1,
    oldest=2)``.

    Arguments:
        batch: groups a rollout.
        ahead: rollouts that may be generated, or wait, beyond the one that is being taken. 0: none.
        oldest: how many trained rollouts older than the learner's weights those may be that drew a group's first token;
            None: any number.
        total: rollouts of the run; none beyond is begun.
        waits: rollouts wait for groups that are due; False: what comes too late is somebody else's to judge.
        repeats: groups that an update of the weights aborted go back to the source, and others are begun for them.
        fetch: groups that are begun at once where some are missing; None: as many as are.
    """

    batch: int
    ahead: int = 0
    oldest: int | None = None
    total: int | None = None
    waits: bool = True
    repeats: bool = False
    fetch: int | None = None

    @staticmethod
    def of(config: RunConfig) -> AsyncPolicy:
        """What the settings of a run say."""
        rollout = config.rollout
        return AsyncPolicy(
            rollout.rollout_batch_size,
            ahead=rollout.async_buffer_size,
            oldest=rollout.max_staleness,
            total=rollout.num_rollout,
            waits=rollout.stale_samples != "correct",
            repeats=rollout.pause_generation_mode == "abort",
            fetch=rollout.over_sampling_batch_size,
        )
