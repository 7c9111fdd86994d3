"""The servers of a run: their settings, their routers, and their registration; actors are stand-ins."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.errors import ConfigError, RemoteError
from slime_core.rollout.engines import fleet
from slime_core.rollout.engines.engine import EngineSettings, RouterSettings, SGLangServer, Worker
from slime_core.rollout.engines.fleet import EngineFleet, Site, Supervision, masks_up_to
from slime_testing.fake_engine import FakeEngine

MODEL = ARITHMETIC / "model"


class FakeRouter(ThreadingHTTPServer):
    """Takes engines in and out, as sglang-router does; an engine's id is its address."""

    daemon_threads = True

    def __init__(self, *workers: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.workers: list[dict[str, Any]] = [{"url": url} for url in workers]
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> FakeRouter:
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    server: FakeRouter

    def do_GET(self) -> None:
        urls = [worker["url"] for worker in self.server.workers]
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

    def log_message(self, *_: object) -> None: ...


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


Start = Callable[..., EngineFleet]


@pytest.fixture
def start(started: dict[str, Stand], tmp_path: Path) -> Start:
    """Starts the servers of a run with these flags, and forgets those of the one before."""

    def make(line: str = "", *, text: str = "", on_gpus: bool = False) -> EngineFleet:
        started.clear()
        config = settings(line, tmp_path, text)
        policy: Any = [None] * sum(group.num_engines for group in config.engine_groups)
        auxiliary: Any = [None] * sum(group.num_engines for group in config.auxiliary_groups)
        site = Site(MODEL, tmp_path, on_gpus=on_gpus, placements=policy, auxiliary_placements=auxiliary)
        made = EngineFleet(config, site, Supervision(wait=lambda calls, **_: list(calls), monitors=[]))
        made.start()
        return made

    return make


def settings(line: str, folder: Path, text: str = "") -> RunConfig:
    (folder / "run.toml").write_text(text)
    words = ["--advantage-estimator", "toy", *shlex.split(line), "--config", str(folder / "run.toml")]
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


def test_groups_have_their_own_size_and_their_flags_come_last(started: Any, start: Start) -> None:
    start(text=TWO_GROUPS)
    first, second = (started[name].settings for name in ("engine 0", "engine 1"))
    assert (first.tensor_parallel, second.tensor_parallel) == (1, 2)
    assert first.extra == ("--chunked-prefill-size=64",)
    assert second.extra == ("--chunked-prefill-size=64", "--chunked-prefill-size=512")
    assert (first.seed, second.seed) == (1234, 1235)


@pytest.mark.parametrize(
    ("line", "limit_s"),
    [("", 300.0), ("--sglang-watchdog-timeout 20", 20.0)],
)
def test_an_engine_hangs_after_the_time_that_sglang_gives_a_forward_pass(
    started: Any, start: Start, line: str, limit_s: float
) -> None:
    start(line)
    health = started["engine 0"].settings.health
    assert health.probes * health.timeout_s == limit_s


@pytest.mark.parametrize(("line", "limit_s"), [("", 600.0), ("--engine-start-timeout-s 50", 50.0)])
def test_the_first_response_of_a_gpu_engine_may_take_as_long_as_its_start(
    started: Any, start: Start, monkeypatch: pytest.MonkeyPatch, line: str, limit_s: float
) -> None:
    monkeypatch.setattr(fleet, "start_limit_s", lambda requested, _: requested or 600.0)
    for on_gpus, first_answer_s in ((True, limit_s), (False, 0.0)):
        made = start(line, on_gpus=on_gpus)
        engine = started["engine 0"].settings
        assert engine.start_timeout_s == limit_s
        assert (engine.health.first_answer_s, made.first_answer_s()) == (first_answer_s, first_answer_s)


@pytest.mark.parametrize(
    ("line", "largest"),
    [
        ("", 512),
        ("--sglang-server-concurrency 400", 400),
        ("--sglang-server-concurrency 4000", 512),
        ("--sglang-max-running-requests 300", 300),
        ("--sglang-cuda-graph-max-bs-decode 320", 320),
        # SGLang's own choice stays, or that of the user.
        ("--sglang-server-concurrency 64", None),
        ("--gpu-memory-gib 24", None),
        ("--sglang-dp-size 2", None),
        ("--sglang-speculative-algorithm NGRAM", None),
        ("--sglang-cuda-graph-bs-decode 1 2 4", None),
    ],
)
def test_decode_graphs_are_as_large_as_the_batches(started: Any, start: Start, line: str, largest: int | None) -> None:
    start(line, on_gpus=True)
    graphs = [word for word in started["engine 0"].settings.extra if "cuda-graph-max-bs" in word]
    assert graphs == ([] if largest is None else [f"--cuda-graph-max-bs-decode={largest}"])


def test_models_have_their_own_weights_and_only_engines_of_the_policy_get_new_ones(started: Any, start: Start) -> None:
    made = start(text=TWO_GROUPS, on_gpus=True)
    assert sorted(started) == ["engine 0", "engine 1", "judge 0", "router", "router-score", "score 0", "score 1"]
    assert (started["judge 0"].settings.model, started["score 1"].settings.model) == (Path("/judge"), Path("/score"))
    assert started["judge 0"].settings.extra == ("--chunked-prefill-size=64",)
    assert started["score 0"].settings.extra[-1] == "--is-embedding"
    dtypes = [started[name].settings.dtype for name in ("engine 0", "judge 0", "score 0", "score 1")]
    assert dtypes == ["float32", "float32", "auto", "auto"]
    assert made.model_urls() == {"judge": "http://judge-0", "score": started["router-score"].url}
    assert workers_of(started["router-score"]) == [{"url": "http://score-0"}, {"url": "http://score-1"}]
    assert made.policy.url() == started["router"].url
    assert (made.policy.urls(), made.policy.ranks) == (["http://engine-0", "http://engine-1"], (1, 2))
    made.policy.register()
    made.policy.register()
    assert workers_of(started["router"]) == [{"url": "http://engine-0"}, {"url": "http://engine-1"}]
    assert made.direct_urls() == ()


def test_prefill_engines_are_registered_with_their_ports(started: Any, start: Start) -> None:
    start("--prefill-num-servers 1 --rollout-num-gpus 2", on_gpus=True).policy.register()
    prefill, decode = Worker("http://engine-0", "prefill", 8998), Worker("http://engine-1", "decode")
    assert workers_of(started["router"]) == [prefill.entry, decode.entry]
    assert started["router"].settings.splits_prefill
    arguments = SGLangServer(started["engine 0"].settings).command(1, 8998)
    assert {"--disaggregation-mode=prefill", "--disaggregation-bootstrap-port=8998"} < set(arguments)
    assert "--disaggregation-mode=decode" in started["engine 1"].settings.arguments()


@pytest.mark.parametrize(
    ("line", "is_direct"),
    [
        ("", True),
        ("--rollout-num-gpus 2 --no-use-fault-tolerance", True),
        ("--rollout-num-gpus 2", False),  # they are restarted
        ("--sglang-router-policy round_robin", False),
        ("--sglang-speculative-algorithm NGRAM", False),
        ("--sglang-sampling-mask-max-tokens 8", False),
        ("--rollout-num-gpus 2 --prefill-num-servers 1 --no-use-fault-tolerance", False),
    ],
)
def test_engines_report_masks_where_requests_can_bypass_the_router(
    started: Any, start: Start, tmp_path: Path, line: str, is_direct: bool
) -> None:
    assert masks_up_to(settings(line, tmp_path)) == 0
    line += " --rollout-top-p 0.9"
    made = start(line, on_gpus=True)
    assert made.direct_urls() == (tuple(made.policy.urls()) if is_direct else ())
    assert ("--sampling-mask-max-tokens=1024" in started["engine 0"].settings.extra) is is_direct
    assert masks_up_to(settings(line, tmp_path)) == (256 if is_direct else 0)


def test_settings_of_the_run_reach_the_engines(started: Any, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    made = start("--use-rollout-routing-replay --rollout-num-gpus 2 --sglang-router-policy consistent_hashing")
    assert started["engine 0"].settings.extra == ("--enable-return-routed-experts",)
    assert made.direct_urls() == ("http://engine-0", "http://engine-1")
    assert started["router"].settings.policy == "consistent_hashing"
    start("--bf16 --fp32-lm-head")
    assert started["engine 0"].settings.extra == ("--enable-fp32-lm-head",)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    start("--colocate", on_gpus=True)
    environment = started["engine 0"].settings.environment()
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_an_external_router_is_used_and_not_started(started: Any, start: Start) -> None:
    with FakeRouter("http://older") as router:
        made = start(f"--sglang-router-ip 127.0.0.1 --sglang-router-port {router.url.rpartition(':')[2]}")
        assert made.policy.url() == router.url
        made.policy.register()
        assert list(started) == ["engine 0"]
        assert router.workers == [{"url": "http://older"}, {"url": "http://engine-0"}]
        made.stop()
        assert router.workers == [{"url": "http://older"}]
    made.stop()


def test_external_engines_are_used_and_not_stopped(started: Any, start: Start) -> None:
    with FakeEngine() as engine:
        engine.info = {"model_path": str(MODEL), "dtype": "float32", "tp_size": 1}
        made = start(f"--rollout-external-engine-addrs {engine.url.removeprefix('http://')}")
        policy = made.policy
        assert (made.serves_policy, list(policy.engines), policy.urls(), policy.ranks) == (True, [], [engine.url], (1,))
        policy.url()
        policy.register()
        assert workers_of(started["router"]) == [{"url": engine.url}]
        made.stop()
        assert started["router"].called[-1] == ("stop", ())
        assert (started["watch"].settings, started["watch"].called) == ([engine.url], [("watch", ())])
    assert sorted(started) == ["router", "watch"]


def test_engines_for_evaluation_serve_the_policy_without_its_router(started: Any, start: Start, tmp_path: Path) -> None:
    made = start("--eval-num-gpus 2 --rollout-num-gpus 1")
    assert sorted(started) == ["engine 0", "eval engine 0", "eval engine 1", "router", "router-eval"]
    assert started["eval engine 1"].settings.model == MODEL
    assert started["eval engine 1"].settings.log_file == tmp_path / "eval-engine-1.log"
    made.policy.register()
    assert (made.policy.url(), made.policy.urls()) == (started["router"].url, ["http://engine-0"])
    assert workers_of(started["router"]) == [{"url": "http://engine-0"}]
    assert made.evaluating.ready_url() == started["router-eval"].url
    urls = ["http://eval-engine-0", "http://eval-engine-1"]
    assert workers_of(started["router-eval"]) == [{"url": url} for url in urls]
    assert (made.evaluating.urls(), made.evaluating.ranks, made.model_urls()) == (urls, (1, 1), {})
    assert [call[0] for call in started["eval engine 0"].called].count("watch") == 1
    made.stop()
    assert started["eval engine 0"].called[-1] == ("stop", ())
    made = start("--eval-num-gpus 2 --eval-num-gpus-per-engine 2", text=TWO_GROUPS)
    assert (made.evaluating.ready_url(), made.evaluating.ranks) == ("http://eval-engine-0", (2,))


def test_what_a_run_does_not_have_has_no_address(started: Any, start: Start) -> None:
    none = start().evaluating
    assert (none.ready_url(), none.urls(), list(none.engines), none.ranks) == ("", [], [], ())
    reads = start("--debug-train-only")
    assert (reads.serves_policy, reads.policy.url(), reads.model_urls(), reads.policy.starts) == (False, "", {}, [])
    assert started == {}


def test_every_server_is_waited_for_at_the_end_though_an_actor_is_dead(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = start("--rollout-num-gpus 2")
    waited: list[int] = []

    def lost(calls: list[Any], **_: Any) -> None:
        waited.append(len(calls))
        raise RemoteError("engine 0 died.")

    monkeypatch.setattr(fleet, "wait_for", lost)
    made.stop()
    assert waited == [1, 1, 1]


def test_nothing_is_started_where_no_engine_serves_an_evaluation(started: Any, start: Start) -> None:
    with FakeEngine() as engine:
        url = engine.url
    with pytest.raises(ConfigError, match=f"aime: model = {url}: ConnectionRefusedError"):
        start(f"--eval-datasets \"name = 'aime', path = 'aime.jsonl', model = '{url}'\"")
    assert started == {}
