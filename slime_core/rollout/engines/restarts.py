"""Starts servers of a run again that died or hang, in the same place and at the same address.

The driver owns this: an actor watches its server (:meth:`~.actors.ServerActor.watch`), and its failure reaches the
driver through the wait that it would end otherwise. From there on

    leave     the router sends no further requests to the server
    stop      the actor ends with all processes of the server; the sampler's client retries its requests elsewhere
    launch    after a pause that doubles, a new actor starts the server in the same slot, at the same address
    weights   an engine of the policy waits until the learner has published to it
    join      the router sends requests to it again

Nothing here waits: the driver's waits call :meth:`Restarts.poll` every half second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slime_core.errors import EngineError, NodeDied, SlimeError
from slime_core.rollout.engines.actors import ServerActor
from slime_core.runtime.actors import Actor, Call
from slime_core.runtime.waiting import has_ended
from slime_core.runtime.waiting import wait as wait_for

WINDOW_S = 3600.0
"""Seconds over which the restarts of a server are counted."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

STOP_LIMIT_S = 7.0
"""Seconds for an actor to end its server, which takes it six at most; then both are killed."""

POLL_S = 0.1


@dataclass(slots=True, eq=False)
class RestartableServer:
    """A running server, and how it is replaced.

    Arguments:
        name: for messages and metrics, ``"engine 1"``.
        url: its address, also of the one that replaces it.
        actor: runs it.
        launch: starts another actor for it, in the same slot, and returns at once.
        leave: takes it out of its router, without waiting.
        join: adds it to its router, without waiting.
        needs_weights: another one has to get the learner's weights before it may join.
    """

    name: str
    url: str
    actor: Actor[ServerActor]
    launch: Callable[[], Actor[ServerActor]]
    leave: Callable[[], None]
    join: Callable[[], None]
    needs_weights: bool = False
    watching: Call[None] | None = None
    restarts_s: list[float] = field(default_factory=list)
    """When it was restarted, by ``time.monotonic``."""
    due_s: float = 0.0
    """When the next actor may start."""
    stopping: Call[None] | None = None
    starting: Call[str] | None = None

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def is_down(self) -> bool:
        """Whether it is being replaced."""
        return self.stopping is not None or self.starting is not None


