"""Orders of many rows that need no memory: what stands at a place is computed from seed, epoch and place.

    Feistel    an exact shuffle of any number of rows
    Windows    shuffles rows only among their neighbours, so that a file can be read from its beginning

A Feistel network permutes the numbers below a power of 4; numbers beyond the rows are walked over until one of the rows
comes (cycle walking, Black and Rogaway, CT-RSA 2002, section 3).
"""

from __future__ import annotations

import hashlib

__all__ = ["Feistel", "Windows"]

ROUNDS = 8
"""Four would do for many rows; with five, some of the 120 orders would come four times as often."""


class Feistel:
    """A permutation of ``size`` numbers, which ``key`` chooses; the same on every machine.

    Example: ``[Feistel(5, "0:0")(i) for i in range(5)]`` is ``[4, 1, 2, 0, 3]``.

    Arguments:
        size: at least 1.
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._key = key.encode()
        self._bits = max(1, ((size - 1).bit_length() + 1) // 2)

    def __call__(self, place: int) -> int:
        """The number at ``place``, which is below ``size``."""
        found = self._permuted(place)
        while found >= self._size:
            found = self._permuted(found)
        return found

    def _permuted(self, number: int) -> int:
        left, right = number >> self._bits, number & ((1 << self._bits) - 1)
        for turn in range(ROUNDS):
            left, right = right, left ^ self._mixed(turn, right)
        return left << self._bits | right

    def _mixed(self, turn: int, half: int) -> int:
        digest = hashlib.blake2b(b"%d:%d" % (turn, half), key=self._key[:64], digest_size=8).digest()
        return int.from_bytes(digest, "little") & ((1 << self._bits) - 1)


class Windows:
    """The place in a file of what stands at a place of its epoch, shuffled within windows of ``width`` rows.

    Arguments:
        key: of seed and epoch.
    """

    def __init__(self, width: int, key: str) -> None:
        self._width = width
        self._key = key
        self._last: tuple[int, int, Feistel] | None = None

    def window(self, place: int) -> tuple[int, int]:
        """The first row of the window in which ``place`` lies, and the row after its last."""
        first = place - place % self._width
        return first, first + self._width

    def row(self, place: int, rows: int) -> int:
        """The row at ``place``, where the file has ``rows`` rows up to the end of this window."""
        first, stop = self.window(place)
        size = min(stop, rows) - first
        if self._last is None or self._last[:2] != (first, size):
            self._last = first, size, Feistel(size, f"{self._key}:{first}")
        return first + self._last[2](place - first)
