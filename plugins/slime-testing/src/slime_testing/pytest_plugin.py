"""Fixtures for tests of plugins; pytest loads this in every run of the environment, so imports are deferred.

slime_fake_engine     an inference server without a model
slime_local_plugin    writes a plugin into a file for ``plugin = ...`` and ``--plugin``
slime_discovery_off   hides all installed plugins except ``core``
slime_hook_recorder   a plugin that records the calls of its hooks, in order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from slime_testing.fake_engine import FakeEngine
    from slime_testing.recorder import HookRecorder

__all__ = ["slime_discovery_off", "slime_fake_engine", "slime_hook_recorder", "slime_local_plugin"]


@pytest.fixture
def slime_fake_engine() -> Iterator[FakeEngine]:
    """A started :class:`~slime_testing.fake_engine.FakeEngine`; clients connect to its ``url``."""
    from slime_testing.fake_engine import FakeEngine

    with FakeEngine() as engine:
        yield engine


@pytest.fixture
def slime_local_plugin(tmp_path: Path) -> Callable[..., str]:
    """``slime_local_plugin(source, name="mine")`` writes ``mine.py`` and returns its path."""

    def write(source: str, *, name: str = "mine") -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def slime_discovery_off() -> Iterator[None]:
    """Hide installed plugins: only ``core``, files and modules can be named."""
    from slime_testing.harness import only_core_installed

    with only_core_installed():
        yield


@pytest.fixture
def slime_hook_recorder() -> HookRecorder:
    """An object with every lifecycle hook; ``calls`` lists the called hooks with their arguments."""
    from slime_testing.recorder import HookRecorder

    return HookRecorder()
