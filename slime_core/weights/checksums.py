"""Compares the checksums of the engines' weights with those of the weights that were sent.

An engine reports one digest for each of *its* parameters. On a CPU that is the first 8 bytes of the SHA-256 of the
parameter's bytes (sglang 0.5.23, srt/managers/mm_utils.py, ``tensor_hash``), so the sender can compute it too:
query, key and value weights end up one below the other in ``qkv_proj``, gate and up in ``gate_up_proj``. All of an
engine's processes hold parts of one size; what a weight lacks for that is filled up with zeros: rows of embedding and
output weights, heads, and the intermediate size, of which each process has a multiple of 32
(srt/configs/update_config.py, ``adjust_config_with_unaligned_cpu_tp``). That proves the bytes end to end, through
transport, naming, cutting and fusing. On a GPU the digest is another one: then the engines' agreement is what is left.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from slime_core.errors import WeightSyncError
from slime_core.weights.engine_control import EngineChecksums

if TYPE_CHECKING:
    import torch

__all__ = ["SentWeights", "require_agreement", "require_restored", "require_spoiled"]

FUSED = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
"""Part of a Hugging Face name -> the engine's part, position, number of pieces (srt/models/qwen3.py and llama.py,
``load_weights``)."""

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
WIDE = (".gate_proj.", ".up_proj.", ".down_proj.")
HEADS = (".q_proj.", ".k_proj.", ".v_proj.", ".o_proj.")
COLUMNS = (".o_proj.weight", ".down_proj.weight")
UNCUT = (".o_proj.bias", ".down_proj.bias")
"""What an engine cuts: by tokens, by intermediate size, by heads; its rows, or its columns. Everything else is whole in
every process (srt/layers/linear.py, ``QKVParallelLinear``, ``MergedColumnParallelLinear``, ``RowParallelLinear``)."""

VOCABULARY_ROWS = 64
"""DEFAULT_VOCAB_PADDING_SIZE, srt/layers/vocab_parallel_embedding.py."""
WIDTH = 32
"""DEFAULT_MOE_PADDING_SIZE, srt/configs/update_config.py."""

SHOWN = 4


def require_agreement(held: Sequence[EngineChecksums]) -> None:
    """Return if all engines hold the same weights. Engines with the same number of processes can be compared.

    Raises:
        WeightSyncError: names the first engine that differs, and the weights it differs in.
    """
    firsts: dict[int, EngineChecksums] = {}
    for other in held:
        first = firsts.setdefault(len(other.ranks), other)
        if other.total != first.total:
            raise WeightSyncError(
                f"After the update {other.url} holds other weights than {first.url}: "
                f"{_different(first.ranks, other.ranks)}"
            )


def require_spoiled(began: Sequence[EngineChecksums], spoiled: Sequence[EngineChecksums]) -> None:
    """Return if every weight of every process of every engine differs from ``began``.

    Raises:
        WeightSyncError: names the weights of the first engine that do not; a publication could not be seen in them.
    """
    for before, after in zip(began, spoiled, strict=True):
        kept = sorted(
            {name for a, b in zip(before.ranks, after.ranks, strict=True) for name in a if a[name] == b[name]}
        )
        if kept:
            raise WeightSyncError(
                f"The check of publications overwrites all weights of an engine, but {before.url} still holds "
                f"{_listed(kept)} afterwards. Leave --check-weight-update-equal out for this model."
            )


def require_restored(began: Sequence[EngineChecksums], ended: Sequence[EngineChecksums]) -> None:
    """Return if every process of every engine holds the same weights as in ``began``.

    Raises:
        WeightSyncError: names the first engine's weights that differ.
    """
    for before, after in zip(began, ended, strict=True):
        lost = _different(before.ranks, after.ranks)
        if lost:
            raise WeightSyncError(
                f"Weights were spoiled and published again; {before.url} does not hold what it began with: {lost}. "
                "They are not published, or not as the checkpoint has them: compare the model spec's export with the "
                "engine's load_weights."
            )


class SentWeights:
    """Digests of the sent weights, under the engines' names; add every weight once, in any order.

    Keeps the bytes of a fused parameter's pieces only until the last of them is added.

    Arguments:
        dtype: of the engines' weights, torch's name; the engines convert what they receive.
        ranks: processes of one engine (its tensor parallel size).
        kv_heads: key-value heads of the model; they, and the query heads of each, are padded to a multiple of
            ``ranks``. 0: they are one already.
    """

    def __init__(self, *, dtype: str, ranks: int = 1, kv_heads: int = 0) -> None:
        self._dtype = dtype
        self._ranks = ranks
        self._kv_heads = kv_heads or ranks
        self._digests: list[dict[str, str]] = [{} for _ in range(ranks)]
        self._pieces: dict[str, dict[int, list[bytes]]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add the digests of ``tensor``, sent under the Hugging Face name ``name``."""
        contents = [_bytes(shard) for shard in self._cut(name, tensor)]
        for part, (fused, position, count) in FUSED.items():
            if f".{part}." in name:
                self._add_piece(name.replace(part, fused), position, count, contents)
                return
        self._note(name, [contents])

    def verify(self, held: EngineChecksums) -> int:
        """The number of the engine's weights that equal the sent ones; the other weights have names that are not known
        here.

        Raises:
            WeightSyncError: a weight differs from the sent one.
        """
        if len(held.ranks) != self._ranks:
            return 0
        known = [
            {name: digest for name, digest in theirs.items() if name in ours}
            for ours, theirs in zip(self._digests, held.ranks, strict=True)
        ]
        sent = [{name: ours[name] for name in names} for ours, names in zip(self._digests, known, strict=True)]
        if wrong := _different(sent, known):
            raise WeightSyncError(f"After the update {held.url} does not hold what was sent: {wrong}")
        return sum(map(len, known))

    def _add_piece(self, name: str, position: int, count: int, contents: list[bytes]) -> None:
        pieces = self._pieces.setdefault(name, {})
        pieces[position] = contents
        if len(pieces) == count:
            self._note(name, [pieces[index] for index in range(count)])
            del self._pieces[name]

    def _note(self, name: str, pieces: Sequence[Sequence[bytes]]) -> None:
        for rank, digests in enumerate(self._digests):
            digests[name] = _digest(contents[rank] for contents in pieces)

    def _cut(self, name: str, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """The shard of ``tensor`` of each rank."""
        import torch

        kept = tensor.detach().to("cpu", getattr(torch, self._dtype))
        if not any(part in name for part in (*VOCABULARY, *WIDE, *HEADS)) or name.endswith(UNCUT):
            return [kept] * self._ranks
        across = int(name.endswith(COLUMNS))
        shape = list(kept.shape)
        shape[across] = self._padded(name, shape[across]) - shape[across]
        return torch.cat([kept, kept.new_zeros(shape)], across).tensor_split(self._ranks, across)

    def _padded(self, name: str, length: int) -> int:
        """Rows or columns that the engine's processes hold together, padding included, of ``length`` that were sent."""
        if any(part in name for part in HEADS):
            return length // self._kv_heads * _multiple(self._kv_heads, self._ranks)
        if any(part in name for part in WIDE):
            return _multiple(length, self._ranks * WIDTH)
        return _multiple(length, math.lcm(VOCABULARY_ROWS, self._ranks))


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(pieces: Iterable[bytes]) -> str:
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.digest()[:8].hex()


def _different(ours: Sequence[Mapping[str, str]], theirs: Sequence[Mapping[str, str]]) -> str:
    names = sorted(
        {name for a, b in zip(ours, theirs, strict=True) for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    )
    return _listed(names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
