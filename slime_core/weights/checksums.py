"""The digests that engines report for their weights, and the same digests of the weights that were sent.

An engine reports one digest for each of *its* parameters, which the sender computes too (sglang 0.5.23,
srt/utils/weight_checker.py; srt/managers/mm_utils.py, ``tensor_hash``):

    on a CPU    128 bits of XXH3 from a server that slime starts (slime-cpu, ``_slime_server.py``), the first 8 bytes
                of SHA-256 from any other
    on a GPU    64 bits, :class:`WordSums`

Each shows that the bytes arrived. None has to resist forgery, because a malicious engine could report any digest.

The engine concatenates the rows of query, key and value weights in ``qkv_proj``, of gate and up in ``gate_up_proj``, of
the two latent projections of multi-head latent attention in ``fused_qkv_a_proj_with_mqa``, and of all experts of a
layer in ``w13_weight`` and ``w2_weight``. Every process of an engine holds the same number of rows of embedding and
output weights, padded with zeros. On a CPU it pads heads and the intermediate size too, to a multiple of 32 for each
process (srt/configs/update_config.py, ``adjust_config_with_unaligned_cpu_tp``). On GPUs these have to be divisible, and
processes that outnumber the key-value heads share them (srt/layers/linear.py, ``QKVParallelLinear``).

The comparison proves the bytes end to end, through transport, naming, sharding and fusing.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from slime_core.errors import WeightSyncError
from slime_core.weights.engine_control import SHA_DIGITS, XXH3_DIGITS, EngineChecksums
from slime_core.weights.hugging_face import bytes_of, flat_bytes

QUERY_KEY_VALUE = {"q_proj": ("qkv_proj", 0, 3), "k_proj": ("qkv_proj", 1, 3), "v_proj": ("qkv_proj", 2, 3)}
GATE_UP = {"gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2)}
LATENT = {
    "q_a_proj": ("fused_qkv_a_proj_with_mqa", 0, 2),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1, 2),
}
"""Part of a Hugging Face name -> the engine's part, position, number of pieces (srt/models/qwen3.py and llama.py,
``load_weights``; ``LATENT``: srt/models/deepseek_common/deepseek_weight_loader.py)."""

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
EXPERT_STACKS = {"gate": ("w13_weight", 0, 2), "up": ("w13_weight", 1, 2), "down": ("w2_weight", 0, 1)}
"""The engine's stack of a layer's experts: its name, the position in one expert, pieces of one expert
(srt/layers/moe/fused_moe_triton/layer.py)."""

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
WIDE = (".gate_proj.", ".up_proj.", ".down_proj.")
KEY_VALUE_HEADS = (".k_proj.", ".v_proj.")
HEADS = (".q_proj.", *KEY_VALUE_HEADS, ".o_proj.", ".q_b_proj.", ".kv_b_proj.")
COLUMNS = (".o_proj.weight", ".down_proj.weight")
UNSHARDED = (".o_proj.bias", ".down_proj.bias")
"""Weights that an engine splits over its processes: VOCABULARY by tokens, WIDE by intermediate size, HEADS by heads; by
rows, COLUMNS by columns. Every process holds UNSHARDED and all other weights whole (srt/layers/linear.py,
``QKVParallelLinear``, ``MergedColumnParallelLinear``, ``RowParallelLinear``)."""

WHOLE = (*UNSHARDED, "layernorm.weight", "model.norm.weight", ".gate.weight", "_a_proj")
"""Weights that every process is known to hold whole. Other weights that are in none of the lists above are compared
only if all processes report the same digest, because a family may split them in a way that is unknown here."""

VOCABULARY_ROWS = 64
"""DEFAULT_VOCAB_PADDING_SIZE, srt/layers/vocab_parallel_embedding.py."""
WIDTH = 32
"""DEFAULT_MOE_PADDING_SIZE, srt/configs/update_config.py."""

SMALL = 2**23
"""Numbers of the largest weight that engines may keep in float32 although the model is bfloat16: those of a router."""

SHOWN = 8
"""Names that a message lists."""


def require_agreement(held: Sequence[EngineChecksums]) -> None:
    """Check that all engines hold the same weights. Compares engines with the same number of processes and the same
    hash.

    Raises:
        WeightSyncError: an engine differs; names the first such engine and the weights that differ.
    """
    firsts: dict[tuple[int, int], EngineChecksums] = {}
    for other in held:
        first = firsts.setdefault((len(other.ranks), other.digits), other)
        if other.total != first.total:
            raise WeightSyncError(
                f"After the update {other.url} holds other weights than {first.url}: "
                f"{_different(first.ranks, other.ranks)}"
            )


def require_all_overwritten(before: Sequence[EngineChecksums], overwritten: Sequence[EngineChecksums]) -> None:
    """Check that every weight of every process of every engine differs from ``before``.

    Raises:
        WeightSyncError: an engine still holds a weight, so the check could not detect that it is not published; names
            the weights of the first such engine.
    """
    for old, new in zip(before, overwritten, strict=True):
        same = sorted({name for a, b in zip(old.ranks, new.ranks, strict=True) for name in a if a[name] == b[name]})
        if same:
            raise WeightSyncError(
                f"The check of publications overwrites all weights of an engine, but {old.url} still holds "
                f"{listed(same)} afterwards. Leave --check-weight-update-equal out for this model."
            )


def require_restored(before: Sequence[EngineChecksums], after: Sequence[EngineChecksums]) -> None:
    """Check that every process of every engine holds the same weights as in ``before``.

    Raises:
        WeightSyncError: an engine differs; names the first such engine and the weights that differ.
    """
    for old, new in zip(before, after, strict=True):
        lost = _different(old.ranks, new.ranks)
        if lost:
            raise WeightSyncError(
                f"Weights were spoiled and published again; {old.url} does not hold its earlier weights: {lost}. "
                "They are not published, or not as the checkpoint has them: compare the model spec's export with the "
                "engine's load_weights."
            )


Digest = Callable[[], str]
"""Returns hexadecimal digits; on a GPU it waits for the kernels that computed them."""


class SentWeights:
    """Digests of the sent weights, under the engines' names; add every weight once, in any order.

    Keeps the pieces of a fused parameter, uncopied, until the last piece is added. On a GPU it does not keep experts.

    Arguments:
        dtype: of the engines' weights, torch's name; the engines convert the weights that they receive.
        ranks: processes of one engine (its tensor parallel size).
        kv_heads: key-value heads of the model; they, and their query heads, are padded to a multiple of ``ranks``. 0:
            no padding is needed.
        digits: hexadecimal digits of the engines' digests, which identify the hash function on a CPU.
        config: of the model, as in ``config.json``; decides which weights the engines fuse.
        on_gpu: the engines run on GPUs; digests are computed on the devices of the weights.
        stacks: whether the engines' stacks of experts are compared; False: their layout is unknown. Without GPUs, those
            of engines of several processes never are.
    """

    def __init__(
        self,
        *,
        dtype: str,
        ranks: int = 1,
        kv_heads: int = 0,
        digits: int = SHA_DIGITS,
        config: Mapping[str, Any] | None = None,
        on_gpu: bool = False,
        stacks: bool = True,
    ) -> None:
        self._fused = _fused(config or {})
        self._num_experts = _num_experts(config or {}) if stacks and (on_gpu or ranks == 1) else 0
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._digits = digits
        self._ranks = ranks
        self._kv_heads = kv_heads or ranks
        self._on_gpu = on_gpu
        self._digests: list[dict[str, list[Digest]]] = [{} for _ in range(ranks)]
        self._pieces: dict[str, dict[int, Sequence[torch.Tensor]]] = {}
        self._stacks: dict[str, tuple[set[int], list[WordSums]]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add the digests of ``tensor``, sent under the Hugging Face name ``name``."""
        parameter, position, count = self._place(name)
        shards = self._shards(name, tensor, self._dtype)
        if self._on_gpu and EXPERT.fullmatch(name) and count > 1 and shards[0].nbytes % WORD == 0:
            self._add_expert(parameter, position, count, shards)
            return
        pieces = self._pieces.setdefault(parameter, {})
        pieces[position] = shards
        if len(pieces) < count:
            return
        del self._pieces[parameter]
        for digests in self._digests:
            digests[parameter] = []
        self._record(parameter, [[pieces[index][rank] for index in range(count)] for rank in range(self._ranks)])
        if count == 1 and tensor.numel() <= SMALL and tensor.is_floating_point() and self._dtype != torch.float32:
            self._record(parameter, [[shard] for shard in self._shards(name, tensor, torch.float32)])

    def verify(self, held: EngineChecksums) -> int:
        """Compare the engine's weights with the sent weights; return how many could be compared. The other weights have
        names or a split that this class does not know.

        Raises:
            WeightSyncError: a weight differs from the sent weight.
        """
        if len(held.ranks) != self._ranks:
            return 0
        num_compared, different = 0, set()
        for sent, reported in zip(self._digests, held.ranks, strict=True):
            both = [name for name in sent.keys() & reported.keys() if self._knows_split(name, held)]
            num_compared += len(both)
            different |= {name for name in both if all(digest() != reported[name] for digest in sent[name])}
        if different:
            names = listed(sorted(different))
            raise WeightSyncError(f"After the update {held.url} does not hold the weights that were sent: {names}")
        return num_compared

    def _knows_split(self, name: str, held: EngineChecksums) -> bool:
        if name.endswith(tuple(stack for stack, _, _ in EXPERT_STACKS.values())):
            # An engine that lacks the shared experts has appended them to the stacks
            # (srt/models/deepseek_common/, "num_fused_shared_experts").
            shared = f"{name.rpartition('.experts.')[0]}.shared_experts."
            return all(not sent.startswith(shared) or sent in held.ranks[0] for sent in self._digests[0])
        unfused = name
        for piece, (fused, _, _) in self._fused.items():
            unfused = unfused.replace(f".{fused}.", f".{piece}.")
        if _is_split(unfused) or any(part in unfused for part in WHOLE):
            return True
        return len({of_rank.get(name) for of_rank in held.ranks}) == 1

    def _add_expert(self, stack: str, position: int, count: int, shards: Sequence[torch.Tensor]) -> None:
        """Add one matrix of an expert to the digests of its layer's stack, whose matrices have one size."""
        size = shards[0].nbytes
        added, sums = self._stacks.setdefault(
            stack, (set(), [WordSums(count * size, shard.device) for shard in shards])
        )
        for of_rank, shard in zip(sums, shards, strict=True):
            of_rank.add(shard, start=position * size)
        added.add(position)
        if len(added) == count:
            del self._stacks[stack]
            for digests, of_rank in zip(self._digests, sums, strict=True):
                digests[stack] = [of_rank.hexdigest]

    def _record(self, name: str, pieces_of_ranks: Sequence[Sequence[torch.Tensor]]) -> None:
        computed: dict[tuple[int, ...], Digest] = {}  # ranks that hold the whole weight share its digest
        for digests, pieces in zip(self._digests, pieces_of_ranks, strict=True):
            key = tuple(map(id, pieces))
            if key not in computed:
                computed[key] = _word_digest(pieces) if self._on_gpu else _digest(pieces, self._digits)
            digests[name].append(computed[key])

    def _place(self, name: str) -> tuple[str, int, int]:
        """Return the engine's parameter that holds the weight ``name``, the weight's position in it, and the number of
        its pieces."""
        if self._num_experts and (expert := EXPERT.fullmatch(name)):
            stack, position, count = EXPERT_STACKS[expert[3]]
            return f"{expert[1]}.{stack}", count * int(expert[2]) + position, count * self._num_experts
        piece = next((part for part in self._fused if f".{part}." in name), None)
        if piece is None:
            return name, 0, 1
        fused, position, count = self._fused[piece]
        return name.replace(piece, fused), position, count

    def _shards(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Return each rank's shard of ``tensor`` in ``dtype``."""
        full = tensor.detach().to(dtype) if self._on_gpu else tensor.detach().to("cpu", dtype)
        if not _is_split(name):
            return [full] * self._ranks
        if self._on_gpu and self._kv_heads < self._ranks and any(part in name for part in KEY_VALUE_HEADS):
            heads = full.tensor_split(self._kv_heads)
            return [heads[rank * self._kv_heads // self._ranks] for rank in range(self._ranks)]
        across = int(name.endswith(COLUMNS))
        shape = list(full.shape)
        shape[across] = self._padded_length(name, shape[across]) - shape[across]
        padded = torch.cat([full, full.new_zeros(shape)], across) if shape[across] else full
        return padded.tensor_split(self._ranks, across)

    def _padded_length(self, name: str, length: int) -> int:
        """Return the rows or columns that the engine's processes hold in total, padding included, for ``length`` sent
        rows or columns."""
        if any(part in name for part in VOCABULARY):
            return _multiple(length, math.lcm(VOCABULARY_ROWS, self._ranks))
        if self._on_gpu:
            return length
        if any(part in name for part in WIDE):
            return _multiple(length, self._ranks * WIDTH)
        return length // self._kv_heads * _multiple(self._kv_heads, self._ranks)


def _is_split(name: str) -> bool:
    return any(part in name for part in (*VOCABULARY, *WIDE, *HEADS)) and not name.endswith(UNSHARDED)


def _fused(config: Mapping[str, Any]) -> dict[str, tuple[str, int, int]]:
    """Return the weights that engines fuse, in the form of :data:`GATE_UP`."""
    if not config.get("kv_lora_rank"):
        return QUERY_KEY_VALUE | GATE_UP
    return LATENT | GATE_UP if config.get("q_lora_rank") else GATE_UP


def _num_experts(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts of a layer; 0: the model has none."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _digest(pieces: Iterable[torch.Tensor], digits: int) -> Digest:
    hashed = xxhash.xxh3_128() if digits == XXH3_DIGITS else hashlib.sha256()
    for piece in pieces:
        hashed.update(bytes_of(piece))
    digest = hashed.hexdigest()[:digits]
    return lambda: digest


def _word_digest(pieces: Sequence[torch.Tensor]) -> Digest:
    flat = flat_bytes(pieces[0]) if len(pieces) == 1 else torch.cat([flat_bytes(piece) for piece in pieces])
    sums = WordSums(flat.nbytes, flat.device)
    sums.add(flat)
    return sums.hexdigest


def _different(first: Sequence[Mapping[str, str]], second: Sequence[Mapping[str, str]]) -> str:
    names = sorted(
        {name for a, b in zip(first, second, strict=True) for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    )
    return listed(names)


def listed(names: Sequence[str]) -> str:
    """Return the first of ``names``, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# --- The digest of GPUs -----------------------------------------------------------------------------------------------

WORD = 4
"""Bytes of a word."""
TILE = 8192
"""Words whose hashes are added up before they are mixed with the length."""
CHUNK_WORDS = 512 * TILE
"""Words that are hashed at a time: the numbers in between take several times their memory."""

MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
FINAL_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
SEED = 0x243F6A88
PLACES = ((SEED, 0x27D4EB2D, 15), (SEED * 0x9E3779B1 ^ 0xDEADBEEF, 0x165667B1, 13))
"""Seed, factor and rotation of a word's index, for each half of the digest."""


class WordSums:
    """SGLang's digest of a tensor on a GPU, on any device (sglang 0.5.23, kernels/ops/memory/gpu_tensor_hash.py).

    Each half of the 64 bits is the sum of the mixed 32-bit words of a tile, mixed again with the number of bytes;
    digests of tiles are added up modulo 2**64. torch has no arithmetic on unsigned words; that on int32 wraps around,
    so it gives the same bits.

    Arguments:
        nbytes: of the tensor.
        device: of the pieces that are added.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._num_words = -(-nbytes // WORD)
        self._sums = torch.zeros(len(PLACES), -(-self._num_words // TILE), dtype=torch.int64, device=device)

    def add(self, piece: torch.Tensor, *, start: int = 0) -> None:
        """Add a part of the tensor, once.

        Arguments:
            start: position of the part's first byte, a multiple of 4.
        """
        flat = flat_bytes(piece)
        if not len(flat):
            return
        if surplus := len(flat) % WORD:
            flat = torch.cat([flat, flat.new_zeros(WORD - surplus)])
        if flat.storage_offset() % WORD:
            flat = flat.clone()
        first = start // WORD
        for words in flat.view(torch.int32).split(CHUNK_WORDS):
            self._add(words, first)
            first += len(words)

    def hexdigest(self) -> str:
        """Return 16 hexadecimal digits."""
        if not self._num_words:
            return f"{0:0{SHA_DIGITS}x}"
        tiles = _mix(self._sums.cpu().to(torch.int32) ^ _signed(self._num_words * WORD)).to(torch.int64) & 0xFFFFFFFF
        high, low = tiles.sum(1).tolist()
        digest = (high << 32) + low
        for shift, factor in FINAL_MIX:
            digest &= 2**64 - 1
            digest = (digest ^ digest >> shift) * factor
        return f"{digest:0{SHA_DIGITS}x}"

    def _add(self, words: torch.Tensor, first: int) -> None:
        index = torch.arange(first, first + len(words), dtype=torch.int64, device=words.device).to(torch.int32)
        tile, before = divmod(first, TILE)
        after = -(before + len(words)) % TILE
        for half, (seed, factor, bits) in enumerate(PLACES):
            rotated = (index << bits) | _shifted(index, 32 - bits)
            mixed = _mix(words ^ (index * _signed(factor) + _signed(seed)) ^ rotated)
            sums = torch.nn.functional.pad(mixed, (before, after)).view(-1, TILE).sum(1, dtype=torch.int64)
            self._sums[half, tile : tile + len(sums)] += sums


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Return murmur3's final mix of int32 words."""
    for shift, factor in MIX:
        words = (words ^ _shifted(words, shift)) * _signed(factor)
    return words


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int32 words to the right, as if they were unsigned."""
    shifted: torch.Tensor = (words >> bits) & (2 ** (32 - bits) - 1)
    return shifted


def _signed(word: int) -> int:
    """Return the int32 with the bits of the lower half of ``word``."""
    return (word + 2**31) % 2**32 - 2**31
