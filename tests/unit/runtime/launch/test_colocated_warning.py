"""What a run that shares GPUs says when it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core.config.schema import ClusterConfig, RunConfig
from slime_core.plugins.lifecycle import Failures
from slime_core.runtime import launch


@pytest.mark.parametrize(("device", "colocate", "times"), [("cuda", True, 1), ("cpu", True, 0), ("cuda", False, 0)])
def test_a_changed_allocator_is_named_once(
    device: Any, colocate: bool, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "head_address", lambda: None)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    warnings: list[str] = []
    config = RunConfig(cluster=ClusterConfig(device=device, colocate=colocate))
    job: Any = SimpleNamespace(config=config, model=tmp_path, logs=tmp_path)
    placement: Any = SimpleNamespace(engines=[], auxiliary=[])
    launch.Processes(job, placement, warn=warnings.append, failures=Failures())
    assert [text.partition(":")[0] for text in warnings] == ["PYTORCH_CUDA_ALLOC_CONF"] * times
