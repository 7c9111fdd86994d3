"""Shuffled orders that need no memory: the row at a place is computed from seed, epoch and place.

    Feistel    an exact shuffle of any number of rows
    Windows    a shuffle within windows of adjacent rows, so that a file can be read from its beginning

A Feistel network permutes the numbers below a power of 4. A result that is not a row number is permuted again until it
is one (cycle walking, Black and Rogaway, CT-RSA 2002, section 3).
"""

from __future__ import annotations

import hashlib

__all__ = ["Feistel", "Windows"]

ROUNDS = 8
"""Four are enough for many rows; but with five, some of the 120 orders would occur four times as often as others."""


class Feistel:
    """A permutation of ``size`` numbers, selected by ``key``; the same on every machine.

    Example: ``[Feistel(5, "0:0")(i) for i in range(5)]`` is ``[4, 1, 2, 0, 3]``.

    Arguments:
        size: number of rows, at least 1.
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._key = key.encode()
        self._bits = max(1, ((size - 1).bit_length() + 1) // 2)

    def __call__(self, place: int) -> int:
        """Return the number at ``place``, which is below ``size``."""
        number = self._permuted(place)
        while number >= self._size:
            number = self._permuted(number)
        return number

    def _permuted(self, number: int) -> int:
        high, low = number >> self._bits, number & ((1 << self._bits) - 1)
        for turn in range(ROUNDS):
            high, low = low, high ^ self._mixed(turn, low)
        return high << self._bits | low

    def _mixed(self, turn: int, half: int) -> int:
        digest = hashlib.blake2b(b"%d:%d" % (turn, half), key=self._key[:64], digest_size=8).digest()
        return int.from_bytes(digest, "little") & ((1 << self._bits) - 1)


class Windows:
    """Maps a place of an epoch to a row of the file, shuffled within windows of ``width`` rows.

    Arguments:
        key: identifies seed and epoch.
    """

    def __init__(self, width: int, key: str) -> None:
        self._width = width
        self._key = key
        self._last: tuple[int, int, Feistel] | None = None

    def window(self, place: int) -> tuple[int, int]:
        """Return the first row of the window of ``place``, and the row after its last."""
        first = place - place % self._width
        return first, first + self._width

    def row(self, place: int, rows: int) -> int:
        """Return the row at ``place``; ``rows`` is the file's number of rows, or the window's end if it is unknown."""
        first, stop = self.window(place)
        size = min(stop, rows) - first
        if self._last is None or self._last[:2] != (first, size):
            self._last = first, size, Feistel(size, f"{self._key}:{first}")
        return first + self._last[2](place - first)
