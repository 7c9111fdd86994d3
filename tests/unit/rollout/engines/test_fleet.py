"""The servers of a run: their settings, their routers, and their registration; actors are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.errors import ConfigError, EngineError, RemoteError
from slime_core.rollout.engines import fleet
from slime_core.rollout.engines.engine import EngineSettings, RouterSettings, SGLangServer, Worker
from slime_core.rollout.engines.fleet import EngineFleet, Site, Supervision, masks_up_to
from slime_testing.fake_engine import FakeEngine

MODEL = ARITHMETIC / "model"


class FakeRouter(ThreadingHTTPServer):
    """Takes engines in and out, as sglang-router does."""

    daemon_threads = True

    def __init__(self, *workers: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.workers = [{"url": url} for url in workers]
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def urls(self) -> list[str]:
        """URLs of the engines that it knows."""
        return [worker["url"] for worker in self.workers]

    def __enter__(self) -> FakeRouter:
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    """One request to a :class:`FakeRouter`; an engine's id is its address."""

    server: FakeRouter

    def do_GET(self) -> None:
        urls = self.server.urls
        self.say({"workers": [{"url": url, "id": url.replace("/", "_"), "is_healthy": True} for url in urls]})

    def do_POST(self) -> None:
        self.server.workers.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.say({})

    def do_DELETE(self) -> None:
        url = self.path.removeprefix("/workers/").replace("_", "/")
        self.server.workers = [worker for worker in self.server.workers if worker["url"] != url]
        self.say({})

    def say(self, answer: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        """No test reads it."""


class Stand:
    """Answers as the actor of an engine or of a router would, at once, and notes what it was called for."""

    def __init__(self, settings: Any, url: str, router: FakeRouter | None = None) -> None:
        self.settings, self.url, self.router = settings, url, router
        self.called: list[tuple[str, tuple[Any, ...]]] = []

    def start(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self.called.append((method.__name__, arguments))
        prefill = isinstance(self.settings, EngineSettings) and self.settings.worker_type == "prefill"
        return {"start": self.url, "bootstrap_port": 8998 if prefill else 0}.get(method.__name__)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Stand]]:
    """Name -> stand-in of everything that was started; those of routers have a fake router each."""
    stands: dict[str, Stand] = {}
    routers = ExitStack()

    def engine(settings: EngineSettings, **_: Any) -> Stand:
        return stands.setdefault(settings.name, Stand(settings, f"http://{settings.name.replace(' ', '-')}"))

    def router(settings: RouterSettings, **_: Any) -> Stand:
        fake = routers.enter_context(FakeRouter())
        return stands.setdefault(settings.log_file.stem, Stand(settings, fake.url, fake))

    monkeypatch.setattr(fleet, "start_engine", engine)
    monkeypatch.setattr(fleet, "start_watch", lambda urls: stands.setdefault("watch", Stand(urls, "")))
    monkeypatch.setattr(fleet, "start_router", router)
    monkeypatch.setattr(fleet, "wait_for", lambda calls, **_: calls)
    with routers:
        yield stands


def workers_of(stand: Stand) -> list[dict[str, Any]]:
    """The engines that a router was told of."""
    assert stand.router is not None
    return stand.router.workers


def servers(config: RunConfig, tmp_path: Path, *, on_gpus: bool = False, wait: Any = None) -> EngineFleet:
    policy = sum(group.num_engines for group in config.engine_groups)
    auxiliary = sum(group.num_engines for group in config.auxiliary_groups)
    placements: Any = [None] * policy, [None] * auxiliary
    site = Site(MODEL, tmp_path, on_gpus=on_gpus, placements=placements[0], auxiliary_placements=placements[1])
    found = EngineFleet(config, site, Supervision(wait=wait or (lambda calls, **_: list(calls)), monitors=[]))
    found.start()
    return found


def settings(*line: str, file: Path | None = None, text: str = "") -> RunConfig:
    words = ["--advantage-estimator", "toy", *line]
    if file is not None:
        (file / "run.toml").write_text(text)
        words += ["--config", str(file / "run.toml")]
    return load(words, check_rules=False).config


TWO_GROUPS = """
[cluster]
rollout_num_gpus = 3
[sglang]
chunked_prefill_size = 64
[[engine.engine_groups]]
num_gpus = 1
[[engine.engine_groups]]
num_gpus = 2
num_gpus_per_engine = 2
overrides = { chunked_prefill_size = 512 }
[[engine.engine_models]]
name = "judge"
model_path = "/judge"
[[engine.engine_models]]
name = "score"
model_path = "/score"
dtype = "auto"
num_gpus = 2
is_embedding = true
"""


