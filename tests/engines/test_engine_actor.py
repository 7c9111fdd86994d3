"""A real server, and the real router, inside a Ray actor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
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
from slime_core.runtime.actors import Actor
from slime_core.runtime.layout import PlacedBundle
from slime_core.runtime.placement import ActorPlacement
from slime_core.runtime.waiting import wait
from slime_core.weights.engine_control import EngineControl, call
from tests.processes import left_of, words


def start(engine: Any, folder: Path, name: str, **placed: Any) -> tuple[Actor[EngineActor], str]:
    """An engine's actor, and the URL at which it serves."""
    wide: Any = {"tensor_parallel": 2} if placed else {}
    settings = EngineSettings(engine.model, folder / "log", name=name, dtype="float32", **wide)
    actor = start_engine(settings, **placed)
    (url,) = wait([actor.start(EngineActor.start)], what=name)
    return actor, str(url)


def shared_by(processes: list[psutil.Process]) -> set[Path]:
    """Files in shared memory that they have mapped."""
    paths = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            paths |= {Path(entry.path) for entry in process.memory_maps() if entry.path.startswith("/dev/shm/")}
    return paths


def test_the_death_of_a_server_ends_waits_and_the_death_of_its_actor_ends_the_server(
    ray_session: Any, engine: Any, tmp_path: Path
) -> None:
    actor, url = start(engine, tmp_path, "engine 5")
    assert EngineControl([url]).version() == "default"
    watching = actor.start(EngineActor.watch)
    assert wait([actor.start(EngineActor.stacks)], what="an answer", also=[watching])[0]
    server = front(url)
    shared = shared_by([server, *server.children(recursive=True)])
    assert shared, "the server shares no memory any more; engine.SHARED_MEMORY can go"
    server.kill()
    with pytest.raises(EngineError, match=rf"engine 5 .*signal 9(.|\n)*{tmp_path}"):
        wait([watching], what="its end", fail_after_s=120)
    wait([actor.start(EngineActor.stop)], what="the rest")
    assert [path for path in shared if path.exists()] == []
    ray.kill(actor.handle)


def test_no_server_is_left_when_its_actor_is_killed(ray_session: Any, engine: Any, tmp_path: Path) -> None:
    actor, url = start(engine, tmp_path, "engine 6")
    family = [front(url), *front(url).children(recursive=True)]
    assert len(family) >= 3
    shared, supervisor = shared_by(family), front(url).ppid()
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
    actor, url = start(engine, tmp_path, "engine 7", placement=two_placements)
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


RANK_1 = "--node-rank=1"


def front(url: str) -> psutil.Process:
    """The process that listens there."""
    port = int(url.rsplit(":")[-1])
    listening = [one for one in psutil.net_connections("inet") if one.status == "LISTEN" and one.laddr.port == port]
    return psutil.Process(listening[0].pid)
