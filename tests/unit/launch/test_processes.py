"""What is looked at before the processes of a run are started."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC, ClusterConfig, RunConfig
from slime_core.plugins.activation import activate
from slime_core.plugins.manifest import Manifest
from slime_core.track.failures import Failures

module = importlib.import_module("slime_core.launch")


class _Enough(Exception):
    """Nothing further is to be started."""


def _enough() -> Any:
    raise _Enough


@pytest.mark.parametrize(("own", "requested"), [(True, []), (False, ["the manifest"])])
def test_nodes_report_their_plugins_where_a_cluster_is_joined(
    own: bool, requested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(module, "Session", lambda *_, **__: nullcontext(SimpleNamespace(own=own)))
    monkeypatch.setattr(module, "inspect_nodes", found.append)
    monkeypatch.setattr(module, "cluster_gpus", _enough)
    config = SimpleNamespace(cluster=SimpleNamespace(ray_address=None), eval=SimpleNamespace(eval_datasets=()))
    job = cast(Any, SimpleNamespace(config=config, manifest="the manifest", folder=Path("run")))
    with pytest.raises(_Enough), module.processes(job, learner_ranks=1, warn=print, failures=Failures()):
        pass
    assert found == requested


def test_what_any_node_reads_is_the_weights_of_every_role(tmp_path: Path) -> None:
    flags = {
        "--hf-checkpoint": "actor",
        "--ref-load": "reference",
        "--opd-teacher-load": "teacher",
        "--critic-load": "critic",
    }
    words = [word for flag, value in flags.items() for word in (flag, str(tmp_path / value))]
    config = load(words, check_rules=False).config
    inputs = [tmp_path / name for name in ("actor", "reference", "critic", "teacher")]
    assert job(config).inputs == inputs
    replayed = load([*words, "--load-debug-rollout-data", "saved.jsonl"], check_rules=False).config
    assert job(replayed).inputs == inputs
    assert job(load([], check_rules=False).config).inputs == [ARITHMETIC / "model"]  # comes with slime, as its prompts


def job(config: RunConfig) -> Any:
    return module.Job(config, activate([]).registry, Manifest(()), architecture="", logs=Path("run/logs"))


@pytest.mark.parametrize(("device", "colocate", "times"), [("cuda", True, 1), ("cpu", True, 0), ("cuda", False, 0)])
def test_a_changed_allocator_of_a_run_that_shares_gpus_is_named_once(
    device: Any, colocate: bool, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "head_address", lambda: None)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    warnings: list[str] = []
    config = RunConfig(cluster=ClusterConfig(device=device, colocate=colocate))
    settings: Any = SimpleNamespace(config=config, model=tmp_path, logs=tmp_path)
    placement: Any = SimpleNamespace(engines=[], auxiliary=[])
    module.Processes(settings, placement, warn=warnings.append, failures=Failures())
    assert [text.partition(":")[0] for text in warnings] == ["PYTORCH_CUDA_ALLOC_CONF"] * times