class Restarts:
    """Replaces servers that fail; implements :class:`~slime_core.runtime.waiting.Recovery`.

    Arguments:
        limit: restarts of one server within an hour.
        warn: receives one text a restart.
    """

    def __init__(self, limit: int, *, warn: Callable[[str], None]) -> None:
        self._limit = limit
        self._warn = warn
        self._servers: list[RestartableServer] = []
        self._unserved: list[RestartableServer] = []
        self._counts: Counter[str] = Counter()

    def watch(self, server: RestartableServer) -> None:
        """Replace ``server``, which has started, when it fails."""
        server.watching = server.actor.start(ServerActor.watch)
        self._servers.append(server)

    def monitors(self) -> Sequence[Call[object]]:
        """The calls that watch servers."""
        return [one.watching for one in self._servers if one.watching is not None]

    def accept(self, call: Call[object], error: SlimeError) -> bool:
        """Whether the server that ``call`` watches is replaced. One whose node is gone is not: its address is, too.

        Raises:
            EngineError: it has been replaced too often.
        """
        failed = [] if isinstance(error, NodeDied) else [one for one in self._servers if one.watching == call]
        for one in failed:
            self._replace(one, error)
        return bool(failed)

    def poll(self) -> None:
        """Start servers whose predecessors have ended, and watch those that have started."""
        for one in self._servers:
            if one.stopping is not None and time.monotonic() >= one.due_s and self._has_stopped(one):
                one.actor.kill()
                one.actor, one.stopping = one.launch(), None
                one.starting = one.actor.start(ServerActor.start, one.port)
            elif one.starting is not None and has_ended(one.starting):
                self._finish(one, one.starting)

    def take_counts(self) -> dict[str, float]:
        """Restarts since the last call, as metrics ``rollout/restarts/NAME``."""
        taken, self._counts = self._counts, Counter()
        return {f"rollout/restarts/{name.replace(' ', '_')}": float(count) for name, count in taken.items()}

    # --- Weights -----------------------------------------------------------------------------------------------------

    def settle(self, *, within_s: float = 0.0) -> bool:
        """Wait until no engine of the policy is down; returns whether any of them has to get weights.

        Arguments:
            within_s: also wait so long for an engine to fail, because its client may notice first.

        Raises:
            EngineError: a server has been replaced too often.
        """
        deadline_s = time.monotonic() + within_s
        while self._is_down() or (time.monotonic() < deadline_s and not self._unserved):
            for call in self.monitors():
                if has_ended(call):
                    _accept_failure(self, call)
            self.poll()
            time.sleep(POLL_S)
        return bool(self._unserved)

    def served(self) -> None:
        """Every engine holds the learner's weights; those that waited for them get requests."""
        unserved, self._unserved = self._unserved, []
        for one in unserved:
            if not one.is_down:
                self._join(one)

    @property
    def waits_for_weights(self) -> bool:
        """Whether a restarted engine waits for the learner's weights, and no other is about to."""
        return bool(self._unserved) and not self._is_down()

    def _is_down(self) -> bool:
        return any(one.is_down and one.needs_weights for one in self._servers)

    # --- One server --------------------------------------------------------------------------------------------------

    def _replace(self, one: RestartableServer, error: SlimeError) -> None:
        now_s = time.monotonic()
        one.restarts_s = [at_s for at_s in one.restarts_s if now_s - at_s < WINDOW_S]
        count = len(one.restarts_s)
        if count >= self._limit:
            raise EngineError(
                f"{one.name} has failed after {count} restarts within an hour, the limit --engine-max-restarts "
                f"{self._limit}. Find out why; then resume the run with --load RUN_FOLDER. Its last failure:\n{error}"
            )
        one.restarts_s.append(now_s)
        one.due_s = now_s + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**count)
        self._counts[one.name] += 1
        reason = str(error).partition("\n")[0]  # the rest is the end of its log, and how to resume a run that has ended
        self._warn(f"{one.name} is started again (restart {count + 1} of {self._limit} within an hour): {reason}")
        one.watching = one.starting = None
        self._unserved = [other for other in self._unserved if other is not one]
        one.leave()
        one.stopping = one.actor.start(ServerActor.stop)

    def _has_stopped(self, one: RestartableServer) -> bool:
        assert one.stopping is not None
        return has_ended(one.stopping) or time.monotonic() >= one.restarts_s[-1] + STOP_LIMIT_S

    def _finish(self, one: RestartableServer, starting: Call[str]) -> None:
        try:
            (url,) = wait_for([starting], what=f"{one.name} to start")
            if url != one.url:
                raise EngineError(f"{one.name} could not listen at {one.url}: another program has taken the port")
        except SlimeError as error:
            self._replace(one, error)
            return
        one.starting, one.watching = None, one.actor.start(ServerActor.watch)
        if one.needs_weights:
            self._unserved.append(one)
        else:
            self._join(one)

    def _join(self, one: RestartableServer) -> None:
        one.join()
        self._warn(f"{one.name} gets requests again, {time.monotonic() - one.restarts_s[-1]:.0f} s after it failed")


def _accept_failure(restarts: Restarts, call: Call[object]) -> None:
    try:
        wait_for([call], what=str(call))
    except SlimeError as error:
        if not restarts.accept(call, error):
            raise


@dataclass(frozen=True, slots=True)
class RestartsWhileIdle:
    """:class:`Restarts` for waits during which the learner is idle: restarted engines get its weights at once.

    Arguments:
        restarts: of the run.
        publish: sends the weights that the learner holds to every engine; without a learner it does nothing, and
            engines serve their start weights.
    """

    restarts: Restarts
    publish: Callable[[], None]

    def monitors(self) -> Sequence[Call[object]]:
        """See :class:`Restarts`."""
        return self.restarts.monitors()

    def accept(self, call: Call[object], error: SlimeError) -> bool:
        """See :class:`Restarts`."""
        return self.restarts.accept(call, error)

    def poll(self) -> None:
        """As :meth:`Restarts.poll`; then publish where an engine waits for weights."""
        self.restarts.poll()
        if self.restarts.waits_for_weights:
            self.publish()
            self.restarts.served()
