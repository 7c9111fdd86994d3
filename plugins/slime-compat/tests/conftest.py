"""Functions as users write them, in files; the options of adapters; and an engine that answers."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from slime_compat.check import check_functions
from slime_compat.flags import advice
from slime_compat.paths import PathOptions
from slime_core.config.engine_flags import use_advice
from slime_core.config.schema import ARITHMETIC
from slime_core.generation import GenerateContext
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.engines.client import GenerateClient
from slime_testing.fake_engine import FakeEngine
from tests.function_paths import handed

Write = Callable[..., PathOptions]


@pytest.fixture(autouse=True)
def advised() -> None:
    """Explain unknown flags, as in a command, which loads the plugin."""
    use_advice([advice])


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """``write("custom_rm_path", "def f...", *flags)``: the options of a run with ``mine.py``, checked by its text."""
    monkeypatch.chdir(tmp_path)

    def make(setting: str, text: str, *flags: str, name: str = "", checked: bool = True) -> PathOptions:
        Path("mine.py").write_text(textwrap.dedent(text))
        options = handed([f"--{setting.replace('_', '-')}", f"mine.py{name}", *flags])
        if checked:
            check_functions(options.sources, group_rm=options.group_rm, has_model=True)
        return options

    return make


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture(scope="session")
def chat() -> PromptEncoder:
    """The built-in model's encoder, with its chat template."""
    return PromptEncoder(ARITHMETIC / "model", apply_chat_template=True)


@pytest.fixture(scope="session")
def plain() -> PromptEncoder:
    """The built-in model's encoder, without a chat template."""
    return PromptEncoder(ARITHMETIC / "model", apply_chat_template=False)


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[GenerateClient]:
    async with GenerateClient(engine.url, timeout_s=60, vocab_size=16) as client:
        yield client


@pytest.fixture
def context(client: GenerateClient, plain: PromptEncoder) -> GenerateContext:
    return GenerateContext(client, plain)
