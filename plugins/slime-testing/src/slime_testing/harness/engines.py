"""Engines for tests: the client of a run on any engine, and a real one (``slime_testing`` has a fake one)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Literal

from slime_core.generation import Client
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.engine import EngineSettings, SGLangServer

__all__ = ["connect", "real_engine"]


def connect(
    url: str, *, vocab_size: int | None = None, timeout_s: float = 300.0
) -> AbstractAsyncContextManager[Client]:
    """Return the client with which a run calls engines; enter it with ``async with``.

    Arguments:
        url: of an engine, fake or real, or of a router.
        vocab_size: token ids of a response must be below it; None if not checked.
        timeout_s: longest time for one request, from the engine's last progress on.
    """
    return GenerateClient(url, timeout_s=timeout_s, vocab_size=vocab_size)


@contextmanager
def real_engine(
    model: Path, *, logs: Path, dtype: str = "auto", device: Literal["cpu", "cuda"] = "cpu"
) -> Iterator[str]:
    """Start a real SGLang server of ``model`` in a separate process and yield its URL. It starts in about ten seconds.

    Arguments:
        model: Hugging Face folder with weights and tokenizer.
        logs: folder that gets ``engine.log``.
        dtype: of weights and computation; ``"auto"`` takes the checkpoint's.

    Raises:
        EngineError: it did not start; the message ends with the last lines of its log.
    """
    with SGLangServer(EngineSettings(model, logs / "engine.log", dtype=dtype, device=device)) as server:
        server.wait_ready()
        yield server.url
