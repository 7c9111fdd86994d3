"""External engines: what the run requires of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import ConfigError
from slime_core.rollout.engines.external import External, Needs, discover, require_reachable
from slime_testing.fake_engine import FakeEngine

MODEL = ARITHMETIC / "model"
NEEDS = Needs(MODEL, "float32", 1)
FITTING = {"model_path": str(MODEL), "tp_size": 1, "dtype": "float32", "architectures": ["Qwen3ForCausalLM"]}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as fake:
        fake.info = dict(FITTING)
        yield fake


def address(engine: FakeEngine) -> str:
    return engine.url.removeprefix("http://")


def reason(engine: FakeEngine, needs: Needs = NEEDS, **info: Any) -> str:
    engine.info |= info
    with pytest.raises(ConfigError) as caught:
        discover([address(engine)], needs)
    title, line = str(caught.value).splitlines()
    assert title == "rollout_external_engine_addrs: these engines cannot serve the run:"
    assert line.startswith(f"  {engine.url}: ")
    return line.removeprefix(f"  {engine.url}: ")


def test_an_engine_that_fits_is_taken(engine):
    assert discover([address(engine)], NEEDS) == [External(engine.url, 1)]


def test_the_requirements_come_from_the_settings():
    line = ["--advantage-estimator", "toy", "--bf16", "--rollout-num-gpus-per-engine", "2"]
    assert Needs.of(load(line, check_rules=False).config, MODEL) == Needs(MODEL, "bfloat16", 2)
    line += ["--pause-generation-mode", "in_place"]
    assert Needs.of(load(line, check_rules=False).config, MODEL) == Needs(MODEL, "bfloat16", 2, pauses_in_place=True)


@pytest.mark.parametrize(
    ("info", "needs", "message"),
    [
        (
            {"tp_size": 2},
            NEEDS,
            "tp_size = 2, but rollout_num_gpus_per_engine = 1; start it with --tp-size 1, or write "
            "--rollout-num-gpus-per-engine 2",
        ),
        ({"pp_size": 2}, NEEDS, "pp_size = 2; engines that span pipeline stages cannot be updated yet"),
        (
            {"dtype": "bfloat16"},
            NEEDS,
            "dtype = bfloat16, but the learner computes in float32; start it with --dtype float32, or write --bf16 if "
            "it is bfloat16",
        ),
        (
            {"dtype": "float"},
            Needs(MODEL, "bfloat16", 1),
            "dtype = float32, but the learner computes in bfloat16; start it with --dtype bfloat16, or leave "
            "--bf16 out",
        ),
        ({"is_generation": False}, NEEDS, "it serves embeddings; start it without --is-embedding"),
        (
            {},
            Needs(MODEL, "float32", 1, routes=True),
            "use_rollout_routing_replay needs the routes; start it with --enable-return-routed-experts",
        ),
        (
            {},
            Needs(MODEL, "float32", 1, pauses_in_place=True),
            "pause_generation_mode = in_place: its prefix cache would hold entries of older weights; start it with "
            "--disable-radix-cache",
        ),
        (
            {"model_path": "/far/away"},
            NEEDS,
            f"its model /far/away cannot be read here, so its sizes cannot be compared with those of {MODEL}; start "
            "it from a folder that this machine sees under the same path",
        ),
        (
            {"model_path": "/far/away", "architectures": ["Llama"]},
            NEEDS,
            f"its model /far/away is not that of {MODEL}: architectures = ['Llama'] instead of ['Qwen3ForCausalLM']",
        ),
    ],
)
def test_an_engine_that_cannot_serve_is_refused_with_the_reason(engine, info, needs, message):
    assert reason(engine, needs, **info) == message


def test_another_vocabulary_is_found_in_the_folder(engine, tmp_path: Path):
    content = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "vocab_size": 77}))
    message = f"its model {tmp_path} is not that of {MODEL}: vocab_size = 77 instead of {content['vocab_size']}"
    assert reason(engine, model_path=str(tmp_path)) == message


def test_without_a_type_an_engine_computes_as_sglang_decides(engine):
    assert reason(engine, dtype="auto").startswith("dtype = float16, but the learner computes in float32")


def test_an_address_without_a_server_is_an_error(engine):
    engine.stop()
    assert "it does not answer as an SGLang server" in reason(engine)


def test_an_evaluation_that_no_engine_serves_is_refused(engine):
    require_reachable({})
    require_reachable({"aime": engine.url, "gsm8k": f"{engine.url}/"})
    url = engine.url
    engine.stop()
    with pytest.raises(ConfigError) as failure:
        require_reachable({"aime": url, "gsm8k": "http://127.0.0.1:99999"})
    first, aime, gsm8k, last = str(failure.value).splitlines()
    assert first == "no server answers these evaluation sets:"
    assert aime.startswith(f"  evaluation set aime: model = {url}: ConnectionRefusedError: ")
    assert gsm8k.startswith("  evaluation set gsm8k: model = http://127.0.0.1:99999: ValueError: Port out of range")
    assert last == "Start the server there first, or correct the address in the table of the set."


def test_prefill_and_decode_engines_are_recognised(engine):
    with FakeEngine() as second:
        second.info = FITTING | {"disaggregation_mode": "decode"}
        engine.info |= {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}
        assert discover([address(engine), address(second)], NEEDS) == [
            External(engine.url, 1, "prefill", 8998),
            External(second.url, 1, "decode"),
        ]
        second.info["disaggregation_mode"] = "null"
        with pytest.raises(
            ConfigError, match="some compute whole requests and others only prefill or decode; give engines"
        ):
            discover([address(engine), address(second)], NEEDS)


@pytest.mark.parametrize("info", [{"tp_size": "two"}, {"model_path": ""}, {"dtype": ["float32"]}])
def test_a_wrong_type_in_server_info_is_named(engine, info):
    (name,) = info
    expected = f"it does not answer as an SGLang server: it reports no valid {name}"
    assert reason(engine, **info) == expected
