"""Fixtures of the tests that run real engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import SecretStr

import slime_core
from slime_core.config.secrets import EngineAccess, set_engine_access
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.engines.engine import EngineSettings, Router, RouterClient, RouterSettings, SGLangServer, Worker
from slime_core.runtime.session import Session

MODEL = Path(slime_core.__file__).parent / "builtin" / "arithmetic" / "model"


@pytest.fixture(scope="session")
def megatron() -> Iterator[ParallelLayout]:
    """Megatron in this process: gloo, one rank, nothing parallel. Use it before importing anything of Megatron."""
    import torch.distributed as dist

    from slime_core.harness.megatron import start_single_rank

    yield start_single_rank(seed=1)
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Session]:
    """A Ray cluster of two cores on this machine; about five seconds."""
    with Session("local", namespace="tests", num_cpus=2) as session:
        yield session


@dataclass(frozen=True, slots=True)
class Engine:
    """A running server, the router before it, and what it serves."""

    server: SGLangServer
    router: RouterClient
    model: Path
    logs: Path


def registered(router: Router, *workers: Worker) -> RouterClient:
    """A client of ``router``, which sends requests to ``workers`` from now on."""
    client = RouterClient(router.url)
    client.add(workers)
    client.wait_registered(worker.url for worker in workers)
    return client


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A real server of the built-in checkpoint in fp32 with a real router; starts once a session, in about ten seconds.

    Both require a key, as in a run, and the calls of this process carry it.
    """
    set_engine_access(EngineAccess(SecretStr("the-key-of-the-tests")))
    logs = tmp_path_factory.mktemp("logs")
    with SGLangServer(EngineSettings(MODEL, logs / "engine.log", dtype="float32")) as server:
        settings = RouterSettings(logs / "router.log", health_interval_s=2, health_failures=2)
        with Router(settings) as router:
            server.wait_ready()
            router.wait_ready()
            yield Engine(server, registered(router, Worker(server.url)), MODEL, logs)
