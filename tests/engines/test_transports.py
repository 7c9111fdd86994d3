"""Every transport on real servers of one and of two processes, against a fresh server that reads the same weights."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

import slime_core
from slime_core.errors import WeightSyncError
from slime_core.generation import Generation, SamplingParams
from slime_core.generation.context import run_all
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.engine import EngineSettings, SGLangServer
from slime_core.weights import PublisherSettings, hugging_face
from slime_core.weights.engine_control import Bucket, EngineControl
from slime_core.weights.publisher import Publisher
from tests.engines.families import FAMILIES, write

MODEL = Path(slime_core.__file__).parent / "builtin" / "arithmetic" / "model"
Weights = dict[str, torch.Tensor]
Servers = dict[int, str]

TRANSPORTS = ("distributed", "tensor", "disk")
WIDTHS = (1, 2)
NORM = "model.norm.weight"
KEYS = "model.layers.1.self_attn.k_proj.weight"
PROMPTS = [[3, 8, 12, 15, 9, 10, 4], [3, 9, 10, 4], [3, 5, 6, 15, 7, 7, 4], *([3, one, 4] for one in range(5, 14))]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
LARGEST_DIFFERENCE = 1e-4
"""Log-probs of one engine differ by up to 7e-6, as prompts happen to be batched."""


@pytest.fixture(scope="module")
def weights() -> Weights:
    return load_file(MODEL / "model.safetensors")


@pytest.fixture(scope="module")
def changed(weights: Weights) -> Weights:
    noise = torch.Generator().manual_seed(7)
    return {name: weight + 0.05 * torch.randn(weight.shape, generator=noise) for name, weight in weights.items()}


@pytest.fixture(scope="module")
def servers(engine: Any, changed: Weights, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Processes of a server -> its URL; and a fresh one, number 0, that was started from ``changed`` on disk."""
    folder = tmp_path_factory.mktemp("transports")
    hugging_face.write(folder / "changed", changed.items(), template=MODEL)
    wide = EngineSettings(MODEL, folder / "wide.log", name="wide engine", dtype="float32", tensor_parallel=2)
    fresh = EngineSettings(folder / "changed", folder / "fresh.log", name="fresh engine", dtype="float32")
    with SGLangServer(wide) as two, SGLangServer(fresh) as reference:
        two.wait_ready()
        reference.wait_ready()
        yield {0: reference.url, 1: engine.server.url, 2: two.url}


@pytest.fixture(params=WIDTHS, ids=["one process", "two processes"])
def width(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def sender(servers: Servers, width: int, transport: Any, weights: Weights, tmp_path: Path) -> Iterator[Publisher]:
    """Of one server of that width, which ends with the weights that it had."""
    sender = publisher(servers[width], width, transport, tmp_path, weights)
    yield sender
    sender.publish(weights.items(), version="default")
    sender.close()


def publisher(
    url: str, width: int, transport: Any, folder: Path, weights: Weights, *, model: Path = MODEL, bucket: int = 100_000
) -> Publisher:
    settings = PublisherSettings(
        model, bytes_limit=bucket, devices_per_engine=width, timeout_s=120, transport=transport, disk_folder=folder
    )
    return Publisher([url], settings=settings, weights=weights.items(), sends=True)


def generated(url: str) -> list[Generation]:
    async def ask() -> list[Generation]:
        async with GenerateClient(url, timeout_s=120, vocab_size=16) as client:
            return [answer for (answer,) in await run_all(client.generate(ids, sampling=GREEDY) for ids in PROMPTS)]

    return asyncio.run(ask())


def difference(ours: list[Generation], theirs: list[Generation]) -> float:
    """Largest absolute difference of a token's log-probs; infinite if the tokens differ."""
    if [one.token_ids for one in ours] != [one.token_ids for one in theirs]:
        return float("inf")
    log_probs = [torch.tensor([value for one in all_of for value in one.log_probs]) for all_of in (ours, theirs)]
    return float((log_probs[0] - log_probs[1]).abs().max())


def shared() -> list[str]:
    """What of this process's shared memory has a name, or is mapped by it or by a server that it started."""
    mine, maps = f"torch_{os.getpid()}_", []
    for pid in (os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))):
        with suppress(OSError):  # it has ended
            maps += [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if mine in line]
    return [name for name in os.listdir("/dev/shm") if name.startswith(mine)] + maps


def test_an_engine_of_two_processes_answers_like_one_of_one_process(servers: Servers) -> None:
    assert difference(generated(servers[2]), generated(servers[1])) <= LARGEST_DIFFERENCE


