"""slime_core.runtime on real Ray: actors that hang, die and raise, and the clean-up at the end of a session."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import ray
from ray import cloudpickle

from slime_core.errors import ConfigError, EngineError, PlacementError, ProcessDied, RemoteError, WaitTimeout
from slime_core.runtime import waiting
from slime_core.runtime.actors import Actor, ActorGroup, Call, Launch, Watched, show_tasks, start_actor
from slime_core.runtime.layout import Layout
from slime_core.runtime.placement import Placement, place
from slime_core.runtime.session import Session
from slime_core.runtime.waiting import Terminated, Termination, has_ended, stacks_on_request, wait
from tests.processes import children, left_of, words

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


class AsyncWorker(Watched):
    async def linger(self) -> None:
        show_tasks()
        await self.inner()

    async def inner(self) -> None:
        await asyncio.sleep(3600)


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


def test_results_come_in_rank_order_whichever_rank_finishes_first(workers: ActorGroup[Worker]) -> None:
    assert wait(workers.start(Worker.answer), what="answers") == [0, 1, 2]


def test_each_actor_gets_its_own_argument(workers: ActorGroup[Worker]) -> None:
    assert wait(workers.start_each(Worker.add, [10, 20, 30]), what="sums") == [10, 21, 32]


def test_arguments_that_do_not_match_the_group_are_refused(workers: ActorGroup[Worker]) -> None:
    with pytest.raises(ValueError, match="shorter"):
        workers.start_each(Worker.add, [10, 20])


def test_a_slime_error_of_an_actor_keeps_its_class_and_message(worker: Actor[Worker]) -> None:
    with pytest.raises(EngineError) as caught:
        wait([worker.start(Worker.refuse)], what="a refusal")
    assert type(caught.value) is EngineError
    assert str(caught.value) == "engine 3: 503"


def test_a_slime_error_passes_through_two_actors(workers: ActorGroup[Worker], worker: Actor[Worker]) -> None:
    with pytest.raises(EngineError, match=r"^engine 3: 503$"):
        wait([worker.start(Worker.wait_for, workers[0])], what="a relay")


def test_another_error_becomes_a_remote_error_with_the_traceback(worker: Actor[Worker]) -> None:
    with pytest.raises(RemoteError) as caught:
        wait([worker.start(Worker.stumble)], what="a column")
    assert re.match(r"loner: stumble\(\) .*KeyError: 'no such column'\n", str(caught.value))
    assert 'raise KeyError("no such column")' in str(caught.value)


def test_a_slime_error_of_a_constructor_keeps_its_class_and_message(ray_session: Session) -> None:
    actor = start_actor(Launch("misfit"), Worker, -1)
    with pytest.raises(ConfigError) as caught:
        wait([actor.start(Worker.answer)], what="a misfit")
    assert type(caught.value) is ConfigError
    assert str(caught.value) == "number is -1"


def test_a_constructor_that_fails_otherwise_is_a_remote_error(ray_session: Session) -> None:
    actor = start_actor(Launch("misfit"), Worker, "three")  # compares a string with a number
    with pytest.raises(RemoteError, match=r"(?s)^misfit: answer\(\) died\..*TypeError"):
        wait([actor.start(Worker.answer)], what="a misfit")


def test_a_late_call_is_one_line_and_with_sigusr1_the_stack_of_who_is_pending(
    workers: ActorGroup[Worker], signal_file: Path
) -> None:
    reports: list[str] = []

    def look(late: str) -> None:
        reports.append(late)
        if "in wait_for_file" in late:
            signal_file.touch()
        else:
            os.kill(os.getpid(), signal.SIGUSR1)

    done = workers[0].start(Worker.add, 1)
    wait([done], what="the first")
    calls = [done, workers[1].start(Worker.wait_for_file, str(signal_file))]
    with stacks_on_request():
        assert wait(calls, what="a file", warn_after_s=0.5, on_warn=look) == [1, "rested"]
    assert "\n" not in reports[0]
    assert all(part in reports[0] for part in ("a file", "1 done", "rank 1"))
    assert any("in wait_for_file" in report for report in reports[1:])


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


def test_an_actor_that_dies_ends_the_wait_while_others_work(
    workers: ActorGroup[Worker], victim: Actor[Worker], signal_file: Path
) -> None:
    working = workers[2].start(Worker.wait_for_file, str(signal_file))
    with pytest.raises(ProcessDied, match=r"^victim: vanish\(\) died\."):
        wait([working, victim.start(Worker.vanish)], what="a death")
    assert not has_ended(working)


def test_a_background_call_that_fails_ends_any_wait(
    workers: ActorGroup[Worker], worker: Actor[Worker], signal_file: Path
) -> None:
    working, monitor = workers[0].start(Worker.wait_for_file, str(signal_file)), worker.start(Worker.refuse)
    with pytest.raises(EngineError, match="engine 3"):
        wait([working], what="a file", also=[monitor])
    assert not has_ended(working)


def test_a_death_in_the_background_is_reported_rather_than_the_error_that_it_caused(
    workers: ActorGroup[Worker], worker: Actor[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "CAUSE_LIMIT_S", 60.0)
    workers[0].start(Worker.nap, 0.5)
    dying, over = workers[0].start(Worker.refuse), workers[1].start(Worker.add, 1)
    with pytest.raises(EngineError, match="engine 3"):
        wait([worker.start(Worker.stumble)], what="an answer", also=[over, dying])


def test_a_rank_that_died_is_reported_rather_than_the_error_of_its_peers(
    workers: ActorGroup[Worker], worker: Actor[Worker], victim: Actor[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "CAUSE_LIMIT_S", 60.0)
    ranks = [worker.start(Worker.stumble), workers[0].start(Worker.refuse), victim.start(Worker.vanish)]
    with pytest.raises(ProcessDied, match=r"^victim: vanish\(\) died\."):
        wait(ranks, what="all ranks")


def test_what_the_caller_checks_ends_a_wait(workers: ActorGroup[Worker], signal_file: Path) -> None:
    def check() -> None:
        raise ProcessDied("the raylet")

    working = workers[0].start(Worker.wait_for_file, str(signal_file))
    with pytest.raises(ProcessDied, match="the raylet"):
        wait([working], what="a file", check=check)
    assert not has_ended(working)


def test_a_failure_without_a_cause_in_the_background_is_reported_itself(
    workers: ActorGroup[Worker], worker: Actor[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "CAUSE_LIMIT_S", 0.1)
    alive, over = workers[0].start(Worker.nap, 1), workers[1].start(Worker.add, 1)
    with pytest.raises(RemoteError, match="stumble"):
        wait([worker.start(Worker.stumble)], what="an answer", also=[over, alive])


def test_a_background_call_that_returns_is_no_result(workers: ActorGroup[Worker], worker: Actor[Worker]) -> None:
    assert wait([workers[1].start(Worker.nap, 0.5)], what="a nap", also=[worker.start(Worker.add, 1)]) == ["rested"]


def test_waiting_for_nothing_returns_nothing(ray_session: Session) -> None:
    assert wait([], what="nothing") == []


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


def test_the_stacks_of_an_async_actor_show_where_its_tasks_are_suspended(ray_session: Session) -> None:
    actor = start_actor(Launch("sampler"), AsyncWorker)
    actor.start(AsyncWorker.linger)
    text = stacks_with("in inner", actor)
    ray.kill(actor.handle)
    assert "in linger\n    await self.inner()" in text
    assert "in inner\n    await asyncio.sleep(3600)" in text


def test_an_actor_sees_its_environment(placed: Placement) -> None:
    actor = start_actor(Launch("engine 0", placed.engines[0], {"OMP_NUM_THREADS": "1"}), Worker, 4)
    assert wait([actor.start(Worker.variable, "OMP_NUM_THREADS"), actor.start(Worker.add, 1)], what="the calls") == [
        "1",
        5,
    ]
    ray.kill(actor.handle)


@pytest.fixture
def placed(ray_session: Session) -> Iterator[Placement]:
    with place(Layout(learner_ranks=1, engines=(1,))) as placement:
        yield placement


def test_two_processes_on_two_cores_take_a_core_each(placed: Placement) -> None:
    assert (len(placed.learner), len(placed.engines)) == (1, 1)
    assert placed.plan.bundle == {"CPU": 1.0}
    assert {placed.learner[0].bundle.index, placed.engines[0].bundle.index} == {0, 1}
    assert placed.learner[0].env == {}


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


def test_the_handler_of_sigterm_is_the_one_from_before(ray_session: Session) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_sigterm_inside_a_wait_of_ray_is_the_one_that_saves(worker: Actor[Worker], signal_file: Path) -> None:
    busy = worker.start(Worker.wait_for_file, str(signal_file))
    # Ray looks for signals at the end of a look that found nothing, so the signal comes in the middle of one.
    timer = threading.Timer(1.25 * waiting.SLICE_S, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(Terminated), Termination() as stop, stop.allowed():
        wait([busy], what="a file")
    signal_file.touch()


def listens_on(process: psutil.Process) -> list[str]:
    """The addresses of a process of Ray's, of a passing one (Ray starts such all the time) none."""
    try:
        of_ray = any("ray" in word for word in words(process))
        entries = process.net_connections("inet") if of_ray else []
    except psutil.NoSuchProcess:
        return []
    return [entry.laddr.ip.removeprefix("::ffff:") for entry in entries if entry.status == "LISTEN"]


