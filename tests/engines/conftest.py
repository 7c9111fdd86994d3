"""Fixtures of the tests that run real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

import slime_core
from slime_core.config.secrets import EngineAccess, set_engine_access
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.engine import EngineSettings, Router, RouterClient, RouterSettings, SGLangServer, Worker
from slime_core.runtime.session import Session
from slime_core.types import Sample
from slime_core.weights.engine_control import EngineControl
from tests.engines.learners import Learners, random_model, twelve_samples

ROOT = Path(__file__).parents[2]
MODEL = Path(slime_core.__file__).parent / "builtin" / "arithmetic" / "model"


def campaign(name: str, target: Path, *words: str) -> Any:
    """The JSON that ``python -m campaigns.NAME`` writes into ``target``, also if it found failures."""
    command = [sys.executable, "-m", f"campaigns.{name}", *words, "--json", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert target.exists(), done.stdout + done.stderr
    return json.loads(target.read_text())


@pytest.fixture(scope="session")
def megatron() -> Iterator[ParallelLayout]:
    """Megatron in this process: gloo, one rank, nothing parallel. Use it before importing anything of Megatron."""
    import torch.distributed as dist

    from slime_testing.harness.megatron import start_single_rank

    yield start_single_rank(seed=1)
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def learners() -> Iterator[Learners]:
    """Starts once a session, in about 20 seconds."""
    learners = Learners()
    yield learners
    learners.stop()


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of random weights."""
    return random_model(tmp_path_factory.mktemp("qwen3"), seed=0)


@pytest.fixture(scope="session")
def samples() -> list[Sample]:
    return twelve_samples()


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
        settings = RouterSettings(logs / "router.log", health_interval_s=2)
        with Router(settings) as router:
            server.wait_ready()
            router.wait_ready()
            yield Engine(server, registered(router, Worker(server.url)), MODEL, logs)


@pytest.fixture(scope="session")
def model(engine: Engine) -> Any:
    """The engine's model as transformers runs it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32).eval()


@pytest.fixture
def control(engine: Engine) -> Iterator[EngineControl]:
    control = EngineControl([engine.server.url], timeout_s=120)
    yield control
    control.close()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[GenerateClient]:
    async with GenerateClient(engine.router.url, timeout_s=120, vocab_size=16) as client:
        yield client
