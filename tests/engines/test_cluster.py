"""slime_core.runtime on real Ray: actors that hang, die and raise, and the clean-up at the end of a session."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import ray
from ray import cloudpickle

from slime_core.errors import (
    ConfigError,
    EngineError,
    PlacementError,
    ProcessDied,
    RemoteError,
    SlimeError,
    WaitTimeout,
)
from slime_core.runtime import waiting
from slime_core.runtime.actors import Actor, ActorGroup, Call, Launch, Watched, start_actor
from slime_core.runtime.layout import Layout
from slime_core.runtime.placement import Placement, place
from slime_core.runtime.session import Session
from slime_core.runtime.waiting import Terminated, Termination, has_ended, wait
from tests.processes import words

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors' processes cannot import test files


class Worker(Watched):
    def __init__(self, number: int = 0) -> None:
        if number < 0:
            raise ConfigError(f"number is {number}")
        self.number = number

    def answer(self) -> int:
        time.sleep(0.3 * (2 - self.number))
        return self.number

    def add(self, other: int) -> int:
        return self.number + other

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "rested"

    def wait_for_file(self, path: str) -> str:
        while not os.path.exists(path):
            time.sleep(0.02)
        return "rested"

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def refuse(self) -> None:
        raise EngineError("engine 3: 503")

    def stumble(self) -> None:
        raise KeyError("no such column")

    def vanish(self) -> None:
        os._exit(7)

    def wait_for(self, actor: Actor[Worker]) -> list[object]:
        return wait([actor.start(Worker.refuse)], what="the other actor")


@pytest.fixture(scope="module")
def workers(ray_session: Session) -> Iterator[ActorGroup[Worker]]:
    group = ActorGroup(tuple(start_actor(Launch(f"rank {rank}"), Worker, rank) for rank in range(3)))
    yield group
    for actor in group:
        ray.kill(actor.handle)


@pytest.fixture(scope="module")
def worker(ray_session: Session) -> Iterator[Actor[Worker]]:
    """For calls after which it is as before."""
    actor = start_actor(Launch("loner"), Worker)
    yield actor
    ray.kill(actor.handle)


@pytest.fixture
def victim(ray_session: Session) -> Iterator[Actor[Worker]]:
    """For the call that is its last."""
    actor = start_actor(Launch("victim"), Worker)
    yield actor
    ray.kill(actor.handle)


@pytest.fixture
def signal_file(tmp_path: Path) -> Iterator[Path]:
    """Calls of ``wait_for_file`` return once it is there; at the latest, at the end of the test."""
    yield tmp_path / "go on"
    (tmp_path / "go on").touch()


def stacks_with(words: str, actor: Actor[Watched]) -> str:
    """The stacks of an actor once they hold ``words``: what was started has not come anywhere yet."""
    text, deadline_s = "", time.monotonic() + 600
    while words not in text and time.monotonic() < deadline_s:
        (text,) = wait([actor.start(Watched.stacks)], what="stacks")
    return text


def test_a_group_answers_in_rank_order_whichever_rank_finishes_first(workers: ActorGroup[Worker]) -> None:
    assert wait(workers.start(Worker.answer), what="answers") == [0, 1, 2]
    assert wait(workers.start_each(Worker.add, [10, 20, 30]), what="sums") == [10, 21, 32]
    with pytest.raises(ValueError, match="shorter"):
        workers.start_each(Worker.add, [10, 20])
    assert wait([], what="nothing") == []


def test_errors_of_an_actor_keep_their_class_or_their_traceback(
    workers: ActorGroup[Worker], worker: Actor[Worker]
) -> None:
    for call in (worker.start(Worker.refuse), worker.start(Worker.wait_for, workers[0])):
        with pytest.raises(EngineError) as refused:
            wait([call], what="a refusal")
        assert (type(refused.value), str(refused.value)) == (EngineError, "engine 3: 503")
    with pytest.raises(RemoteError) as caught:
        wait([worker.start(Worker.stumble)], what="a column")
    assert re.match(r"loner: stumble\(\) .*KeyError: 'no such column'\n", str(caught.value))
    assert 'raise KeyError("no such column")' in str(caught.value)


@pytest.mark.parametrize(
    ("number", "error", "named"),
    [(-1, ConfigError, r"^number is -1$"), ("three", RemoteError, r"(?s)^misfit: answer\(\) died\..*TypeError")],
)
def test_a_constructor_that_fails_ends_the_first_call(
    ray_session: Session, number: Any, error: type[SlimeError], named: str
) -> None:
    actor = start_actor(Launch("misfit"), Worker, number)
    with pytest.raises(error, match=named):
        wait([actor.start(Worker.answer)], what="a misfit")


def test_a_wait_that_outlives_its_limit_says_who_and_where(
    victim: Actor[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "STACKS_LIMIT_S", 60.0)
    napping = victim.start(Worker.nap, 600)
    stacks_with("in nap", victim)
    with pytest.raises(WaitTimeout) as caught:
        wait([napping], what="the longest nap", warn_after_s=9, fail_after_s=0.2)
    assert re.match(r".* the longest nap .*\d+ s; 0 .*: victim\n  victim: nap\(\)\n", str(caught.value))
    assert "in nap" in str(caught.value)
    assert str(caught.value).endswith(" 0.2 s.")


def test_a_silent_actor_does_not_silence_the_report(ray_session: Session) -> None:
    class Slow(Watched):
        def __init__(self) -> None:
            time.sleep(60)

    actor = start_actor(Launch("slow starter"), Slow)
    with pytest.raises(WaitTimeout, match=r"slow starter: (.|\n)*constructor"):
        wait([actor.start(Slow.ping)], what="a slow start", fail_after_s=0.2)
    ray.kill(actor.handle)


def test_a_death_a_background_call_and_a_check_that_fail_end_the_wait_while_others_work(
    workers: ActorGroup[Worker], worker: Actor[Worker], victim: Actor[Worker], signal_file: Path
) -> None:
    def check() -> None:
        raise ProcessDied("the raylet")

    working = workers[2].start(Worker.wait_for_file, str(signal_file))
    with pytest.raises(ProcessDied, match=r"^victim: vanish\(\) died\."):
        wait([working, victim.start(Worker.vanish)], what="a death")
    with pytest.raises(EngineError, match="engine 3"):
        wait([working], what="a file", also=[worker.start(Worker.refuse)])
    with pytest.raises(ProcessDied, match="the raylet"):
        wait([working], what="a file", check=check)
    assert not has_ended(working)


def test_a_death_is_reported_rather_than_the_error_that_it_caused(
    workers: ActorGroup[Worker], worker: Actor[Worker], victim: Actor[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "CAUSE_LIMIT_S", 60.0)
    workers[0].start(Worker.nap, 0.5)
    dying, over = workers[0].start(Worker.refuse), workers[1].start(Worker.add, 1)
    with pytest.raises(EngineError, match="engine 3"):
        wait([worker.start(Worker.stumble)], what="an answer", also=[over, dying])
    ranks = [worker.start(Worker.stumble), workers[0].start(Worker.refuse), victim.start(Worker.vanish)]
    with pytest.raises(ProcessDied, match=r"^victim: vanish\(\) died\."):
        wait(ranks, what="all ranks")


def test_a_failure_without_a_cause_in_the_background_is_reported_itself(
    workers: ActorGroup[Worker], worker: Actor[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "CAUSE_LIMIT_S", 0.1)
    alive, over = workers[0].start(Worker.nap, 1), workers[1].start(Worker.add, 1)
    with pytest.raises(RemoteError, match="stumble"):
        wait([worker.start(Worker.stumble)], what="an answer", also=[over, alive])
    assert wait([alive], what="a nap", also=[worker.start(Worker.add, 1)]) == ["rested"]  # one that returns: no result


def test_an_actor_has_the_priority_of_the_driver(worker: Actor[Worker]) -> None:
    pid = wait([worker.start(Worker.ping)], what="a ping")[0]
    assert psutil.Process(pid).nice() == psutil.Process().nice()


def test_ping_answers_while_the_actor_is_busy(worker: Actor[Worker], signal_file: Path) -> None:
    busy = worker.start(Worker.wait_for_file, str(signal_file))
    stacks_with("in wait_for_file", worker)
    assert wait([worker.start(Worker.ping)], what="a ping")[0] != os.getpid()
    assert not has_ended(busy)
    signal_file.touch()
    assert wait([busy], what="the file") == ["rested"]


@pytest.fixture
def placed(ray_session: Session) -> Iterator[Placement]:
    with place(Layout(learner_ranks=1, engines=(1,))) as placement:
        yield placement


def test_two_processes_on_two_cores_take_a_core_each(placed: Placement) -> None:
    assert (len(placed.learner), len(placed.engines)) == (1, 1)
    assert placed.plan.bundle == {"CPU": 1.0}
    assert {placed.learner[0].bundle.index, placed.engines[0].bundle.index} == {0, 1}
    assert placed.learner[0].env == {}
    actor = start_actor(Launch("engine 0", placed.engines[0], {"OMP_NUM_THREADS": "1"}), Worker, 4)
    assert wait([actor.start(Worker.variable, "OMP_NUM_THREADS")], what="its environment") == ["1"]
    ray.kill(actor.handle)


def test_more_processes_than_cores_share_them(ray_session: Session) -> None:
    with place(Layout(learner_ranks=4, engines=(1,))) as placement:
        assert placement.plan.bundle == {"CPU": 0.4}
        actors = [
            start_actor(Launch(f"rank {r}", placement), Worker, 2) for r, placement in enumerate(placement.learner)
        ]
        assert wait([actor.start(Worker.add, 0) for actor in actors], what="four ranks") == [2, 2, 2, 2]


def test_devices_that_others_hold_are_an_error_after_the_limit(placed: Placement) -> None:
    while ray.available_resources().get("CPU", 0):  # Ray's count comes some time after what it counts
        time.sleep(0.02)
    with pytest.raises(PlacementError, match=r"has 0 CPU and 0 GPU free, .* within 0\.5 s\. `ray status` and "):
        place(Layout(learner_ranks=1, engines=()), timeout_s=0.5)


def test_devices_that_others_release_in_time_are_taken(ray_session: Session) -> None:
    held = place(Layout(learner_ranks=2, engines=()))
    timer = threading.Timer(1, held.release)
    timer.start()
    with place(Layout(learner_ranks=1, engines=(1,))) as placed:
        assert len(placed.learner) == len(placed.engines) == 1
    timer.join()


def test_gpus_that_the_cluster_has_not_are_refused_at_once(ray_session: Session) -> None:
    with pytest.raises(PlacementError, match=r" 0, 2 too few"):
        place(Layout(learner_ranks=1, engines=(1,), device="gpu"))


def test_actors_and_calls_travel_between_processes(worker: Actor[Worker]) -> None:
    assert pickle.loads(pickle.dumps(worker)).label == "loner"
    assert str(Call(worker.start(Worker.add, 1).ref, "loner", "add")) == "loner: add()"


def test_a_sigterm_inside_a_wait_of_ray_is_the_one_that_saves(worker: Actor[Worker], signal_file: Path) -> None:
    busy = worker.start(Worker.wait_for_file, str(signal_file))
    # Ray looks for signals at the end of a look that found nothing, so the signal comes in the middle of one.
    timer = threading.Timer(1.25 * waiting.SLICE_S, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(Terminated), Termination() as stop, stop.allowed():
        wait([busy], what="a file")
    signal_file.touch()


def listens_on(process: psutil.Process) -> list[str]:
    """The addresses of a process of Ray's; none of one that has ended."""
    try:
        is_rays = any("ray" in word for word in words(process))
        entries = process.net_connections("inet") if is_rays else []
    except psutil.NoSuchProcess:
        return []
    return [entry.laddr.ip.removeprefix("::ffff:") for entry in entries if entry.status == "LISTEN"]


def test_the_runs_own_cluster_listens_on_loopback_only(ray_session: Session, worker: Actor[Worker]) -> None:
    wait([worker.start(Worker.ping)], what="a listening actor")
    started = psutil.Process().children(recursive=True)
    addresses = [address for process in started for address in listens_on(process)]
    assert len(addresses) > 5
    assert set(addresses) == {"127.0.0.1"}


def test_the_runs_own_cluster_requires_its_token(ray_session: Session) -> None:
    address = ray.get_runtime_context().gcs_address
    script = f"from ray._raylet import GcsClient; GcsClient(address={address!r}).internal_kv_keys(b'', None, timeout=9)"
    mode, token = os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]
    assert (mode, len(token)) == ("token", 64)
    for presented, refused in ((token, ""), ("0" * 64, "Authentication token is missing or incorrect")):
        environment = os.environ | {"RAY_AUTH_TOKEN": presented}
        client = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert bool(client.returncode) == bool(refused), client.stderr
        assert refused in client.stderr
