"""Weights as files, read by engines that have no model."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_core.errors import WeightSyncError
from slime_core.weights.engine_control import Bucket, EngineControl
from slime_core.weights.hugging_face import HuggingFaceFolder, WeightSpec
from slime_core.weights.transports import DiskTransport
from slime_testing.fake_engine import FakeEngine

TEMPLATE = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"
BUCKETS = [Bucket((WeightSpec(name, "float32", (4096,)),)) for name in ("norm", "gate")]


@pytest.fixture
def control() -> Iterator[EngineControl]:
    with FakeEngine() as engine:
        found = EngineControl([engine.url], timeout_s=60)
        yield found
        found.close()


def send(transport: DiskTransport, version: str, value: float) -> None:
    transport.start(version)
    for number, bucket in enumerate(BUCKETS):
        transport.send(bucket, [torch.full((4096,), value + number)], last=bucket is BUCKETS[-1])
    transport.commit()


def test_each_version_is_a_whole_folder_and_only_the_last_stays(control, tmp_path):
    transport = DiskTransport(control, folder=tmp_path / "weights", template=TEMPLATE)
    for version in ("1", "2", "2"):
        send(transport, version, float(version))
        assert control.version() == version
        (folder,) = (tmp_path / "weights").glob("*/*")
        assert folder.name == f"version-{version}"
    read = {name: weight[0].item() for name, weight in load_file(folder / "model.safetensors").items()}
    assert read == {"norm": 2, "gate": 3}
    assert (folder / "config.json").read_text() == (TEMPLATE / "config.json").read_text()
    transport.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_hook_sees_each_version_whole_before_the_engines_read_it(control, tmp_path):
    seen = []

    def written(folder: Path) -> None:
        seen.append((folder.name, (folder / "model.safetensors").is_file(), control.version()))

    transport = DiskTransport(control, folder=tmp_path, template=TEMPLATE, on_written=written)
    for version in ("1", "2"):
        send(transport, version, 0.0)
    assert [one[:2] for one in seen] == [("version-1", True), ("version-2", True)]
    assert seen[1][2] == "1"
    assert control.version() == "2"


def test_files_of_a_failed_publication_are_overwritten_and_those_of_another_run_stay(control, tmp_path):
    ours, theirs = (DiskTransport(control, folder=tmp_path, template=TEMPLATE) for _ in range(2))
    ours.start("1")
    ours.send(BUCKETS[0], [torch.zeros(4096)], last=False)
    ours.drain()
    send(ours, "2", 0.0)
    send(theirs, "3", 0.0)
    assert sorted(folder.name for folder in tmp_path.glob("*/*")) == ["version-2", "version-3"]
    ours.close()
    assert [folder.name for folder in tmp_path.glob("*/*")] == ["version-3"]


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more_is_one_error_and_nothing_is_left_or_loaded(control, tmp_path):
    transport = DiskTransport(control, folder=tmp_path, template=TEMPLATE)
    named = rf"(?s)Version 1 .*{tmp_path}.*File too large.* \d+ MB"
    with files_of_at_most(10_000), pytest.raises(WeightSyncError, match=named):
        send(transport, "1", 0.0)
    assert list(tmp_path.iterdir()) == []
    assert control.version() == "default"


def test_engines_that_do_not_see_the_folder_say_where_it_should_be(control, tmp_path, monkeypatch):
    seen = control.update_from_disk
    monkeypatch.setattr(control, "update_from_disk", lambda folder, *, version: seen("/elsewhere", version=version))
    transport = DiskTransport(control, folder=tmp_path, template=TEMPLATE)
    with pytest.raises(WeightSyncError, match=r"status 400.*--update-weight-disk-dir"):
        send(transport, "1", 0.0)
    transport.close()
    assert list(tmp_path.iterdir()) == []


def test_the_next_bucket_is_gathered_while_one_is_written(control, tmp_path, monkeypatch):
    gathered, add = threading.Event(), HuggingFaceFolder.add

    def slow(folder: HuggingFaceFolder, weights: dict[str, torch.Tensor]) -> None:
        assert "gate" in weights or gathered.wait(100), "the next bucket is not gathered before this one is written"
        add(folder, weights)

    monkeypatch.setattr(HuggingFaceFolder, "add", slow)
    transport = DiskTransport(control, folder=tmp_path, template=TEMPLATE)
    transport.start("1")
    transport.send(BUCKETS[0], [torch.ones(4096)], last=False)
    gathered.set()
    transport.send(BUCKETS[1], [torch.ones(4096)], last=True)
    transport.drain()
    transport.commit()
    assert control.version() == "1"
    transport.close()
