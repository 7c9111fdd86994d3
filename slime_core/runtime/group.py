"""Several actors of one class called as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, TypeVar

from slime_core.runtime.actors import Actor, Call, Watched

__all__ = ["ActorGroup"]

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
W_co = TypeVar("W_co", bound=Watched, covariant=True)


@dataclass(frozen=True, slots=True)
class ActorGroup(Generic[W_co]):
    """Actors in rank order; results come back in that order, whoever finishes first.

    Their methods are no coroutines.
    """

    actors: tuple[Actor[W_co], ...]

    def __len__(self) -> int:
        return len(self.actors)

    def __iter__(self) -> Iterator[Actor[W_co]]:
        return iter(self.actors)

    def __getitem__(self, rank: int) -> Actor[W_co]:
        return self.actors[rank]

    def start(self, method: Callable[Concatenate[W_co, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[Call[R]]:
        """Start ``method`` with the same arguments on every actor."""
        return [actor.start(method, *args, **kwargs) for actor in self.actors]

    def start_each(self, method: Callable[[W_co, A], R], arguments: Sequence[A], /) -> list[Call[R]]:
        """Start ``method`` on every actor, each with its own argument.

        Raises:
            ValueError: not one argument an actor.
        """
        return [actor.start(method, own) for actor, own in zip(self.actors, arguments, strict=True)]
