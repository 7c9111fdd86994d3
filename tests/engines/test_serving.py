"""The real router before stand-ins of engines; real engines that a run finds, asks directly, and takes routes or scores
of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import SecretStr
from transformers import AutoConfig, AutoTokenizer, Qwen3ForSequenceClassification

from slime_core.components.construction import run_view
from slime_core.config.learning import LearnerConfig
from slime_core.config.load import load
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.config.secrets import EngineAccess, engine_access, engine_headers, set_engine_access
from slime_core.errors import ConfigError, RequestFailed
from slime_core.generation import Generation, SamplingParams
from slime_core.learner.micro_batches import make_micro_batches
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.engine import EngineSettings, Router, RouterSettings, SGLangServer, Worker
from slime_core.rollout.engines.external import discover
from slime_core.rollout.engines.fleet import with_head_bias
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import RewardFailure, Sample
from slime_core.weights.engine_control import call
from slime_rewards.options import RewardsOptions
from slime_rewards.services import ServedReward
from slime_testing.fake_engine import FakeEngine
from tests.engines.conftest import registered
from tests.engines.families import build, write

# Megatron warns about its own calls between its own modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

MODEL = ARITHMETIC / "model"
SHORT = SamplingParams(max_new_tokens=2)
FAMILY, LAYERS, CHOSEN = "qwen3_moe", 3, 2
REPLAY = LearnerConfig(use_routing_replay=True)
PROMPTS = [[3, 8 + one, 12, 15, 9 - one, 10, 4][one:] for one in range(4)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
"""The same tokens in every run: of any tokens some would be routed by less than rounding."""


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    """Engines of a real router require a key, as in a run."""
    before, key = engine_access(), "of-the-run"
    set_engine_access(EngineAccess(SecretStr(key)))
    with ExitStack() as stack:
        yield [stack.enter_context(FakeEngine(key=key)) for _ in range(3)]
    set_engine_access(before)


async def test_turns_of_a_conversation_stay_with_one_engine(engines: list[FakeEngine], tmp_path: Path) -> None:
    with Router(RouterSettings(tmp_path / "log", policy="consistent_hashing")) as router:
        router.wait_ready()
        registered(router, *(Worker(engine.url) for engine in engines))
        async with GenerateClient(router.url) as client:
            for turn in range(2):
                for session in ascii_lowercase:
                    await client.generate([3, turn + 2], sampling=SHORT, session=session)
            assert engine_headers(await client.engine_url()) == {"Authorization": "Bearer of-the-run"}
            homes = [set(engine.keys) for engine in engines]
            assert sum(len(engine.keys) for engine in engines) == 2 * 26
            for engine in engines:
                engine.fail_with = [429]
            with pytest.raises(RequestFailed, match="status 429"):
                await client.generate([3], sampling=SHORT)
    assert sum(len(engine.fail_with) for engine in engines) == 2, "the router sent a refused request again"
    assert sum(map(len, homes)) == 26, "a session has turns on two engines"
    assert sum(map(bool, homes)) > 1, "all sessions are on one engine"


async def test_each_request_goes_to_a_prefill_and_a_decode_engine_that_know_where_to_meet(
    engines: list[FakeEngine], tmp_path: Path
) -> None:
    prefill, *decode = engines
    with Router(RouterSettings(tmp_path / "log", policy="round_robin", splits_prefill=True)) as router:
        router.wait_ready()
        registered(router, Worker(prefill.url, "prefill", 8998), *(Worker(engine.url, "decode") for engine in decode))
        async with GenerateClient(router.url) as client:
            for _ in range(4):
                await client.generate([3, 4], sampling=SHORT)
    assert [len(engine.bodies) for engine in engines] == [4, 2, 2]
    met = sorted(body["bootstrap_room"] for engine in decode for body in engine.bodies)
    assert met == sorted(body["bootstrap_room"] for body in prefill.bodies)
    assert {body["bootstrap_port"] for engine in engines for body in engine.bodies} == {8998}


def test_a_run_finds_an_external_engine_also_after_it_read_weights_from_a_folder_that_is_gone(
    engine: Any, tmp_path: Path
) -> None:
    url = engine.server.url

    def find(*line: str) -> list[Worker]:
        config = load(["--advantage-estimator", "toy", *line], check_rules=False).config
        return discover([url.removeprefix("http://")], config, engine.model)

    assert find() == [Worker(url)]
    with pytest.raises(ConfigError, match="rollout_num_gpus_per_engine = 2"):
        find("--rollout-num-gpus-per-engine", "2")
    folder = shutil.copytree(engine.model, tmp_path / "version-1")
    try:
        call(url, "/update_weights_from_disk", {"model_path": str(folder)}, timeout_s=60)
        shutil.rmtree(folder)
        assert call(url, "/model_info", timeout_s=60)["model_path"] == str(folder)
        assert find() == [Worker(url)]
    finally:
        call(url, "/update_weights_from_disk", {"model_path": str(engine.model)}, timeout_s=60)


async def test_the_routes_of_an_engine_are_those_that_the_learner_takes(megatron: Any, tmp_path: Path) -> None:
    folder = write(FAMILY, tmp_path / "model")
    arguments = ("--enable-return-routed-experts",)
    with SGLangServer(EngineSettings(folder, tmp_path / "log", dtype="float32", extra=arguments)) as server:
        server.wait_ready()
        async with GenerateClient(server.url, engines=[server.url], routes=(LAYERS, CHOSEN)) as client:
            answers = [(await client.generate(prompt, sampling=GREEDY))[0] for prompt in PROMPTS]
    taken = learner_routes(megatron, folder, answers)
    for prompt, answer, layers in zip(PROMPTS, answers, taken, strict=True):
        assert answer.routed_experts is not None
        assert answer.routed_experts.shape == (len(prompt) + 12 - 1, LAYERS, CHOSEN)
        assert np.array_equal(np.sort(answer.routed_experts, axis=-1), np.sort(layers, axis=-1))


async def test_a_reward_model_scores_as_transformers_computes(tmp_path: Path) -> None:
    scorer = reward_model(tmp_path / "scorer")
    samples = [Sample(prompt=prompt, response=str(number)) for prompt in ("68+19", "1+1") for number in (3, 87)]
    served = with_head_bias(tmp_path / "scorer", tmp_path / "served")
    config = RunConfig(rollout=RolloutConfig(rm_type="served_rm", rm_model="scorer", reward_timeout_s=60))
    with SGLangServer(EngineSettings(served, tmp_path / "log", dtype="float32", extra=("--is-embedding",))) as server:
        server.wait_ready()
        reward = ServedReward(RewardsOptions(), run_view(config, models={"scorer": server.url}))
        *rewards, long = await reward.score([*samples, Sample(prompt="1+1=" * 500, response="2")])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [tokenizer(f"{sample.prompt}{sample.response}", return_tensors="pt")["input_ids"] for sample in samples]
    with torch.no_grad():
        expected = [scorer(ids).logits.item() for ids in texts]
    assert len(set(expected)) == 4
    assert isinstance(long, RewardFailure)
    assert long.cause == "too_long", long.error
    assert rewards == pytest.approx(expected, abs=1e-5)


def reward_model(folder: Path) -> Any:
    """One output on top of the embedded checkpoint's shape; its head has no bias."""
    config = AutoConfig.from_pretrained(MODEL)
    config.num_labels = 1
    torch.manual_seed(5)
    found = Qwen3ForSequenceClassification(config).float().eval()
    found.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return found


def learner_routes(megatron: Any, folder: Path, answers: list[Generation]) -> list[Any]:
    """The experts that a free pass of the learner takes for each answer, int16 [tokens - 1, layers, k]."""
    from slime_core.learner.routing_replay import RoutingReplay

    _, (chunk,) = build(FAMILY, folder, megatron)
    found = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = [*prompt, *answer.token_ids]
        sample = Sample(index=0, tokens=ids, response_length=12, rollout_log_probs=list(answer.log_probs))
        (shard,) = make_shards(
            [sample], np.ones(1, np.float32), BatchPlan(num_ranks=1, max_tokens=64), rollout=0, temperature=1.0
        )
        (((micro,)),) = make_micro_batches(shard)
        with torch.no_grad(), RoutingReplay([chunk], REPLAY).record_or_replay([micro], "actor"):
            chunk(micro.tokens_1T, micro.position_ids_1T, None, packed_seq_params=micro.packed_sequence)
        routes = torch.stack([micro.routes[layer] for layer in range(1, LAYERS + 1)], dim=1)
        found.append(routes[: len(ids) - 1].numpy())
    return found
