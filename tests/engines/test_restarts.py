"""Servers of a run that fail and are started again: real actors and processes, a toy in the place of SGLang."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from slime_core.errors import EngineError, NodeDied, WeightSyncError
from slime_core.rollout.engines.actors import RestartableServer, Restarts, ServerActor
from slime_core.rollout.engines.server import Server
from slime_core.runtime.actors import Actor, Call, Launch, Watched, start_actor
from slime_core.runtime.waiting import has_ended, wait
from tests.processes import words

ANSWER = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


class ToyActor(ServerActor):
    """Runs a server that answers 200."""

    def __init__(self, log: Path) -> None:
        class Toy(Server):
            probe = "/"

            def command(self, port: int, second: int) -> list[str]:
                return [sys.executable, "-S", "-c", ANSWER, str(port)]

        super().__init__(Toy("engine 3", host="127.0.0.1", env=dict(os.environ), log_file=log, start_timeout_s=60.0))


class Idle(Watched):
    """Works on until a file is there."""

    def wait_for_file(self, path: str) -> str:
        while not Path(path).exists():
            time.sleep(0.05)
        return "done"

    def fail(self) -> None:
        raise WeightSyncError("an engine does not answer")


class Run:
    """A driver's view: one toy server, its restarts, and what happened to it."""

    def __init__(self, folder: Path, *, limit: int = 1, needs_weights: bool = False) -> None:
        self.events: list[str] = []
        self.warnings: list[str] = []
        self.on_join: Callable[[], None] = lambda: None
        self.log = folder / "log"
        self.restarts = Restarts(limit, warn=self.warnings.append)
        leave = partial(self.events.append, "leave")
        self.server = RestartableServer(
            "engine 3", self.launch, leave=leave, join=self.join, needs_weights=needs_weights
        )
        (self.server.url,) = wait([self.server.start()], what="the toy")
        self.restarts.watch(self.server)

    def launch(self) -> Actor[ServerActor]:
        self.events.append("launch")
        return start_actor(Launch("engine 3"), ToyActor, self.log)

    def join(self) -> None:
        self.events.append("join")
        self.on_join()

    def process(self) -> psutil.Process:
        """The server itself."""
        port = self.server.url.rpartition(":")[2]
        (process,) = (process for process in psutil.process_iter() if {ANSWER, port} <= set(words(process)))
        return process


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(ray_session: Any, tmp_path: Path) -> Iterator[MakeRun]:
    runs: list[Run] = []

    def make(**options: Any) -> Run:
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield make
    for run in runs:
        ray.kill(run.server.actor.handle)


@pytest.fixture
def worker(ray_session: Any) -> Any:
    actor = start_actor(Launch("worker"), Idle)
    yield actor
    ray.kill(actor.handle)


def wait_idle(call: Call[Any], run: Run) -> list[Any]:
    """As the run waits while the learner is idle."""
    serve = partial(run.restarts.serve, lambda: run.events.append("publish"))
    return wait([call], what="work", recovery=run.restarts, check=serve, fail_after_s=120)


@pytest.mark.parametrize("needs_weights", [False, True])
def test_a_server_that_dies_comes_back_at_its_address_while_the_run_waits(
    worker: Any, make_run: MakeRun, tmp_path: Path, needs_weights: bool
) -> None:
    """An engine of the policy gets weights before requests."""
    run, signal_file = make_run(needs_weights=needs_weights), tmp_path / "go"
    run.on_join = signal_file.touch
    run.process().kill()
    call = worker.start(Idle.wait_for_file, str(signal_file))
    assert wait_idle(call, run) == ["done"]
    assert run.events == ["launch", "leave", "launch", *["publish"] * needs_weights, "join"]
    assert run.process().is_running()
    assert re.search(r"engine 3 .*restart 1 of 1 .*engine 3 .*signal 9", run.warnings[0])
    assert run.restarts.take_counts() == {"rollout/restarts/engine_3": 1.0}
    assert run.restarts.take_counts() == {}


def test_a_server_and_its_client_that_have_both_failed_before_the_run_looks(worker: Any, make_run: MakeRun) -> None:
    run = make_run(needs_weights=True)
    run.process().kill()
    call = worker.start(Idle.fail)
    while not all(map(has_ended, [call, *run.restarts.monitors()])):
        time.sleep(0.05)
    with pytest.raises(WeightSyncError, match="does not answer"):
        wait([call], what="work", recovery=run.restarts, fail_after_s=120)
    assert run.events == ["launch", "leave"]
    assert run.restarts.settle()


def test_a_server_whose_node_is_gone_is_not_replaced(make_run: MakeRun) -> None:
    run = make_run()
    (call,) = run.restarts.monitors()
    assert not run.restarts.accept(call, NodeDied("its node is gone"))
    assert run.events == ["launch"]


@pytest.mark.parametrize("dies", ["server", "actor"])
def test_a_publication_waits_for_an_engine_that_fails_meanwhile(make_run: MakeRun, dies: str) -> None:
    run = make_run(needs_weights=True)
    assert not run.restarts.settle()
    if dies == "server":
        run.process().kill()
    else:
        ray.kill(run.server.actor.handle)
    assert run.restarts.settle(within_s=60)
    assert run.events == ["launch", "leave", "launch"]
    assert run.process().is_running()
    run.restarts.served()
    assert run.events[-1] == "join"
    assert not run.restarts.settle()


def test_a_server_that_fails_too_often_ends_the_run(worker: Any, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    run.on_join = lambda: run.process().kill()
    run.process().kill()
    call = worker.start(Idle.wait_for_file, str(tmp_path / "never"))
    with pytest.raises(EngineError, match=r"engine 3 .* 1 restarts (.|\n)*signal 9"):
        wait_idle(call, run)