def test_groups_have_their_own_size_and_their_flags_come_last(started, tmp_path):
    servers(settings(file=tmp_path, text=TWO_GROUPS), tmp_path)
    first, second = (started[name].settings for name in ("engine 0", "engine 1"))
    assert (first.tensor_parallel, second.tensor_parallel) == (1, 2)
    assert first.extra == ("--chunked-prefill-size=64",)
    assert second.extra == ("--chunked-prefill-size=64", "--chunked-prefill-size=512")
    assert (first.seed, second.seed) == (1234, 1235)


@pytest.mark.parametrize(
    ("line", "limit_s"),
    [([], 300.0), (["--sglang-watchdog-timeout", "20"], 20.0), (["--sglang-watchdog-timeout", "1e12"], 86_400.0)],
)
def test_an_engine_hangs_after_the_time_that_sglang_gives_a_forward_pass(started, tmp_path, line, limit_s):
    servers(settings(*line), tmp_path)
    health = started["engine 0"].settings.health
    assert health.probes * health.timeout_s == limit_s


@pytest.mark.parametrize(("line", "limit_s"), [([], 600.0), (["--engine-start-timeout-s", "50"], 50.0)])
def test_the_first_response_of_a_gpu_engine_may_take_as_long_as_its_start(
    started, tmp_path, monkeypatch, line: list[str], limit_s: float
) -> None:
    monkeypatch.setattr(fleet, "start_limit_s", lambda requested, _: requested or 600.0)
    found = servers(settings(*line), tmp_path, on_gpus=True)
    engine = started["engine 0"].settings
    assert (engine.start_timeout_s, engine.health.first_answer_s, found.first_answer_s()) == (limit_s,) * 3
    started.clear()
    found = servers(settings(*line), tmp_path)
    engine = started["engine 0"].settings
    assert (engine.start_timeout_s, engine.health.first_answer_s, found.first_answer_s()) == (limit_s, 0.0, 0.0)


def test_the_run_waits_for_engines_as_long_as_they_may_take(started, tmp_path) -> None:
    waits: list[tuple[str, float]] = []

    def wait(calls: Any, *, what: str, at_least_s: float = 0.0) -> list[Any]:
        waits.append((what, at_least_s))
        return list(calls)

    found = servers(settings("--engine-start-timeout-s", "5000"), tmp_path, wait=wait)
    found.policy.urls()
    ((_, at_least_s),) = waits
    assert at_least_s > 5000


@pytest.mark.parametrize(
    ("line", "largest"),
    [
        ("", 512),
        ("--sglang-server-concurrency 400", 400),
        ("--sglang-server-concurrency 4000", 512),
        ("--sglang-max-running-requests 300", 300),
        # SGLang's own choice stays, or that of the user.
        ("--sglang-server-concurrency 64", None),
        ("--gpu-memory-gib 24", None),
        ("--sglang-dp-size 2", None),
        ("--sglang-speculative-algorithm NGRAM", None),
        ("--sglang-cuda-graph-bs-decode 1 2 4", None),
    ],
)
def test_decode_graphs_are_as_large_as_the_batches(started, tmp_path, line: str, largest: int | None) -> None:
    servers(settings(*line.split()), tmp_path, on_gpus=True)
    graphs = [word for word in started["engine 0"].settings.extra if "cuda-graph-max-bs" in word]
    assert graphs == ([] if largest is None else [f"--cuda-graph-max-bs-decode={largest}"])


def test_decode_graphs_of_the_user_win_and_cpus_and_other_models_have_none(started, tmp_path) -> None:
    servers(settings("--sglang-cuda-graph-max-bs-decode", "320"), tmp_path, on_gpus=True)
    assert started["engine 0"].settings.extra == ("--cuda-graph-max-bs-decode=320",)
    started.clear()
    servers(settings(), tmp_path)
    assert started["engine 0"].settings.extra == ()
    started.clear()
    servers(settings(file=tmp_path, text=TWO_GROUPS), tmp_path, on_gpus=True)
    assert started["judge 0"].settings.extra == ("--chunked-prefill-size=64",)


