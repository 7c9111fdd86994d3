from __future__ import annotations

import hashlib
import math
import threading
import weakref
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from slime_core.errors import NonFiniteError, WeightSyncError
from slime_core.weights import PublisherSettings, bucket_bytes, checksums, transports
from slime_core.weights import publisher as module
from slime_core.weights.engine_control import EngineChecksums
from slime_core.weights.publisher import Publisher

FOLDER = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"
NORM = "model.norm.weight"
OUTPUT = "model.layers.0.self_attn.o_proj.weight"


class Engines:
    """Plays control, group and engines in one: what is sent is held, and every call is written down."""

    name, ranks = "fake", (1,)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.held: dict[str, torch.Tensor] = {}
        self.reported: str | None = None
        self.spoils: str | None = None
        self.forgets_version = False
        self.made_with: dict[str, object] = {}
        self.digest = sha
        self._sent = torch.empty(0)

    def __getattr__(self, name: str):
        def note(*arguments: object, **options: object) -> None:
            given = [*map(str, arguments), *(f"{name}={value}" for name, value in options.items())]
            self.calls.append(" ".join([name, *given]))

        return note

    def broadcast(self, flat):
        self._sent = flat.clone()

    def update_from_distributed(self, bucket, *, group, send, version):
        send()
        self.calls.append(f"update {len(bucket.specs)} {version}")
        start = 0
        for spec in bucket.specs:
            piece = self._sent[start : start + spec.nbytes].clone()
            self.held[spec.name] = piece.view(getattr(torch, spec.dtype)).reshape(spec.shape)
            start += spec.nbytes
        assert start == len(self._sent)
        self.reported = version or self.reported

    def version(self):
        self.calls.append("version")
        return "0" if self.forgets_version else self.reported

    def checksum(self):
        self.calls.append("checksum")
        held = {name: self.digest(self.held[name]) for name in (NORM, OUTPUT) if name in self.held}
        return (EngineChecksums("http://one", "total", (held | ({NORM: "spoilt"} if self.spoils else {}),)),)

    @property
    def updates(self) -> list[str]:
        return [call for call in self.calls if call.startswith("update")]

    def overwrite(self):
        self.calls.append("overwrite")
        self.held = {name: torch.rand_like(weight) for name, weight in self.held.items()}


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).digest()[:8].hex()


def xxh3(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes())


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return load_file(FOLDER / "model.safetensors")


@pytest.fixture
def engines(monkeypatch) -> Engines:
    found = Engines()
    monkeypatch.setattr(module, "EngineControl", lambda urls, **options: found.made_with.update(options) or found)
    monkeypatch.setattr(module, "UpdateGroup", lambda control, **options: found.made_with.update(options) or found)
    return found


def publisher(weights, *, sends: bool = True, **settings) -> Publisher:
    return Publisher(
        ["http://one"], settings=PublisherSettings(FOLDER, **settings), weights=weights.items(), sends=sends
    )


def test_a_publication_by_hand(engines, weights):
    publisher(weights, bytes_limit=200_000).publish(weights.items(), version="7")
    updates = engines.updates
    assert [update.split()[2:] for update in updates] == [["None"], ["None"], ["7"]]
    assert [call for call in engines.calls if call not in updates] == [
        *("pause retract", "begin_update", "end_update", "version", "checksum", "resume"),
    ]
    assert engines.calls[2:5] == updates


@pytest.mark.parametrize("order", [iter, reversed])
def test_the_engines_hold_what_the_weights_are_then_bit_for_bit_in_any_order(engines, weights, order):
    sender = publisher(weights, bytes_limit=50_000)
    for version, value in (("1", 1.0), ("2", 3e38)):  # finite, though the sum is not
        weights[NORM].fill_(value)
        sender.publish(order(list(weights.items())), version=version)
        assert engines.held.keys() == weights.keys()
        assert all(torch.equal(engines.held[name], weights[name]) for name in weights)
        assert engines.reported == version


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_never_sent_and_the_engines_stay_paused(engines, weights, value):
    sender = publisher(weights)
    weights[NORM][3] = value
    with pytest.raises(NonFiniteError, match=NORM):
        sender.publish(weights.items(), version="1")
    assert engines.calls == ["pause retract", "begin_update"]


