"""How a server gets the key of the run, and which processes do not see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from slime_core.config.secrets import ENGINE_KEY, EngineAccess, engine_access, send_key_to, set_engine_access
from slime_core.errors import RequestRefused, WeightSyncError
from slime_core.generation import SamplingParams
from slime_core.rollout.engines import keyed
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.engine import EngineSettings, Router, RouterSettings, SGLangServer, Worker
from slime_core.services import Service
from slime_core.weights.engine_control import EngineControl, call
from slime_testing.fake_engine import FakeEngine

KEY = "K-1234567890"


@pytest.fixture
def key() -> Iterator[None]:
    before = engine_access()
    set_engine_access(EngineAccess(SecretStr(KEY)))
    yield
    set_engine_access(before)


SHOWS = """
import json, logging, os, sys
logging.basicConfig(format="%(message)s", force=True)
logging.warning("server_args=%s", sys.argv)
line, variable = open("/proc/self/cmdline").read(), os.environ.get("SLIME_ENGINE_KEY")
print(json.dumps({"argv": sys.argv[1:], "line": line, "env": variable}))
"""


def test_a_program_gets_the_key_as_an_argument_hidden_from_ps_its_log_and_its_children(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    command = [sys.executable, keyed.__file__, "shows", "--port=1"]
    environment = os.environ | {ENGINE_KEY: KEY}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert seen["argv"] == ["--port=1", f"--api-key={KEY}"]
    assert KEY not in seen["line"]
    assert seen["env"] is None
    assert "--api-key=***" in done.stderr
    assert KEY not in done.stderr


def test_engines_and_routers_get_the_key_in_their_environment_only(key: None, tmp_path: Path) -> None:
    engine = SGLangServer(EngineSettings(tmp_path, tmp_path / "log"))
    router = Router(RouterSettings(tmp_path / "log"))
    for server in (engine, router):
        assert server.env[ENGINE_KEY] == KEY
        assert not [word for word in server.command(1, 2) if KEY in word]
    assert keyed.KEY_VARIABLE == ENGINE_KEY
    assert Worker("http://one").entry == {"url": "http://one", "api_key": KEY}


async def test_a_client_without_the_key_is_refused(key: None) -> None:
    greedy = SamplingParams(max_new_tokens=2, temperature=0.0)
    with FakeEngine(key=KEY) as engine:
        with pytest.raises(WeightSyncError, match="status 401"):
            call(engine.url, "/update_weights_from_disk", {"model_path": "/evil"}, timeout_s=10)
        async with GenerateClient(engine.url) as stranger:
            with pytest.raises(RequestRefused, match="status 401"):
                await stranger.generate([2], sampling=greedy)
        EngineControl([engine.url]).check_alive()
        async with GenerateClient(engine.url) as client:
            assert await client.generate([2], sampling=greedy)


async def test_only_services_that_are_engines_of_the_run_get_the_key(key: None) -> None:
    with FakeEngine(key=KEY) as judge, FakeEngine() as elsewhere:
        judge.info = elsewhere.info = {}
        body = {"input_ids": [2], "sampling_params": {"max_new_tokens": 1}}
        send_key_to(judge.url)
        for engine in (judge, elsewhere):
            await Service(f"{engine.url}/generate", timeout_s=10, max_in_flight=1).ask(body)
        assert judge.headers[0]["Authorization"] == f"Bearer {KEY}"
        assert "Authorization" not in elsewhere.headers[0]
