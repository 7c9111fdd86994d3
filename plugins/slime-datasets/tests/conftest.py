"""Prompts of files, held or streamed, in every order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core import PromptFormat, RunView
from slime_core.components.construction import prompt_formats
from slime_core.plugins.activation import load_plugins
from slime_core.provisional import PromptRequest
from slime_datasets.options import DatasetsOptions
from slime_datasets.streams import PromptStreams

Source = Callable[..., PromptStreams]
ORDERS: list[dict[str, Any]] = [
    {},
    {"shuffle": False},
    {"streaming_data": True},
    {"streaming_data": True, "shuffle_window": 100},
    {"streaming_data": True, "shuffle": False},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of indices and copies, of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "slime" / "prompts"


@pytest.fixture(params=ORDERS, ids=str)
def order(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every order, for ``source(path, **order)``."""
    return dict(request.param)


@pytest.fixture(params=ORDERS[2:], ids=str)
def streamed(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every order of streamed prompts."""
    return dict(request.param)


@pytest.fixture(scope="session")
def formats() -> dict[str, PromptFormat]:
    return prompt_formats(load_plugins(), {}, RunView())


@pytest.fixture
def source(formats: dict[str, PromptFormat]) -> Source:
    """``source(path, **fields)``: prompts, from options of the plugin and fields of a request by their names."""

    def make(path: Path, **fields: Any) -> PromptStreams:
        options = {name: fields.pop(name) for name in DatasetsOptions.model_fields if name in fields}
        request = PromptRequest(path, formats=formats, **{"label_key": None, **fields})
        return PromptStreams(DatasetsOptions(**options), RunView(prompts=request))

    return make
