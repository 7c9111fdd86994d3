"""Who may use the devices now.

    Lending    learner and engines have devices of their own: nothing moves
    Sharing    they take turns on the same devices, in five phases:

    GENERATING   the engines hold weights and cache, the learner sleeps
    CACHE_FREE   the engines have ended what they generated, and given their cache away
    LEARNING     and their weights: the learner is awake and may train and save
    PUBLISHING   the engines have room for weights again and take the learner's
    REFILLED     the learner sleeps; the engines hold new weights, get their cache back, and go on -> GENERATING

Both hold one rule: one borrower at a time. The order of the phases is what keeps memory from overflowing: the learner
wakes after the engines have left, and their cache, the largest part, comes back after the learner has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Literal, Protocol

__all__ = ["CACHE", "WEIGHTS", "Engines", "Lending", "Phase", "Sharing", "Sleeper"]

CACHE = "kv_cache"
WEIGHTS = "weights"
"""What an engine can give away, in SGLang's words."""


class Engines(Protocol):
    """All engines at once, as :class:`~slime_core.weights.endpoints.EngineControl` controls them."""

    def pause(self, mode: Literal["abort"]) -> None:
        """No engine generates from here on, and requests in flight have ended with what they had."""

    def resume(self) -> None:
        """All engines generate again."""

    def release_memory(self, *tags: str) -> None:
        """Every engine has given the memory of ``tags`` away; they must be idle."""

    def resume_memory(self, *tags: str) -> None:
        """Every engine has memory for ``tags`` again; what was in it is lost."""


class Sleeper(Protocol):
    """All ranks of the learner."""

    def sleep(self) -> None:
        """The learner holds nothing on its devices."""

    def wake(self) -> None:
        """The learner holds on its devices what it held before it slept; nothing to do if it is awake."""


class Phase(StrEnum):
    """Where the shared devices stand; see the module."""

    GENERATING = "generating"
    CACHE_FREE = "cache free"
    LEARNING = "learning"
    PUBLISHING = "publishing"
    REFILLED = "refilled"


class Lending:
    """Lends the devices to one role at a time; with devices of their own for every role nothing has to move."""

    def __init__(self) -> None:
        self.borrower: str | None = None

    @contextmanager
    def lend(self, role: str) -> Iterator[None]:
        """``role`` holds the devices inside the block. A block that fails leaves them as they are: the run ends.

        Raises:
            AssertionError: they are lent already, which is a mistake in the loop.
        """
        assert self.borrower is None, f"the devices are lent to {self.borrower!r}; {role!r} cannot have them too"
        self.borrower = role
        try:
            self._hand_over()
            yield
            self._take_back()
        finally:
            self.borrower = None

    def make_room_for_weights(self) -> None:
        """The engines can take the weights that are published next."""

    def _hand_over(self) -> None: ...

    def _take_back(self) -> None: ...


class Sharing(Lending):
    """Lends devices that learner and engines share; see the module.

    Arguments:
        engines: they have started, and hold everything.
        learner: it may not have started yet when :meth:`vacate` is called, and must have when devices are lent.

    Attributes:
        phase: where the devices stand; an error of an engine or the learner leaves it where it was.
    """

    def __init__(self, engines: Engines, learner: Sleeper) -> None:
        super().__init__()
        self.phase = Phase.GENERATING
        self._engines, self._learner = engines, learner

    def vacate(self) -> None:
        """The engines have left the devices: cache first, which only idle engines can do, then weights.

        A request that nobody waits for any more may still be running: it is ended, since it would end the server.
        """
        self._require(Phase.GENERATING)
        self._engines.pause("abort")
        self._engines.release_memory(CACHE)
        self.phase = Phase.CACHE_FREE
        self._engines.release_memory(WEIGHTS)
        self.phase = Phase.LEARNING

    def make_room_for_weights(self) -> None:
        """As in :class:`Lending`; the learner is awake still, because the weights come from it."""
        self._require(Phase.LEARNING)
        self._engines.resume_memory(WEIGHTS)
        self.phase = Phase.PUBLISHING

    def _hand_over(self) -> None:
        if self.phase is not Phase.LEARNING:  # the first borrower finds the devices vacated
            self.vacate()
        self._learner.wake()

    def _take_back(self) -> None:
        self._require(Phase.PUBLISHING)
        self._learner.sleep()
        self.phase = Phase.REFILLED
        self._engines.resume_memory(CACHE)
        self._engines.resume()
        self.phase = Phase.GENERATING

    def _require(self, phase: Phase) -> None:
        # Engines that generate with weights that were given away answer nonsense, not an error.
        assert self.phase is phase, f"the shared devices are {self.phase}; they must be {phase}, a mistake in the loop"
