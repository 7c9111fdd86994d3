"""The digest of GPU engines: ours, on a CPU, against the source of SGLang's kernel, which needs Triton and a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from slime_core.errors import WeightSyncError
from slime_core.weights.checksums import TILE, SentWeights, WordSums
from slime_core.weights.engine_control import EngineChecksums

# --- Triton's operations on numpy's arrays, as far as the kernel uses them --------------------------------------------


class Words(np.ndarray):
    """A block of numbers."""

    def to(self, dtype: type) -> Words:
        return self.astype(dtype).view(Words)


class Pointer:
    def __init__(self, memory: np.ndarray, index: Any = 0) -> None:
        self.memory, self.index = memory, index

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.index + offset)


class Kernel:
    """A kernel that runs its programs one after the other; inside another kernel, a function."""

    program = 0

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *values: Any, **more: Any) -> Any:
        return self.function(*values, **more)

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*values: Any, num_warps: int = 0, num_stages: int = 0, **more: Any) -> None:
            values = tuple(Pointer(one.numpy()) if isinstance(one, torch.Tensor) else one for one in values)
            for Kernel.program in range(grid[0]):
                self.function(*values, **more)

        return launch


def block(value: Any, dtype: type) -> Words:
    return np.asarray(value).astype(dtype).view(Words)


def load(pointer: Pointer, mask: Any, other: int, cache_modifier: str = "") -> Words:
    index = np.where(mask, pointer.index, 0)
    return block(np.where(mask, pointer.memory[index], other), pointer.memory.dtype.type)


def store(pointer: Pointer, value: Any) -> None:
    pointer.memory[pointer.index] = value


def sglangs_hash() -> Any:
    """Return ``gpu_tensor_hash`` of the installed SGLang, on numpy and without its assertions that ask for a GPU."""
    language: Any = ModuleType("triton.language")
    language.constexpr, language.uint32, language.uint64 = int, np.uint32, np.uint64
    language.program_id = lambda axis: Kernel.program
    language.full = lambda shape, value, dtype: block(value, dtype)
    language.zeros = lambda shape, dtype: block(0, dtype)
    language.zeros_like = lambda like: block(np.zeros(like.shape), like.dtype.type)
    language.arange = lambda start, end: block(np.arange(start, end), np.int64)
    language.where = lambda mask, a, b: np.where(mask, a, b).view(Words)
    language.sum = lambda values, axis: block(values.sum(axis=axis, dtype=values.dtype), values.dtype.type)
    language.static_range, language.load, language.store = range, load, store
    triton: Any = ModuleType("triton")
    triton.jit = lambda function=None, **_: Kernel if function is None else Kernel(function)
    triton.cdiv, triton.language = (lambda a, b: -(-a // b)), language
    package = find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "kernels/ops/memory/gpu_tensor_hash.py"
    names: dict[str, Any] = {"__name__": "gpu_tensor_hash"}
    with mock.patch.dict("sys.modules", {"triton": triton, "triton.language": language}):
        exec(compile(path.read_text(), str(path), "exec", optimize=1), names)
    return names["gpu_tensor_hash"]


def theirs(tensor: torch.Tensor) -> str:
    with np.errstate(over="ignore"):
        return f"{sglangs_hash()(tensor):016x}"


def ours(tensor: torch.Tensor) -> str:
    sums = WordSums(tensor.nbytes, tensor.device)
    sums.add(tensor)
    return sums.hexdigest()


def random_bytes(size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))


# --- The digest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1023, 4 * TILE - 1, 4 * TILE, 4 * TILE + 2, 12 * TILE + 8])
def test_every_length_has_the_digest_of_the_kernel(size: int) -> None:
    assert ours(random_bytes(size)) == theirs(random_bytes(size))
    assert ours(torch.zeros(0, 4)) == f"{0:016x}"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]
)
def test_every_dtype_has_the_digest_of_the_kernel(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (7, 9)).to(dtype)
    assert ours(tensor) == theirs(tensor)


def test_a_view_is_hashed_as_its_contiguous_copy() -> None:
    weight = random_bytes(256).view(torch.bfloat16).reshape(8, 16)
    for view in (weight.t(), weight[:, 3:9], weight.reshape(-1)[1:8], weight[1:]):
        assert ours(view) == theirs(view.clone())


def test_parts_may_come_in_any_order_and_cross_tiles() -> None:
    weight = random_bytes(4 * (2 * TILE + 100))
    for cuts in ([4 * TILE, 4 * TILE + 60, 100], [8], [4 * (TILE - 1)]):
        sums, starts = WordSums(weight.nbytes, weight.device), sorted([0, *cuts])
        for start, end in reversed([*zip(starts, [*starts[1:], weight.nbytes], strict=True)]):
            sums.add(weight[start:end], start=start)
        assert sums.hexdigest() == theirs(weight)


def test_one_bit_that_flips_and_words_that_change_places_are_noticed() -> None:
    weight = random_bytes(4000)
    flipped, swapped = weight.clone(), weight.view(torch.int32).flip(0)
    flipped[2000] ^= 1
    assert len({ours(one) for one in (weight, flipped, swapped)}) == 3


# --- Engines on GPUs --------------------------------------------------------------------------------------------------

MIXTURE = {"num_experts": 4, "num_key_value_heads": 2}


def engine(*ranks: dict[str, torch.Tensor]) -> EngineChecksums:
    digests = tuple({name: ours(tensor.contiguous()) for name, tensor in of_rank.items()} for of_rank in ranks)
    return EngineChecksums("http://a", repr(digests), digests)


def sent(weights: dict[str, torch.Tensor], **settings: Any) -> SentWeights:
    found = SentWeights(dtype="bfloat16", on_gpu=True, **settings)
    for name, weight in weights.items():
        found.add(name, weight)
    return found


def values(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).reshape(shape).to(torch.bfloat16)


def test_processes_that_outnumber_the_heads_of_keys_share_them_and_nothing_is_padded() -> None:
    query, key, value, down = values(8, 6), values(4, 6) + 1, values(4, 6) + 2, values(6, 8)
    names = ("q", "k", "v")
    weights = {f"l.self_attn.{n}_proj.weight": w for n, w in zip(names, (query, key, value), strict=True)}
    digests = sent(weights | {"l.mlp.down_proj.weight": down}, ranks=4, kv_heads=2)
    ranks = [
        {
            "l.self_attn.qkv_proj.weight": torch.cat([query[2 * r : 2 * r + 2], key[h : h + 2], value[h : h + 2]]),
            "l.mlp.down_proj.weight": down[:, 2 * r : 2 * r + 2],
        }
        for r, h in ((0, 0), (1, 0), (2, 2), (3, 2))
    ]
    assert digests.verify(engine(*ranks)) == 8
    with pytest.raises(WeightSyncError, match="qkv_proj"):
        digests.verify(engine(*ranks[1:], ranks[0]))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("odd", [False, True])
def test_experts_are_compared_in_any_order_whole_or_split(ranks: int, odd: bool) -> None:
    inner, hidden = (ranks, 3) if odd else (4, 6)  # odd: a matrix of an expert is no multiple of 4 bytes
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    experts = {
        f"l.mlp.experts.{number}.{part}_proj.weight": values(*shape) + 10 * number + len(part)
        for number, (part, shape) in product((2, 0, 3, 1), shapes.items())
    }
    digests = sent(experts, ranks=ranks, config=MIXTURE)

    def of_rank(rank: int) -> dict[str, torch.Tensor]:
        def share(number: int, part: str) -> torch.Tensor:
            weight = experts[f"l.mlp.experts.{number}.{part}_proj.weight"]
            return weight.tensor_split(ranks, int(part == "down"))[rank]

        both = [torch.cat([share(number, "gate"), share(number, "up")]) for number in range(4)]
        down = torch.stack([share(number, "down") for number in range(4)])
        return {"l.mlp.experts.w13_weight": torch.stack(both), "l.mlp.experts.w2_weight": down}

    right = [of_rank(rank) for rank in range(ranks)]
    assert digests.verify(engine(*right)) == 2 * ranks
    wrong = [{name: weight.flip(0) for name, weight in one.items()} for one in right]
    with pytest.raises(WeightSyncError, match="w13_weight"):
        digests.verify(engine(*wrong))


def test_latent_projections_are_whole_in_every_process_and_heads_are_split() -> None:
    config = {"kv_lora_rank": 4, "q_lora_rank": 6}
    weights = {
        "l.self_attn.kv_a_proj_with_mqa.weight": values(5, 8),
        "l.self_attn.q_a_proj.weight": values(6, 8) + 1,
        "l.self_attn.q_b_proj.weight": values(8, 6),
    }
    digests = sent(weights, ranks=2, kv_heads=4, config=config)
    kv, q, up = weights.values()
    fused = {"l.self_attn.fused_qkv_a_proj_with_mqa.weight": torch.cat([q, kv])}
    halves = [fused | {"l.self_attn.q_b_proj.weight": up[start : start + 4]} for start in (0, 4)]
    assert digests.verify(engine(*halves)) == 4
    stale = {"l.self_attn.fused_qkv_a_proj_with_mqa.weight": torch.cat([q, kv + 1])}
    with pytest.raises(WeightSyncError, match="fused_qkv_a_proj_with_mqa"):
        digests.verify(engine(halves[0], halves[1] | stale))


def test_weights_that_a_family_splits_in_an_unknown_way_are_not_compared() -> None:
    digests = sent({"l.linear_attn.in_proj.weight": values(4, 2)}, ranks=2)
    name = "l.linear_attn.in_proj.weight"
    assert digests.verify(engine({name: values(2, 2)}, {name: values(2, 2) + 4})) == 0
    assert digests.verify(engine({name: values(4, 2)}, {name: values(4, 2)})) == 2


def test_experts_are_not_compared_if_the_engine_appended_the_shared_ones() -> None:
    weights = {"l.mlp.shared_experts.down_proj.weight": values(2, 2)}
    weights |= {f"l.mlp.experts.{number}.down_proj.weight": values(2, 2) for number in range(2)}
    digests = sent(weights, config={"num_experts": 2})
    three = {"l.mlp.experts.w2_weight": torch.stack([values(2, 2)] * 3)}
    assert digests.verify(engine(three)) == 0
    with pytest.raises(WeightSyncError, match="w2_weight"):
        digests.verify(engine(three | {"l.mlp.shared_experts.down_proj.weight": values(2, 2)}))


def test_a_router_that_the_engine_keeps_in_float32_is_compared() -> None:
    bias = torch.tensor([1.0, 1.0 + 2**-12])
    digests = sent({"l.mlp.gate.e_score_correction_bias": bias})
    for held in (bias, bias.to(torch.bfloat16)):
        assert digests.verify(engine({"l.mlp.gate.e_score_correction_bias": held})) == 1
    with pytest.raises(WeightSyncError, match="e_score_correction_bias"):
        digests.verify(engine({"l.mlp.gate.e_score_correction_bias": bias + 1}))


def test_a_large_weight_is_hashed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_core.weights.checksums.CHUNK_WORDS", 1000)
    assert ours(random_bytes(5 * 4 * 1000 + 7)) == theirs(random_bytes(5 * 4 * 1000 + 7))
