"""Watches engines that somebody else started: one that is gone, or that others' weights got into, ends the run by name.

Nobody else would notice in time: a dead engine shows as requests that fail after minutes, and one that its owner has
started anew draws from weights that this run never published.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slime_core.errors import EngineError, WeightSyncError
from slime_core.runtime.actors import Actor, Launch, Watched, control, start_actor
from slime_core.weights.endpoints import call

__all__ = ["ExternalWatch", "ExternalWatcher", "start_watch"]

PAUSE_S = 1.0
"""Between two looks."""

ANSWER_LIMIT_S = 10.0

REFUSALS = 3
"""Looks in a row at which an engine took no connection, after which it is gone."""


@dataclass(frozen=True, slots=True)
class _Held:
    """The version of an engine's weights; ``is_ours``: this run has published it."""

    version: str
    is_ours: bool


class ExternalWatch:
    """What was seen of the engines at ``urls``."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = list(urls)
        self._refused: Counter[str] = Counter()
        self._held: dict[str, _Held] = {}

    def look(self) -> None:
        """Returns if all of them are as they should be. One that is only slow is left to the limits of requests.

        Raises:
            EngineError: one took no connection several times in a row, or holds older weights than it did.
        """
        for url in self._urls:
            try:
                told = call(url, "/model_info", timeout_s=ANSWER_LIMIT_S)
            except WeightSyncError as error:
                self._missed(url, error)
            else:
                self._refused[url] = 0
                self._compare(url, str(told.get("weight_version", "") if isinstance(told, dict) else ""))

    def _missed(self, url: str, error: WeightSyncError) -> None:
        is_refused = isinstance(error.__cause__, ConnectionError)
        self._refused[url] = self._refused[url] + 1 if is_refused else 0
        if self._refused[url] >= REFUSALS:
            raise EngineError(
                f"The engine at {url}, which somebody else started, is gone: {error.__cause__!r}. Start it again, or "
                "name others with --rollout-external-engine-addrs, and continue from the last checkpoint with --load"
            )

    def _compare(self, url: str, version: str) -> None:
        """The first change is this run's own: an engine may hold what an earlier run published last."""
        before = self._held.get(url)
        if before is not None and version == before.version:
            return
        if before is not None and before.is_ours and (not version.isdecimal() or int(version) < int(before.version)):
            raise EngineError(
                f"The engine at {url}, which somebody else started, held weights of version {before.version} and now "
                f"holds version {version!r}: it was started anew, or another run publishes to it. What it draws is not "
                "this run's policy; see to it, and continue from the last checkpoint with --load"
            )
        self._held[url] = _Held(version, is_ours=before is not None)


class ExternalWatcher(Watched):
    """The actor that looks again and again."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._watch = ExternalWatch(urls)

    @control
    def watch(self) -> None:
        """Does not return: the background call that ends a run's waits.

        Raises:
            EngineError: as :meth:`ExternalWatch.look`.
        """
        while True:
            self._watch.look()
            time.sleep(PAUSE_S)


def start_watch(urls: Sequence[str]) -> Actor[ExternalWatcher]:
    """Start the actor; call :meth:`ExternalWatcher.watch` on it."""
    return start_actor(Launch("watch over others' engines"), ExternalWatcher, list(urls))
