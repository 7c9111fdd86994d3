"""A bound on the requests in flight, in constant time for each, however many wait."""

from __future__ import annotations

import asyncio
from collections import deque


class Room:
    """At most ``places`` blocks ``async with room`` run at once; others wait, and enter in the order of their coming.

    When a block ends, ``asyncio.Semaphore`` looks at all waiters whose turn has come and that have not run since. Where
    thousands of answers arrive at once, that takes the square of their number; here a place goes from hand to hand.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had the place already
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """Hand the place over to the first that still waits."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
