"""Prompts of files, held or streamed, in every order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_core.provisional import PromptRequest
from slime_datasets.options import DatasetsOptions
from slime_datasets.prompt_files import PromptFiles

Source = Callable[..., PromptFiles]
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


@pytest.fixture
def source() -> Source:
    """``source(path, **fields)``: prompts, from options of the plugin and fields of a request by their names."""

    def make(path: Path, **fields: Any) -> PromptFiles:
        options = {name: fields.pop(name) for name in DatasetsOptions.model_fields if name in fields}
        request = PromptRequest(path, **{"label_key": None, **fields})
        return PromptFiles(DatasetsOptions(**options), RunView(prompts=request))

    return make
