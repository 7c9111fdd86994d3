"""Gives the devices to one role at a time.

If learner and engines have separate devices, :class:`DevicePool` only records the owner. If they are colocated on the
same devices, :class:`ColocatedDevices` moves memory in five phases:

    GENERATING   the engines hold weights and cache; the learner is offloaded
    CACHE_FREE   the engines have stopped generating and released their cache
    LEARNING     the engines have released their weights; the learner is on the devices and may train and save
    PUBLISHING   the learner holds its weights only; the engines have memory for weights again and receive them
    REFILLED     the learner is offloaded; the engines hold the new weights, get their cache back and resume

This order keeps memory from overflowing: the learner returns after the engines have released theirs; gradients,
optimizer and cached memory have left before a second copy of the weights arrives; and the engines' cache, the largest
part, is allocated after the learner has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Literal, Protocol

CACHE = "kv_cache"
WEIGHTS = "weights"
"""Memory that an engine can release, in SGLang's terms."""


class Engines(Protocol):
    """All engines at once, as :class:`~slime_core.weights.engine_control.EngineControl` controls them."""

    def pause(self, mode: Literal["abort"]) -> None:
        """Stop generating; requests in flight end with the tokens that they have."""

    def resume(self) -> None:
        """All engines generate again."""

    def release_memory(self, *tags: str) -> None:
        """Every engine releases the memory of ``tags``; they must be idle."""

    def resume_memory(self, *tags: str) -> None:
        """Every engine allocates memory for ``tags`` again; its content is lost."""


class OffloadableLearner(Protocol):
    """All ranks of the learner."""

    def offload(self, *, keeps_weights: bool = False) -> None:
        """Move everything, or everything but the weights to publish, from the learner's devices to the host."""

    def onload(self) -> None:
        """Move everything back; a second call changes nothing."""


class Phase(StrEnum):
    """Phase of colocated devices; see the module."""

    GENERATING = "generating"
    CACHE_FREE = "cache free"
    LEARNING = "learning"
    PUBLISHING = "publishing"
    REFILLED = "refilled"


class DevicePool:
    """Gives the devices to one role at a time.

    Arguments:
        colocated: devices that learner and engines share. By default they have separate ones, and nothing moves.

    Attributes:
        owner: the role that holds the devices; None while the engines generate.
    """

    def __init__(self, colocated: ColocatedDevices | None = None) -> None:
        self.owner: str | None = None
        self._colocated = colocated

    @contextmanager
    def held_by(self, role: str) -> Iterator[None]:
        """Give ``role`` the devices inside the block. If the block fails, nothing moves, because the run ends.

        Raises:
            AssertionError: another role holds them, which is a mistake in the loop.
        """
        assert self.owner is None, f"the devices are held by {self.owner!r}; {role!r} cannot have them too"
        self.owner = role
        try:
            if self._colocated is not None:
                self._colocated.give_to_learner()
            yield
            if self._colocated is not None:
                self._colocated.return_to_engines()
        finally:
            self.owner = None

    def make_room_for_weights(self) -> None:
        """Give the engines memory for the weights that are published next."""
        if self._colocated is not None:
            self._colocated.make_room_for_weights()


class ColocatedDevices:
    """Moves memory between learner and engines on the devices that they share; see the module.

    Arguments:
        engines: they have started, and hold everything.
        learner: it may still be starting when :meth:`vacate` is called, but not in the other methods.

    Attributes:
        phase: unchanged if an engine or the learner fails.
    """

    def __init__(self, engines: Engines, learner: OffloadableLearner) -> None:
        self.phase = Phase.GENERATING
        self._engines = engines
        self._learner = learner

    def vacate(self) -> None:
        """Release the engines' cache, for which they must be idle, and then their weights.

        Abort requests of clients that have gone first, because releasing memory under a request would end the server.
        """
        self._require(Phase.GENERATING)
        self._engines.pause("abort")
        self._engines.release_memory(CACHE)
        self.phase = Phase.CACHE_FREE
        self._engines.release_memory(WEIGHTS)
        self.phase = Phase.LEARNING

    def give_to_learner(self) -> None:
        """Release the engines' memory, unless that was done at the start of the run, and load the learner."""
        if self.phase is not Phase.LEARNING:
            self.vacate()
        self._learner.onload()

    def make_room_for_weights(self) -> None:
        """Offload the learner except its weights, which it sends; then allocate memory for the engines' weights."""
        self._require(Phase.LEARNING)
        self._learner.offload(keeps_weights=True)
        self._engines.resume_memory(WEIGHTS)
        self.phase = Phase.PUBLISHING

    def return_to_engines(self) -> None:
        """Offload the learner; then allocate the cache of the engines, which have the weights, and let them resume."""
        self._require(Phase.PUBLISHING)
        self._learner.offload()
        self.phase = Phase.REFILLED
        self._engines.resume_memory(CACHE)
        self._engines.resume()
        self.phase = Phase.GENERATING

    def _require(self, phase: Phase) -> None:
        # Engines that generate from released weights return wrong tokens, not an error.
        assert self.phase is phase, f"the shared devices are {self.phase}; they must be {phase}, a mistake in the loop"
