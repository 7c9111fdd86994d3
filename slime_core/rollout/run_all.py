"""Work side by side, of which nothing goes on once a part of it has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["run_all"]

T = TypeVar("T")


async def run_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each of ``works`` returns, in their order.

    Where one raises, the others are cancelled and its error comes out at once: work that does not heed its cancellation
    holds nobody up.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # of one that has ended this changes nothing
