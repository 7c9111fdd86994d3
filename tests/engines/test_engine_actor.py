"""A real server, and the real router, inside a Ray actor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from slime_core.config.secrets import send_key_to
from slime_core.errors import EngineError
from slime_core.rollout.engines import keyed
from slime_core.rollout.engines.actors import EngineActor, RouterActor, start_engine, start_router
from slime_core.rollout.engines.engine import EngineSettings, RouterClient, RouterSettings, Worker
from slime_core.runtime.layout import PlacedBundle
from slime_core.runtime.placement import ActorPlacement
from slime_core.runtime.waiting import wait
from slime_core.weights.engine_control import EngineControl, call
from tests.processes import left_of, runs, words


def test_the_death_of_a_server_ends_waits_and_the_death_of_its_actor_ends_the_server(
    ray_session: Any, engine: Any, tmp_path: Path
) -> None:
    actor = start_engine(EngineSettings(engine.model, tmp_path / "log", name="engine 5", dtype="float32"))
    (url,) = wait([actor.start(EngineActor.start)], what="engine 5")
    assert EngineControl([url]).version() == "default"
    watching = actor.start(EngineActor.watch)
    assert wait([actor.start(EngineActor.stacks)], what="an answer", also=[watching])[0]
    server = front(url)
    family = [server, *server.children(recursive=True)]
    shared = {Path(path) for one in family for path in mapped(one) if path.startswith("/dev/shm/")}
    assert shared, "the server shares no memory any more; engine.SHARED_MEMORY can go"
    server.kill()
    with pytest.raises(EngineError, match=rf"engine 5 .*signal 9(.|\n)*{tmp_path}"):
        wait([watching], what="its end", fail_after_s=120)

    wait([actor.start(EngineActor.stop)], what="the rest")
    assert [path for path in shared if path.exists()] == []
    ray.kill(actor.handle)


def test_no_server_is_left_when_its_actor_is_killed(ray_session: Any, engine: Any, tmp_path: Path) -> None:
    actor = start_engine(EngineSettings(engine.model, tmp_path / "log", name="engine 6", dtype="float32"))
    (url,) = wait([actor.start(EngineActor.start)], what="engine 6")
    family = [front(url), *front(url).children(recursive=True)]
    assert len(family) >= 3
    shared = {Path(path) for one in family for path in mapped(one) if path.startswith("/dev/shm/")}
    supervisor = front(url).ppid()
    ray.kill(actor.handle)
    assert left_of(*family, supervisor) == []
    assert [path for path in shared if path.exists()] == []


@pytest.fixture
def two_placements(ray_session: Any) -> Iterator[ActorPlacement]:
    """As an engine over two nodes has them, both on this one."""
    group = placement_group([{"CPU": 0.1}] * 2)
    ray.get(group.ready(), timeout=600)
    first, second = (
        ActorPlacement(group, PlacedBundle(number, f"node {number}", "127.0.0.1"), 0.1, 0) for number in range(2)
    )
    yield replace(first, further=(second,))
    remove_placement_group(group)


def test_the_parts_of_an_engine_over_two_nodes_serve_together_and_end_together(
    engine: Any, two_placements: ActorPlacement, tmp_path: Path
) -> None:
    settings = EngineSettings(engine.model, tmp_path / "log", name="engine 7", dtype="float32", tensor_parallel=2)
    actor = start_engine(settings, placement=two_placements)
    (url,) = wait([actor.start(EngineActor.start)], what="engine 7")
    send_key_to(url)
    watching = actor.start(EngineActor.watch)
    body: Any = {"input_ids": [3, 4, 5], "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    ids = [call(one, "/generate", body, timeout_s=60)["output_ids"] for one in (url, engine.server.url)]
    assert ids[0] == ids[1]
    # The supervisor's command line has the words too.
    (part,) = [one for one in psutil.process_iter() if words(one)[1:2] == [keyed.__file__] and RANK_1 in words(one)]
    family = [front(url), *front(url).children(recursive=True), part, *part.children(recursive=True)]
    part.kill()
    with pytest.raises(EngineError, match=r"engine 7 node 1 .*signal 9(.|\n)*log-node-1"):
        wait([watching], what="its end", fail_after_s=120)
    wait([actor.start(EngineActor.stop)], what="the rest")
    assert left_of(*family) == []
    ray.kill(actor.handle)


def test_a_router_takes_engines_in_and_its_death_ends_waits(ray_session: Any, engine: Any, tmp_path: Path) -> None:
    actor = start_router(RouterSettings(tmp_path / "log"))
    (url,) = wait([actor.start(RouterActor.start)], what="the router")
    watching = actor.start(RouterActor.watch)
    client = RouterClient(url)
    client.add([Worker(engine.server.url)])
    client.wait_registered([engine.server.url])
    assert call(url, "/get_model_info", timeout_s=60)["weight_version"] == "default"
    front(url).kill()
    with pytest.raises(EngineError, match="router ended by signal 9"):
        wait([watching], what="its end", fail_after_s=120)
    ray.kill(actor.handle)


def test_a_router_that_was_stopped_ends_its_watch_and_never_comes_back(ray_session: Any, tmp_path: Path) -> None:
    actor = start_router(RouterSettings(tmp_path / "log"))
    (url,) = wait([actor.start(RouterActor.start)], what="the router")
    router = front(url)
    wait([actor.start(RouterActor.watch), actor.start(RouterActor.stop)], what="its end", fail_after_s=120)
    assert not runs(router)
    with pytest.raises(EngineError, match="router was stopped"):
        wait([actor.start(RouterActor.start)], what="the router again")
    ray.kill(actor.handle)


def mapped(process: psutil.Process) -> list[str]:
    """The files that it has in memory; none, where it has ended."""
    try:
        return [entry.path for entry in process.memory_maps()]
    except psutil.NoSuchProcess:
        return []


RANK_1 = "--node-rank=1"


def front(url: str) -> psutil.Process:
    """The process that listens there."""
    port = int(url.rsplit(":")[-1])
    listening = [one for one in psutil.net_connections("inet") if one.status == "LISTEN" and one.laddr.port == port]
    return psutil.Process(listening[0].pid)
