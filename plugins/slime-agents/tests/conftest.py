"""A fake engine whose tokens are characters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from slime_core.generation import GenerateContext
from slime_testing.fake_engine import FakeEngine
from slime_testing.harness.engines import connect


class Letters:
    """A token is a character; ``\\x01`` ends a turn. A message is ``[role:content]``, ``>`` opens the model's turn."""

    vocab_size = 256
    uses_template = True

    def encode(self, prompt: str | list[dict[str, Any]], *, tools: Any = None) -> list[int]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        names = "".join(one["function"]["name"] for one in tools or ())
        thinks = "<think>\n" if "<think>" in str(messages) else ""  # in the prompt: the template opens thoughts
        return self.encode_text(f"{{{names}}}" * bool(names) + "".join(map(shown, messages)) + ">" + thinks)

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], *, after: Any = None, tools: Any = None
    ) -> list[int]:
        return self.encode_text(("" if after == 1 else "\x01") + "".join(map(shown, messages)) + ">")

    def encode_text(self, text: str) -> list[int]:
        return [ord(one) for one in text]

    encode_response = encode_text

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_all(ids).replace("\x01", "")

    def decode_all(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def shown(message: Mapping[str, Any]) -> str:
    calls = "".join(one["function"]["name"] for one in message.get("tool_calls") or ())
    return f"[{message['role'][0]}:{message.get('content') or ''}{calls}]"


@pytest.fixture
def letters() -> Any:
    return Letters()


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
async def context(engine: FakeEngine, letters: Any) -> AsyncIterator[GenerateContext]:
    async with connect(engine.url, vocab_size=256) as client:
        yield GenerateContext(client, letters, max_response_len=2000, context_length=4000)