def test_the_runs_own_cluster_listens_on_loopback_only(ray_session: Session, worker: Actor[Worker]) -> None:
    wait([worker.start(Worker.ping)], what="a listening actor")
    addresses = [address for one in psutil.Process().children(recursive=True) for address in listens_on(one)]
    assert len(addresses) > 5
    assert set(addresses) == {"127.0.0.1"}


def test_the_runs_own_cluster_requires_its_token(ray_session: Session) -> None:
    address = ray.get_runtime_context().gcs_address
    script = f"from ray._raylet import GcsClient; GcsClient(address={address!r}).internal_kv_keys(b'', None, timeout=9)"
    mode, token = os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]
    assert (mode, len(token)) == ("token", 64)
    for given, refused in ((token, ""), ("0" * 64, "Authentication token is missing or incorrect")):
        environment = os.environ | {"RAY_AUTH_TOKEN": given}
        client = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert bool(client.returncode) == bool(refused), client.stderr
        assert refused in client.stderr


def test_the_runs_own_cluster_starts_no_service_without_clients(ray_session: Session) -> None:
    started = psutil.Process().children(recursive=True)
    assert children("raylet", started)
    assert children("dashboard.py", started) + children("monitor.py", started) == []


def test_a_signal_to_the_group_of_a_run_leaves_its_services_to_it(ray_session: Session) -> None:
    started = [child for child in psutil.Process().children() if children("ray", [child])]
    assert started
    assert os.getpgrp() not in [os.getpgid(child.pid) for child in started]