@pytest.mark.parametrize(
    ("fault", "message"), [({"forgets_version": True}, "report version 0"), ({"spoils": NORM}, f"not hold .*{NORM}")]
)
def test_engines_that_do_not_hold_what_was_sent_stay_paused(engines, weights, fault, message):
    vars(engines).update(fault)
    with pytest.raises(WeightSyncError, match=message):
        publisher(weights).publish(weights.items(), version="1")
    assert "resume" not in engines.calls


@pytest.mark.parametrize("digest", [sha, xxh3])
def test_the_hash_is_that_of_the_engine_and_later_the_only_one(engines, weights, monkeypatch, digest):
    engines.digest, computed = digest, []
    real = checksums._digest
    monkeypatch.setattr(checksums, "_digest", lambda pieces, digits: computed.append(digits) or real(pieces, digits))
    sender = publisher(weights)
    assert sender.publish(weights.items(), version="1") == 1
    assert len(set(computed)) == 2
    computed.clear()
    assert sender.publish(weights.items(), version="2") == 1
    assert set(computed) == {len(digest(weights[NORM]))}
    engines.spoils = NORM
    with pytest.raises(WeightSyncError, match=f"not hold .*{NORM}"):
        sender.publish(weights.items(), version="3")


def words(tensor: torch.Tensor) -> str:
    sums = checksums.WordSums(tensor.nbytes, tensor.device)
    sums.add(tensor)
    return sums.hexdigest()


def test_a_publication_to_gpus_is_compared_with_what_was_sent_too(engines, weights):
    engines.digest = words
    sender = publisher(weights, backend="nccl")
    assert sender.publish(weights.items(), version="1") == 1
    engines.spoils = NORM
    with pytest.raises(WeightSyncError, match=f"not hold .*{NORM}"):
        sender.publish(weights.items(), version="2")


def test_engines_that_rearrange_weights_are_compared_with_each_other_only(engines, weights):
    sender = publisher(weights, backend="nccl", rearranges=True)
    engines.spoils = NORM
    assert sender.publish(weights.items(), version="1") == 0


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "backend", "digest", "steps"),
    [
        (torch.Tensor, "gloo", sha, ["gathered", "loaded", "loaded"]),
        # GPUs hold a bucket in transit and the next one that is gathered.
        (OnGpu, "nccl", words, ["copied", "gathered", "loaded", "copied", "loaded"]),
    ],
)
def test_a_bucket_is_sent_while_the_next_one_is_gathered(engines, weights, monkeypatch, kind, backend, digest, steps):
    gathered, send, seen = threading.Event(), engines.update_from_distributed, []
    flatten = transports.flatten

    def update(bucket, **options):
        assert NORM in bucket.names or gathered.wait(100), "the next bucket is not gathered before this one is loaded"
        send(bucket, **options)
        seen.append("loaded")

    def gather():
        for name, weight in weights.items():
            if name == NORM:
                seen.append("gathered")
                gathered.set()
            yield name, weight.as_subclass(kind)

    assert list(weights)[-1] == NORM
    monkeypatch.setattr(
        transports, "flatten", lambda *tensors, **options: seen.append("copied") or flatten(*tensors, **options)
    )
    monkeypatch.setattr(engines, "update_from_distributed", update, raising=False)
    engines.digest = digest
    publisher(weights, backend=backend, bytes_limit=300_000).publish(gather(), version="1")
    assert [step for step in seen if step in steps] == steps


def test_a_bucket_leaves_memory_when_it_is_sent(engines, weights, monkeypatch):
    alive: dict[str, weakref.ref[torch.Tensor]] = {}

    def gather():
        for name, weight in weights.items():
            copy = weight.clone().as_subclass(OnGpu)
            alive[name] = weakref.ref(copy)
            yield name, copy
            del copy
            held = [other for other, tensor in alive.items() if tensor() is not None]
            assert len(held) <= len(limits[name]), held

    engines.digest = words
    sender = publisher(weights, backend="nccl", bytes_limit=1)
    limits = {name: bucket.names for bucket in sender._buckets for name in bucket.names}
    assert sender.publish(gather(), version="1") == 1


@pytest.mark.parametrize(
    ("limit", "parameters", "nbytes"),
    [(None, 8 * 10**9, 512 * 2**20), (None, 30 * 10**9, 2 * 2**30), (7, 8 * 10**9, 7), (7, 30 * 10**9, 7)],
)
def test_buckets_of_large_models_are_larger_unless_their_size_is_given(limit, parameters, nbytes):
    assert bucket_bytes(limit, parameters) == nbytes


