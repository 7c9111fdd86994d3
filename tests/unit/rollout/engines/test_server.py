"""A server in a child process: ready when it answers itself, named when it fails, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

from slime_core.errors import EngineError
from slime_core.rollout.engines import actors
from slime_core.rollout.engines import server as module
from slime_core.rollout.engines.server import HealthCheck, Server, free_ports
from slime_core.weights.engine_control import call
from slime_testing.fake_engine import FakeEngine
from tests.processes import children, left_of

ANSWER = """
from http.server import BaseHTTPRequestHandler, HTTPServer
import sys
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


class Program(Server):
    """Runs a command, which need not listen; ``PORT`` stands for the port."""

    probe = "/ready"

    def __init__(self, folder: Path, *words: str, start_timeout_s: float = 60.0) -> None:
        log, environment = folder / "logs" / "engine.log", dict(os.environ)
        super().__init__("engine 0", host="127.0.0.1", env=environment, log_file=log, start_timeout_s=start_timeout_s)
        self.words = words

    def command(self, port: int, second: int) -> list[str]:
        assert port != second
        return [str(port) if word == "PORT" else word for word in self.words]


def toy(folder: Path, script: str, *words: str, start_timeout_s: float = 60.0) -> Program:
    """Return a server that runs a Python script, which gets the port."""
    return Program(folder, sys.executable, "-S", "-c", script, "PORT", *words, start_timeout_s=start_timeout_s)


def process_of(server: Server) -> int:
    (pid,) = [int(child.pid) for child in psutil.Process().children() if str(server._port) in child.cmdline()]
    return pid


class Stranger(BaseHTTPRequestHandler):
    """Answers 200 to everything, as an engine of another run would."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """No test reads it."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port that seems free, and on which a stranger answers; the next ones are free."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        Thread(target=stranger.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        first = [[stranger.server_port, *free_ports(1)]]
        monkeypatch.setattr(
            module, "free_ports", lambda count, **host: first.pop() if first else free_ports(count, **host)
        )
        yield stranger.server_port
        stranger.shutdown()


def test_a_server_is_ready_when_it_answers_and_gone_when_it_is_stopped(tmp_path: Path) -> None:
    with toy(tmp_path, ANSWER) as server:
        server.wait_ready()
        server.check_alive()
    with pytest.raises(EngineError, match=r"engine 0 .*signal 15 \(SIGTERM\)"):
        server.check_alive()


def test_a_server_that_a_signal_stops_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "LOOK_S", 0.05)
    monkeypatch.setattr(actors, "SUSPENDED_LIMIT_S", 0.2)
    with toy(tmp_path, ANSWER) as server:
        server.wait_ready()
        pid = process_of(server)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match=rf"engine 0 at {server.url} .* kill -CONT {pid} "):
            actors.ServerActor(server).watch()
        os.kill(pid, signal.SIGCONT)