def test_a_cluster_that_does_not_answer_is_named() -> None:
    program = """
        from slime_core.runtime.session import Session
        from slime_core.errors import PlacementError
        try:
            Session("127.0.0.1:1", namespace="nowhere").__enter__()
        except PlacementError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=900)
    assert "'127.0.0.1:1' (" in done.stdout


OWN_CLUSTER = """
    import subprocess, sys, time
    from slime_core.runtime.actors import Launch, Watched, start_actor
    from slime_core.runtime.session import Session
    from slime_core.runtime.waiting import wait

    class Engine(Watched):
        def serve(self):
            command = [sys.executable, "-c", "import time; time.sleep(600)"]
            return subprocess.Popen(command, start_new_session=True).pid

        def hang(self):
            time.sleep(600)

    with Session("local", namespace="test", num_cpus=2):
        engine = start_actor(Launch("engine 0"), Engine)
        print(*wait([engine.start(Engine.serve), engine.start(Engine.ping)], what="the server"), flush=True)
        {last}
"""


@pytest.fixture
def own_cluster(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    program = textwrap.dedent(OWN_CLUSTER.format(last=request.param))
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        started = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        yield driver, [*started, *psutil.Process(driver.pid).children(recursive=True)]


@pytest.mark.parametrize("own_cluster", ["sys.stdin.read()"], indirect=True)
def test_a_session_leaves_no_process(
    own_cluster: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    driver, processes = own_cluster
    assert len(processes) > 5
    _, errors = driver.communicate(timeout=900)
    assert (driver.returncode, "Traceback" in errors) == (0, False), errors
    assert left_of(*processes) == []


@pytest.mark.parametrize("own_cluster", ['wait([engine.start(Engine.hang)], what="nothing")'], indirect=True)
def test_an_interrupt_ends_a_wait_and_leaves_no_process(
    own_cluster: tuple[subprocess.Popen[str], list[psutil.Process]],
) -> None:
    driver, processes = own_cluster
    driver.send_signal(signal.SIGINT)
    assert "\nKeyboardInterrupt\n" in driver.communicate(timeout=900)[1]
    assert left_of(*processes) == []
