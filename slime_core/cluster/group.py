"""Several actors called as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.cluster.actors import Actor, Call

__all__ = ["ActorGroup"]


@dataclass(frozen=True, slots=True)
class ActorGroup:
    """Actors in rank order; results come back in that order, whoever finishes first."""

    actors: tuple[Actor, ...]

    def __len__(self) -> int:
        return len(self.actors)

    def __iter__(self) -> Iterator[Actor]:
        return iter(self.actors)

    def __getitem__(self, rank: int) -> Actor:
        return self.actors[rank]

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> list[Call]:
        """Start ``method`` with the same arguments on every actor."""
        return [actor.start(method, *args, **kwargs) for actor in self.actors]

    def start_each(self, method: str, arguments: Sequence[Any], /, **kwargs: Any) -> list[Call]:
        """Start ``method`` on every actor, each with its own first argument.

        Raises:
            ValueError: not one argument an actor.
        """
        return [actor.start(method, own, **kwargs) for actor, own in zip(self.actors, arguments, strict=True)]