HANG = """
import socket, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/server_info":
            time.sleep(float(sys.argv[2]))
        self.send_response({"/server_info": 200, "/ready": int(sys.argv[3])}.get(self.path, 404))
        self.end_headers()
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
"""An engine whose scheduler answers after the second argument, in seconds; the third says whether it is paused."""


def engine(folder: Path, *, scheduler_s: float, ready: int) -> Program:
    server = toy(folder, HANG, str(scheduler_s), str(ready))
    server.probe, server.health = "/server_info", HealthCheck(interval_s=0.05, timeout_s=0.25, probes=2)
    return server


def test_an_engine_whose_scheduler_hangs_ends_the_run_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "LOOK_S", 0.05)
    with engine(tmp_path, scheduler_s=60, ready=200) as server:
        while not module._answers_with(200, server.url, "/ready"):
            server.check_alive()
        pid = process_of(server)
        with pytest.raises(EngineError, match=rf"engine 0 at {server.url} .* 0\.5 s.*\n?.* N in {pid}\."):
            actors.ServerActor(server).watch()


@pytest.mark.parametrize(
    ("answers_at", "probes"), [(None, 5), (0, 3), (1, 4)], ids=["never", "before", "after the first probe"]
)
def test_an_engine_that_has_answered_nothing_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers_at: int | None, probes: int
) -> None:
    """Four unanswered probes are one too many for an engine that has answered, and too few for one that compiles."""
    server, asked = toy(tmp_path, ""), 0

    def is_hung(url: str, *, limit_s: float) -> bool:
        nonlocal asked
        asked += 1
        return asked != 1 or answers_at is None or answers_at == 0

    monkeypatch.setattr(module, "is_hung", is_hung)
    monkeypatch.setattr(module.FirstAnswer, "look", lambda _: answers_at is not None and asked >= answers_at)
    monkeypatch.setattr(server, "wait_end", lambda _: False)
    monkeypatch.setattr(server, "is_alive", lambda: True)
    server.health = HealthCheck(timeout_s=15, probes=3, first_answer_s=75)
    assert server.wait_hang()
    assert asked == probes
    assert f" {15 * (5 if answers_at is None else 3)} s" in str(server.hang())


def test_an_engine_has_answered_when_it_has_fewer_sequences_than_before() -> None:
    with FakeEngine() as engine:
        first = module.FirstAnswer(engine.url)
        assert not first.look()
        call(engine.url, "/generate", {"input_ids": [3], "sampling_params": {"max_new_tokens": 4}}, timeout_s=60)
        assert first.look()
    assert first.look()
    assert not module.FirstAnswer(engine.url).look()  # it is gone


@pytest.mark.parametrize(("scheduler_s", "ready"), [(0.2, 200), (60, 503)], ids=["busy", "paused"])
def test_an_engine_that_is_busy_or_paused_does_not_hang(tmp_path: Path, scheduler_s: float, ready: int) -> None:
    with engine(tmp_path, scheduler_s=scheduler_s, ready=ready) as server:
        while not module._answers_with(ready, server.url, "/ready"):
            server.check_alive()
        assert not module.is_hung(server.url, limit_s=0.5 if ready == 503 else 20.0)


def test_a_server_that_does_not_answer_in_time_is_an_error_with_its_address(tmp_path: Path) -> None:
    with (
        toy(tmp_path, "import time; time.sleep(60)", start_timeout_s=0.2) as server,
        pytest.raises(EngineError, match=rf"http://127\.0\.0\.1:\d+/ready .* 0\.2 s\.\n.* {server.log_file}\."),
    ):
        server.wait_ready()


def test_a_stranger_on_its_port_is_not_taken_for_it(taken: int, tmp_path: Path) -> None:
    with toy(tmp_path, ANSWER) as server:
        server.wait_ready()
        assert server.url != f"http://127.0.0.1:{taken}"
        server.check_alive()


def shell(tmp_path: Path, script: str) -> Program:
    server = Program(tmp_path, "/bin/sh", "-c", script)
    server.start()
    return server


def first_line(server: Program) -> str:
    """What it prints first, once it has."""
    while not server.last_lines():
        time.sleep(0.02)
    return server.last_lines()[0]


def test_a_death_is_reported_with_the_last_lines(tmp_path: Path) -> None:
    server = shell(tmp_path, "seq 1 30; echo out of memory >&2; exit 3")
    assert server.wait_end(120)
    with pytest.raises(EngineError, match=r"^engine 0 .* code 3") as death:
        server.check_alive()
    _, where, *last = str(death.value).splitlines()
    assert str(server.log_file) in where
    assert last == [*(f"  {number}" for number in range(12, 31)), "  out of memory"]


def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="/no/such/program"):
        Program(tmp_path, "/no/such/program").start()


def test_stopping_ends_children_that_ignore_it_and_twice_is_fine(tmp_path: Path) -> None:
    server = shell(tmp_path, "trap '' TERM; sleep 600 & echo $!; wait; sleep 600")
    child = int(first_line(server))
    server.stop()
    server.stop()
    assert left_of(child) == []


def test_a_stop_that_crosses_a_start_leaves_nothing(tmp_path: Path) -> None:
    for number in range(20):
        mark = f"60.{os.getpid()}{number}"
        server = Program(tmp_path, "sleep", mark)
        starter = threading.Thread(target=_start_anyway, args=(server,))
        starter.start()
        time.sleep(number * 0.0005)
        server.stop()
        starter.join()
        assert children(mark) == []


def _start_anyway(server: Program) -> None:
    with suppress(EngineError):
        server.start()


PARENT = """
import os, sys, threading, time
from pathlib import Path
from slime_core.rollout.engines.server import Server
class Sleep(Server):
    def command(self, port, second):
        return ["sleep", "600"]
server = Sleep("s", host="127.0.0.1", env=dict(os.environ), log_file=Path(sys.argv[1]), start_timeout_s=60)
starter = threading.Thread(target=server.start)
starter.start()
starter.join()
time.sleep(0.3)
print(server._process.pid, server.is_alive(), flush=True)
time.sleep(600)
"""


def test_a_killed_parent_takes_its_server_along_but_a_finished_thread_does_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, alive = parent.stdout.readline().split()
        assert alive == "True"
        parent.send_signal(signal.SIGKILL)
        assert left_of(int(pid)) == []