def test_models_have_their_own_weights_and_several_engines_a_router(started, tmp_path):
    found = servers(settings(file=tmp_path, text=TWO_GROUPS), tmp_path)
    assert sorted(started) == ["engine 0", "engine 1", "judge 0", "router", "router-score", "score 0", "score 1"]
    assert (started["judge 0"].settings.model, started["score 1"].settings.model) == (Path("/judge"), Path("/score"))
    assert started["score 0"].settings.extra[-1] == "--is-embedding"
    dtypes = [started[name].settings.dtype for name in ("engine 0", "judge 0", "score 0", "score 1")]
    assert dtypes == ["float32", "float32", "auto", "auto"]
    assert found.model_urls() == {"judge": "http://judge-0", "score": started["router-score"].url}
    assert workers_of(started["router-score"]) == [{"url": "http://score-0"}, {"url": "http://score-1"}]


def test_the_policy_has_a_router_and_only_its_engines_get_weights(started, tmp_path):
    found = servers(settings(file=tmp_path, text=TWO_GROUPS), tmp_path)
    assert found.policy.url() == started["router"].url
    assert (found.policy.urls(), found.policy.ranks) == (["http://engine-0", "http://engine-1"], (1, 2))
    found.policy.register()
    found.policy.register()
    assert workers_of(started["router"]) == [{"url": "http://engine-0"}, {"url": "http://engine-1"}]
    assert found.direct_urls() == ()


