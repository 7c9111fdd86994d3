"""What is looked at before the processes of a run are started."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime_core.plugins.lifecycle import Failures

module = importlib.import_module("slime_core.runtime.launch")  # the package has a function of that name


class _Enough(Exception):
    """Nothing further is to be started."""


def _enough(_: object) -> Any:
    raise _Enough


@pytest.mark.parametrize(("own", "requested"), [(True, []), (False, ["the manifest"])])
def test_nodes_report_their_plugins_where_a_cluster_is_joined(
    own: bool, requested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(module, "Session", lambda *_, **__: nullcontext(SimpleNamespace(own=own)))
    monkeypatch.setattr(module, "inspect_nodes", found.append)
    monkeypatch.setattr(module, "device_of", _enough)
    config = SimpleNamespace(cluster=SimpleNamespace(ray_address=None), eval=SimpleNamespace(eval_datasets=()))
    job = cast(Any, SimpleNamespace(config=config, manifest="the manifest"))
    with pytest.raises(_Enough), module.processes(job, learner_ranks=1, warn=print, failures=Failures()):
        pass
    assert found == requested
