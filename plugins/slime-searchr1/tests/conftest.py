"""A fake engine whose tokens are characters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

from slime_core.generation import GenerateContext
from slime_core.harness.engines import connect
from slime_testing.fake_engine import FakeEngine


class Letters:
    """A token is a character; ``\x01`` ends a turn."""

    vocab_size = 256
    uses_template = True

    def encode(self, prompt: str | list[dict[str, Any]], *, tools: Any = None) -> list[int]:
        del tools
        return self.encode_text(prompt if isinstance(prompt, str) else str(prompt[0]["content"]))

    def encode_text(self, text: str) -> list[int]:
        return [ord(one) for one in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids)).replace("\x01", "")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(vocab_size=256, context_length=4000) as engine:
        yield engine


@pytest.fixture
def says(engine: FakeEngine) -> Callable[..., None]:
    """Gives the engine its next answers, each of which then ends its turn."""

    def give(*texts: str) -> None:
        engine.answers += [[ord(one) for one in text] for text in texts]

    return give


@pytest.fixture
async def context(engine: FakeEngine) -> AsyncIterator[GenerateContext]:
    encoder: Any = Letters()
    async with connect(engine.url, vocab_size=256) as client:
        yield GenerateContext(client, encoder, max_response_len=2000, context_length=4000)