def test_colocated_engines_get_no_expandable_segments(started, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    servers(settings("--colocate"), tmp_path, on_gpus=True)
    environment = started["engine 0"].settings.environment()
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_prefill_engines_are_registered_with_their_ports(started, tmp_path):
    line = ["--prefill-num-servers", "1", "--rollout-num-gpus", "2"]
    found = servers(settings(*line), tmp_path, on_gpus=True)
    found.policy.register()
    prefill, decode = Worker("http://engine-0", "prefill", 8998), Worker("http://engine-1", "decode")
    assert workers_of(started["router"]) == [prefill.entry, decode.entry]
    assert started["router"].settings.splits_prefill
    arguments = SGLangServer(started["engine 0"].settings).command(1, 8998)
    assert "--disaggregation-mode=prefill" in arguments
    assert "--disaggregation-bootstrap-port=8998" in arguments
    assert "--disaggregation-mode=decode" in started["engine 1"].settings.arguments()


@pytest.mark.parametrize(
    "line",
    [
        "--rollout-num-gpus 2",  # they are restarted
        "--sglang-router-policy round_robin",
        "--sglang-speculative-algorithm NGRAM",
        "--sglang-sampling-mask-max-tokens 8",
        "--rollout-num-gpus 2 --prefill-num-servers 1 --no-use-fault-tolerance",
    ],
)
def test_engines_report_masks_where_requests_can_bypass_the_router(started, tmp_path, line: str) -> None:
    cut = ["--rollout-top-p", "0.9"]
    for more in ([], ["--rollout-num-gpus", "2", "--no-use-fault-tolerance"]):
        found = servers(settings(*cut, *more), tmp_path, on_gpus=True)
        assert found.direct_urls() == tuple(found.policy.urls())
        assert "--sampling-mask-max-tokens=1024" in started["engine 0"].settings.extra
        assert masks_up_to(settings(*cut, *more)) == 256
        started.clear()
    assert masks_up_to(settings()) == 0
    found = servers(settings(*cut, *line.split()), tmp_path, on_gpus=True)
    assert found.direct_urls() == ()
    assert masks_up_to(settings(*cut, *line.split())) == 0


def test_engines_that_return_routes_are_called_directly(started, tmp_path):
    found = servers(settings("--use-rollout-routing-replay", "--rollout-num-gpus", "2"), tmp_path)
    assert started["engine 0"].settings.extra == ("--enable-return-routed-experts",)
    assert found.direct_urls() == ("http://engine-0", "http://engine-1")


def test_engines_compute_logits_in_the_type_of_the_learner(started, tmp_path):
    servers(settings("--bf16", "--fp32-lm-head"), tmp_path)
    assert started["engine 0"].settings.extra == ("--enable-fp32-lm-head",)


def test_an_external_router_is_used_and_not_started(started, tmp_path):
    with FakeRouter("http://older") as router:
        port = router.url.rpartition(":")[2]
        found = servers(settings("--sglang-router-ip", "127.0.0.1", "--sglang-router-port", port), tmp_path)
        assert found.policy.url() == router.url
        found.policy.register()
        assert (sorted(started), router.urls) == (["engine 0"], ["http://older", "http://engine-0"])
        found.stop()
        assert router.urls == ["http://older"]
    found.stop()


def test_an_address_without_a_router_is_named(started, tmp_path):
    with FakeEngine() as engine:
        port = engine.url.rpartition(":")[2]
        found = servers(settings("--sglang-router-ip", "127.0.0.1", "--sglang-router-port", port), tmp_path)
        with pytest.raises(EngineError, match=f"{engine.url}/workers .*status 404"):
            found.policy.register()


def test_the_policy_of_the_router_is_that_of_the_run(started, tmp_path):
    servers(settings("--sglang-router-policy", "consistent_hashing"), tmp_path)
    assert started["router"].settings.policy == "consistent_hashing"


def test_external_engines_are_used_and_not_stopped(started, tmp_path):
    with FakeEngine() as engine:
        engine.info = {"model_path": str(MODEL), "dtype": "float32", "tp_size": 1}
        found = servers(settings("--rollout-external-engine-addrs", engine.url.removeprefix("http://")), tmp_path)
        assert (found.serves_policy, list(found.policy.engines), found.policy.urls(), found.policy.ranks) == (
            True,
            [],
            [engine.url],
            (1,),
        )
        found.policy.url()
        found.policy.register()
        assert workers_of(started["router"]) == [{"url": engine.url}]
        found.stop()
        assert started["router"].called[-1] == ("stop", ())
        assert (started["watch"].settings, started["watch"].called) == ([engine.url], [("watch", ())])
    assert sorted(started) == ["router", "watch"]


def test_engines_for_evaluation_serve_the_policy_without_its_router(started, tmp_path):
    found = servers(settings("--eval-num-gpus", "2", "--rollout-num-gpus", "1"), tmp_path)
    assert sorted(started) == ["engine 0", "eval engine 0", "eval engine 1", "router", "router-eval"]
    assert started["eval engine 1"].settings.model == MODEL
    assert started["eval engine 1"].settings.log_file == tmp_path / "eval-engine-1.log"
    found.policy.register()
    assert (found.policy.url(), found.policy.urls()) == (started["router"].url, ["http://engine-0"])
    assert found.policy.ranks == (1,)
    assert workers_of(started["router"]) == [{"url": "http://engine-0"}]
    assert found.evaluating.ready_url() == started["router-eval"].url
    assert workers_of(started["router-eval"]) == [{"url": "http://eval-engine-0"}, {"url": "http://eval-engine-1"}]
    assert (found.evaluating.urls(), found.evaluating.ranks) == (
        ["http://eval-engine-0", "http://eval-engine-1"],
        (1, 1),
    )
    assert [call[0] for call in started["eval engine 0"].called].count("watch") == 1
    assert found.model_urls() == {}
    found.stop()
    assert started["eval engine 0"].called[-1] == ("stop", ())


def test_one_engine_for_evaluation_is_called_directly_next_to_auxiliary_models(started, tmp_path):
    line = ["--eval-num-gpus", "2", "--eval-num-gpus-per-engine", "2"]
    found = servers(settings(*line, file=tmp_path, text=TWO_GROUPS), tmp_path)
    assert found.evaluating.ready_url() == "http://eval-engine-0"
    assert (started["eval engine 0"].settings.tensor_parallel, found.evaluating.ranks) == (2, (2,))
    assert found.model_urls() == {"judge": "http://judge-0", "score": started["router-score"].url}


def test_without_engines_of_their_own_evaluations_have_no_address(started, tmp_path):
    found = servers(settings(), tmp_path)
    none = found.evaluating
    assert (none.ready_url(), none.urls(), list(none.engines), none.ranks) == ("", [], [], ())


def test_a_run_that_reads_its_rollouts_starts_nothing(started, tmp_path):
    found = servers(settings("--debug-train-only"), tmp_path)
    assert (found.serves_policy, found.policy.url(), found.model_urls(), found.policy.starts) == (False, "", {}, [])
    assert started == {}


def test_every_server_is_waited_for_at_the_end_though_an_actor_is_dead(started, tmp_path, monkeypatch):
    found = servers(settings("--rollout-num-gpus", "2"), tmp_path)
    waited: list[int] = []

    def lost(calls: list[Any], **_: Any) -> None:
        waited.append(len(calls))
        raise RemoteError("engine 0 died.")

    monkeypatch.setattr(fleet, "wait_for", lost)
    found.stop()
    assert waited == [1, 1, 1]


def test_nothing_is_started_where_no_engine_serves_an_evaluation(started: dict[str, Stand], tmp_path: Path) -> None:
    with FakeEngine() as engine:
        url = engine.url
    run = settings("--eval-datasets", f"name = 'aime', path = 'aime.jsonl', model = '{url}'")
    with pytest.raises(ConfigError, match=f"evaluation set aime: model = {url}: ConnectionRefusedError"):
        servers(run, tmp_path)
    assert started == {}
