"""The endpoint that Prometheus scrapes, over HTTP."""

from __future__ import annotations

import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from slime_core import RunView
from slime_testing import TrackerSuite
from slime_trackers.options import PrometheusOptions
from slime_trackers.prometheus_server import Prometheus


class TestPrometheus(TrackerSuite):
    component = "prometheus"
    options = PrometheusOptions(port=0)


@contextmanager
def serving(folder: Path) -> Iterator[Prometheus]:
    tracker = Prometheus(PrometheusOptions(port=0))
    tracker.start(RunView(folder=folder))
    yield tracker
    tracker.close(None)


@pytest.fixture
def tracker(tmp_path: Path) -> Iterator[Prometheus]:
    with serving(tmp_path) as tracker:
        yield tracker


def scrape(tracker: Prometheus, key: str | None) -> str:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{tracker.port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return str(answer.read().decode())


def key_of(folder: Path) -> str:
    return (folder / "trackers" / "prometheus.key").read_text()


def test_a_scrape_has_the_latest_value_of_every_metric(tracker: Prometheus, tmp_path: Path) -> None:
    tracker.log(0, {"train/loss": 0.5, "rollout/raw_reward": 0.25})
    tracker.log(1, {"train/loss": 0.125, "eval/sums-pass@1": 0.5, "eval/sums_pass_1": 0.75})
    tracker.log(0, {"eval/sums": 1.0})  # a late evaluation of earlier weights
    text = scrape(tracker, key_of(tmp_path))
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
    assert {s.labels["run"] for family in families.values() for s in family.samples} == {tmp_path.name}


@pytest.mark.parametrize("key", [None, "wrong", "wröng".encode().decode("latin-1")])
def test_a_scrape_without_the_key_is_refused(tracker: Prometheus, key: str | None) -> None:
    tracker.log(0, {"train/loss": 0.5})
    with pytest.raises(urllib.error.HTTPError) as refused:
        scrape(tracker, key)
    with refused.value:
        assert refused.value.code == 401
        assert b"train" not in refused.value.read()


def test_only_the_owner_reads_the_key_and_the_configuration_names_its_file(tracker: Prometheus, tmp_path: Path) -> None:
    key = tmp_path / "trackers" / "prometheus.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    (job,) = yaml.safe_load((tmp_path / "trackers" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["authorization"] == {"credentials_file": str(key)}
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{tracker.port}"]}]


def test_a_resumed_run_has_another_key(tmp_path: Path) -> None:
    keys = set()
    for _ in range(2):
        with serving(tmp_path):
            keys.add(key_of(tmp_path))
    assert len(keys) == 2