@pytest.mark.parametrize(("backend", "digest", "buckets"), [("gloo", sha, 3), ("nccl", words, 1)])
def test_buckets_for_cpus_are_small_enough_for_memory_that_is_reused(
    engines, weights, monkeypatch, backend, digest, buckets
):
    monkeypatch.setattr(module, "CPU_BUCKET_BYTES", 200_000)
    engines.digest = digest
    publisher(weights, backend=backend).publish(weights.items(), version="1")
    assert len(engines.updates) == buckets


def test_spoiled_weights_that_are_published_again_are_equal(engines, weights):
    engines.held = dict(weights)
    publisher(weights).check_equal(weights.items(), version="0")
    assert engines.calls[:4] == ["checksum", "overwrite", "checksum", "pause retract"]
    assert engines.calls[-2:] == ["resume", "checksum"]


def test_weights_that_cannot_be_spoiled_are_an_error(engines, weights):
    engines.held = dict(weights)
    engines.overwrite = lambda: None
    with pytest.raises(WeightSyncError, match=f"still holds {OUTPUT}, {NORM} after"):
        publisher(weights).check_equal(weights.items(), version="0")
    assert "pause retract" not in engines.calls


def test_weights_that_do_not_fit_the_engines_are_refused_before_anything_is_sent(engines, weights):
    weights["stranger"] = weights.pop(NORM)
    with pytest.raises(WeightSyncError, match=rf"missing: {NORM}; unknown .*: stranger"):
        publisher(weights)
    assert engines.calls == []


def test_weights_that_change_their_shape_or_go_missing_are_refused(engines, weights):
    sender = publisher(weights)
    with pytest.raises(WeightSyncError, match=rf"float32\[3\] .*{NORM};.* float32\[64\]"):
        sender.publish({**weights, NORM: torch.zeros(3)}.items(), version="1")
    with pytest.raises(WeightSyncError, match="publisher is closed"):
        sender.publish(weights.items(), version="1")
    with pytest.raises(WeightSyncError, match=r"1 buckets .* 0"):
        publisher(weights).publish([(name, weight) for name, weight in weights.items() if name != NORM], version="1")
    assert "resume" not in engines.calls


@pytest.mark.parametrize("call", ["publish", "check_equal"])
def test_a_rank_that_does_not_send_only_takes_part_in_gathering(engines, weights, call):
    seen = []
    silent = publisher(weights, sends=False)
    getattr(silent, call)(((name, seen.append(name) or weight) for name, weight in weights.items()), version="1")
    silent.close()
    assert seen == list(weights)
    assert (engines.calls, engines.made_with) == ([], {})


def test_a_rank_that_does_not_send_learns_that_files_were_written(engines, weights):
    written = []
    settings = PublisherSettings(model=Path("nowhere"), transport="disk")
    silent = Publisher([], settings=settings, weights=weights.items(), sends=False, on_written=written.append)
    silent.publish(weights.items(), version="1")
    assert written == [None]


def test_settings_reach_the_engines_and_closing_leaves_them(engines, weights):
    sender = publisher(weights, devices_per_engine=2, address="10.0.0.5", timeout_s=7.0)
    sender.close()
    assert engines.made_with == {
        "timeout_s": 7.0,
        "ranks_per_engine": 2,
        "backend": "gloo",
        "address": "10.0.0.5",
    }
    assert engines.calls == ["close", "close"]


def test_a_publication_that_fails_gathers_to_the_end_and_closes_the_update_of_the_other_engines(engines, weights):
    def refuse(*_: object, **__: object) -> None:
        raise WeightSyncError("engine http://one gave no answer")

    settings = PublisherSettings(FOLDER, bytes_limit=64 * 1024)
    publisher = Publisher(["http://one"], settings=settings, weights=weights.items(), sends=True)
    engines.update_from_distributed = refuse
    gathered = []
    with pytest.raises(WeightSyncError, match="gave no answer"):
        publisher.publish((gathered.append(name) or (name, weight) for name, weight in weights.items()), version="1")
    assert gathered == list(weights), "the other ranks would wait for this one"
    assert engines.calls[-3:] == ["end_update limit_s=10.0", "close", "close"]
    publisher.close()
    assert engines.calls.count("close") == 3, "the group was closed again"
