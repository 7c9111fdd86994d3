"""External engines: what the run requires of them, and how it watches them."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import ConfigError, EngineError
from slime_core.rollout.engines import external, server
from slime_core.rollout.engines.engine import Worker
from slime_core.rollout.engines.external import ExternalWatcher, discover, require_eval_servers_reachable
from slime_core.weights.engine_control import call
from slime_testing.fake_engine import FakeEngine

MODEL = ARITHMETIC / "model"
FITTING = {"model_path": str(MODEL), "tp_size": 1, "dtype": "float32", "architectures": ["Qwen3ForCausalLM"]}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as fake:
        fake.info = dict(FITTING)
        yield fake


def address(engine: FakeEngine) -> str:
    return engine.url.removeprefix("http://")


def found(*engines: FakeEngine, line: Sequence[str] = ()) -> list[Worker]:
    """The engines that a run with the flags of ``line`` may use."""
    config = load(["--advantage-estimator", "toy", *line], check_rules=False).config
    return discover([address(engine) for engine in engines], config, MODEL)


def reason(engine: FakeEngine, line: Sequence[str] = (), **info: Any) -> str:
    engine.info |= info
    with pytest.raises(ConfigError) as caught:
        found(engine, line=line)
    title, line = str(caught.value).splitlines()
    assert title.startswith("rollout_external_engine_addrs: ")
    assert line.startswith(f"  {engine.url}: ")
    return line.removeprefix(f"  {engine.url}: ")


def test_the_requirements_come_from_the_settings(engine):
    line = ["--bf16", "--rollout-num-gpus-per-engine", "2"]
    engine.info |= {"dtype": "bfloat16", "tp_size": 2}
    assert found(engine, line=line) == [Worker(engine.url, ranks=2)]
    line += ["--pause-generation-mode", "in_place", "--use-rollout-routing-replay"]
    engine.info |= {"disable_radix_cache": True, "enable_return_routed_experts": True}
    assert found(engine, line=line) == [Worker(engine.url, ranks=2)]
    engine.info |= {"enable_fp32_lm_head": True}
    assert found(engine, line=[*line, "--fp32-lm-head"]) == [Worker(engine.url, ranks=2)]


@pytest.mark.parametrize(
    ("info", "line", "names"),
    [
        ({"tp_size": 2}, "", "tp_size = 2.* rollout_num_gpus_per_engine = 1.* --tp-size 1.*-gpus-per-engine 2"),
        ({"pp_size": 2}, "", "pp_size = 2"),
        ({"dtype": "bfloat16"}, "", "dtype = bfloat16.* --dtype float32.* --bf16"),
        ({"dtype": "float"}, "--bf16", "dtype = float32.* --dtype bfloat16.* --bf16"),
        ({"dtype": "auto"}, "", "dtype = float16.* --dtype float32"),
        ({"enable_fp32_lm_head": True}, "", "enable_fp32_lm_head = True.* fp32_lm_head = False"),
        ({"is_generation": False}, "", "--is-embedding"),
        ({}, "--use-rollout-routing-replay", "use_rollout_routing_replay.* --enable-return-routed-experts"),
        ({}, "--pause-generation-mode in_place", "pause_generation_mode = in_place.* --disable-radix-cache"),
        ({"model_path": "/far/away"}, "", f"/far/away.* {MODEL}"),
        ({"model_path": "/far/away", "architectures": ["Llama"]}, "", r"architectures = \['Llama'\].*Qwen3ForCausalLM"),
        ({"tp_size": "two"}, "", "SGLang.* tp_size$"),
        ({"model_path": ""}, "", "SGLang.* model_path$"),
        ({"dtype": ["float32"]}, "", "SGLang.* dtype$"),
    ],
)
def test_an_engine_that_cannot_serve_is_refused_with_the_reason(engine, info, line, names):
    assert re.search(names, reason(engine, line.split(), **info))


def test_an_evaluation_that_no_engine_serves_is_refused(engine):
    require_eval_servers_reachable({})
    require_eval_servers_reachable({"aime": engine.url, "gsm8k": f"{engine.url}/"})
    url = engine.url
    engine.stop()
    with pytest.raises(ConfigError) as failure:
        require_eval_servers_reachable({"aime": url, "gsm8k": "http://127.0.0.1:99999"})
    _, aime, gsm8k, _ = str(failure.value).splitlines()
    assert f" aime: model = {url}: ConnectionRefusedError: " in aime
    assert " gsm8k: model = http://127.0.0.1:99999: ValueError: " in gsm8k


def test_prefill_and_decode_engines_are_recognised(engine):
    with FakeEngine() as second:
        second.info = FITTING | {"disaggregation_mode": "decode"}
        engine.info |= {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}
        assert found(engine, second) == [Worker(engine.url, "prefill", 8998), Worker(second.url, "decode")]
        second.info["disaggregation_mode"] = "null"
        with pytest.raises(ConfigError, match="prefill or decode"):
            found(engine, second)


@pytest.fixture
def holds(engine: FakeEngine) -> Callable[[str], None]:
    return lambda version: call(engine.url, "/update_weight_version", {"new_version": version}, timeout_s=60)


def test_versions_that_rise_are_this_runs_own(engine, holds):
    watch = ExternalWatcher([engine.url])
    for version in ("7", "0", "1", "1", "4"):  # 7: left by an earlier run
        holds(version)
        watch.poll()


@pytest.mark.parametrize("later", ["default", "2", None])
def test_an_engine_that_holds_older_weights_than_before_ends_the_run(engine, holds, later, monkeypatch):
    watch = ExternalWatcher([engine.url])
    for version in ("default", "3"):
        holds(version)
        watch.poll()
    if later is None:  # something else answers at its address
        monkeypatch.setattr(external, "call", lambda *_, **__: "<html>")
    else:
        holds(later)
    with pytest.raises(EngineError, match=f"{engine.url}, .* version 3 .* version '{later or ''}'"):
        watch.poll()


def test_an_engine_that_takes_no_connection_three_times_is_gone(engine):
    with FakeEngine() as other:
        watch = ExternalWatcher([other.url, engine.url])
        engine.stop()
        watch.poll()
        watch.poll()
        with pytest.raises(EngineError, match=rf"{engine.url}, .*: Connection(?s:.*) --load"):
            watch.poll()


def test_an_engine_that_hangs_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:  # takes connections and says nothing
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(server, "LONGEST_ANSWER_S", 0.05)
        monkeypatch.setattr(external, "POLL_LIMIT_S", 0.01)
        watch = ExternalWatcher([url])
        for _ in range(5):  # an engine that is slow is not gone
            watch.poll()
        watch.watch_answers(url, limit_s=0.05)
        with pytest.raises(EngineError, match=f"{url}, .* hangs"):
            watch.poll()