def test_after_a_publication_an_engine_answers_like_one_that_was_started_from_the_same_weights(
    servers: Servers, width: int, transport: Any, weights: Weights, changed: Weights, tmp_path: Path
) -> None:
    url, fresh = servers[width], generated(servers[0])
    before = generated(url)
    sender = publisher(url, width, transport, tmp_path, weights)
    assert sender.publish(changed.items(), version="7") == 1
    after = generated(url)
    assert {version for answer in after for version in answer.weight_versions} == {"7"}
    assert difference(after, fresh) <= LARGEST_DIFFERENCE < difference(before, fresh)
    assert sorted(path.name for path in tmp_path.glob("*/*")) == (["version-7"] if transport == "disk" else [])
    sender.publish(weights.items(), version="default")
    assert difference(generated(url), before) <= LARGEST_DIFFERENCE
    sender.close()
    assert (shared(), list(tmp_path.iterdir())) == ([], [])


def test_engines_of_different_sizes_take_one_publication_and_each_is_proven(
    servers: Servers, transport: Any, weights: Weights, changed: Weights, tmp_path: Path
) -> None:
    urls, fresh = [servers[1], servers[2]], generated(servers[0])
    settings = PublisherSettings(
        MODEL, devices_per_engine=(1, 2), timeout_s=120, transport=transport, disk_folder=tmp_path
    )
    sender = Publisher(urls, settings=settings, weights=weights.items(), sends=True)
    assert sender.publish(changed.items(), version="7") == 1
    assert [difference(generated(url), fresh) <= LARGEST_DIFFERENCE for url in urls] == [True, True]
    sender.publish(weights.items(), version="default")
    sender.close()


def test_a_byte_that_changes_on_the_way_is_noticed(
    sender: Publisher, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sender.publish(weights.items(), version="6") == 1
    send = sender._transport.send

    def corrupt(bucket: Bucket, tensors: Sequence[torch.Tensor], *, last: bool) -> None:
        sent = [tensor.clone() for tensor in tensors]
        if KEYS in bucket.names:
            sent[bucket.names.index(KEYS)].view(torch.uint8)[-1, -1] ^= 1
        send(bucket, sent, last=last)

    monkeypatch.setattr(sender._transport, "send", corrupt)
    with pytest.raises(WeightSyncError, match=f": {KEYS.replace('k_proj', 'qkv_proj')}$"):
        sender.publish(weights.items(), version="7")
    monkeypatch.undo()


def test_a_process_may_have_several_groups(servers: Servers, weights: Weights, tmp_path: Path) -> None:
    senders = [publisher(servers[width], width, "distributed", tmp_path, weights) for width in (1, 1, 2)]
    assert [sender.publish(weights.items(), version="default") for sender in senders] == [1, 1, 1]
    for sender in senders:
        sender.close()


def test_weights_that_are_not_as_planned_are_refused_and_the_engine_is_what_it_was(
    servers: Servers, transport: Any, weights: Weights, tmp_path: Path
) -> None:
    control = EngineControl([servers[1]], timeout_s=120)
    held, answers = control.checksum(), generated(servers[1])
    mistakes = {
        rf"float32\[3\] .*{NORM};.* float32\[64\]": {**weights, NORM: torch.zeros(3)},
        rf"bfloat16\[64\] .*{NORM}": {**weights, NORM: weights[NORM].bfloat16()},
        " stranger; .*None": {"stranger": torch.zeros(3), **weights},
        "1 buckets .* 0": {name: weights[name] for name in weights if name != NORM},
    }
    for number, (message, wrong) in enumerate(mistakes.items()):
        sender = publisher(servers[1], 1, transport, tmp_path / str(number), weights, bucket=10**9)
        with pytest.raises(WeightSyncError, match=message):
            sender.publish(wrong.items(), version="8")
        with pytest.raises(WeightSyncError, match="publisher is closed"):
            sender.publish(weights.items(), version="8")
        control.resume()
    assert (control.version(), control.checksum()) == ("default", held)
    assert difference(generated(servers[1]), answers) <= LARGEST_DIFFERENCE
    control.close()


def test_spoiled_weights_are_restored_in_every_process(
    servers: Servers, width: int, sender: Publisher, weights: Weights
) -> None:
    before = generated(servers[width])
    sender.check_equal(weights.items(), version="default")
    assert difference(generated(servers[width]), before) <= LARGEST_DIFFERENCE


QUICK = ("deepseek_v3", "moonlight")
"""With and without a fused latent projection; the other families are long."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FAMILIES]
)
def test_buckets_smaller_than_a_layer_reach_every_parameter(family: str, tmp_path: Path) -> None:
    model = write(family, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # as the learner exports tied models
    layer = sum(weight.nbytes for name, weight in weights.items() if ".layers.1." in name)
    with SGLangServer(EngineSettings(model, tmp_path / "engine.log", dtype="float32")) as server:
        server.wait_ready()
        for transport in ("distributed", "tensor"):
            sender = publisher(server.url, 1, transport, tmp_path, weights, model=model, bucket=layer // 8)
            assert sender.publish(weights.items(), version="default") == 1
            sender.check_equal(weights.items(), version="default")
            sender.close()
