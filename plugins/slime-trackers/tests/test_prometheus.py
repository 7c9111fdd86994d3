"""The endpoint that Prometheus scrapes, over HTTP."""

from __future__ import annotations

import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from slime_core import RunView
from slime_testing import TrackerSuite
from slime_trackers.prometheus import Prometheus, PrometheusOptions


class TestPrometheus(TrackerSuite):
    component = "prometheus"
    options = PrometheusOptions(port=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "sums"
    folder.mkdir()
    return folder


@pytest.fixture
def tracker(folder: Path) -> Iterator[Prometheus]:
    view = RunView(folder=folder)
    tracker = Prometheus(PrometheusOptions(port=0), view)
    tracker.start(view)
    yield tracker
    tracker.close(None)


def scrape(tracker: Prometheus, key: str | None) -> str:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{tracker.port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: bytes = answer.read()
    return found.decode()


def test_a_scrape_has_the_latest_value_of_every_metric(tracker: Prometheus, folder: Path) -> None:
    tracker.log(0, {"train/loss": 0.5, "rollout/raw_reward": 0.25})
    tracker.log(1, {"train/loss": 0.125, "eval/sums-pass@1": 0.5, "eval/sums_pass_1": 0.75})
    tracker.log(0, {"eval/sums": 1.0})  # a late evaluation of earlier weights
    text = scrape(tracker, (folder / "trackers" / "prometheus.key").read_text())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {name: {s.labels["metric"]: s.value for s in family.samples} for name, family in families.items()}
    assert values == {
        "slime_train_loss": {"train/loss": 0.125},
        "slime_rollout_raw_reward": {"rollout/raw_reward": 0.25},
        "slime_eval_sums_pass_1": {"eval/sums-pass@1": 0.5, "eval/sums_pass_1": 0.75},
        "slime_eval_sums": {"eval/sums": 1.0},
        "slime_step": {"step": 1.0},
    }
    assert {family.type for family in families.values()} == {"gauge"}
    assert {s.labels["run"] for family in families.values() for s in family.samples} == {"sums"}


@pytest.mark.parametrize("key", [None, "wrong", "wröng"])
def test_a_scrape_without_the_key_is_refused(tracker: Prometheus, key: str | None) -> None:
    tracker.log(0, {"train/loss": 0.5})
    given = key if key is None else key.encode().decode("latin-1")
    with pytest.raises(urllib.error.HTTPError) as refused:
        scrape(tracker, given)
    with refused.value:
        assert refused.value.code == 401
        assert b"train" not in refused.value.read()


def test_only_the_owner_reads_the_key_and_the_configuration_names_its_file(tracker: Prometheus, folder: Path) -> None:
    key = folder / "trackers" / "prometheus.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    (job,) = yaml.safe_load((folder / "trackers" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["authorization"] == {"credentials_file": str(key)}
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{tracker.port}"]}]


def test_a_resumed_run_has_another_key(folder: Path) -> None:
    keys = set()
    for _ in range(2):
        tracker = Prometheus(PrometheusOptions(port=0), RunView(folder=folder))
        tracker.start(RunView(folder=folder))
        keys.add((folder / "trackers" / "prometheus.key").read_text())
        tracker.close(None)
    assert len(keys) == 2
