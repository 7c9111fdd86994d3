"""What the engines hold against what was sent.

An engine reports one digest for each of *its* parameters. On a CPU that is the first 8 bytes of the SHA-256 of the
parameter's bytes (sglang 0.5.23, srt/managers/mm_utils.py, ``tensor_hash``), so whoever sent the weights can compute it
too: query, key and value weights end up one below the other in ``qkv_proj``, gate and up in ``gate_up_proj``, and the
rows of embedding and output weights are filled up with zeros to a multiple of 64. That proves the bytes end to end,
through broadcast, naming and fusing. On a GPU the digest is another one, and with tensor parallelism each rank holds a
part: then the engines' agreement is what is left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from slime_core.errors import WeightSyncError
from slime_core.weights.endpoints import HeldWeights

if TYPE_CHECKING:
    import torch

__all__ = ["SentWeights", "agree", "refuse_unrestored", "refuse_unspoiled"]

FUSED = {
    "q_proj": ("qkv_proj", 0, 3),
    "k_proj": ("qkv_proj", 1, 3),
    "v_proj": ("qkv_proj", 2, 3),
    "gate_proj": ("gate_up_proj", 0, 2),
    "up_proj": ("gate_up_proj", 1, 2),
}
"""Part of a Hugging Face name -> the engine's part, position, number of pieces (srt/models/qwen3.py and llama.py,
``load_weights``)."""

PADDED = ("embed_tokens.weight", "lm_head.weight")
ROWS = 64
"""DEFAULT_VOCAB_PADDING_SIZE, srt/layers/vocab_parallel_embedding.py."""

SHOWN = 4


def agree(held: Sequence[HeldWeights]) -> None:
    """Returns if all engines hold the same weights.

    Raises:
        WeightSyncError: names the first engine that differs, and the weights it differs in.
    """
    first = held[0]
    for other in held[1:]:
        if other.total != first.total:
            raise WeightSyncError(
                f"After the update {other.url} holds other weights than {first.url}: "
                f"{_different(first.ranks, other.ranks)}"
            )


def refuse_unspoiled(began: Sequence[HeldWeights], spoiled: Sequence[HeldWeights]) -> None:
    """Returns if no weight of any process of any engine is what it was in ``began``.

    Raises:
        WeightSyncError: names the first engine's weights that are; what is published could not be told from them.
    """
    for before, after in zip(began, spoiled, strict=True):
        kept = sorted(
            {name for a, b in zip(before.ranks, after.ranks, strict=True) for name in a if a[name] == b[name]}
        )
        if kept:
            raise WeightSyncError(
                f"Asked to compare weights before and after a publication; {before.url} still holds {_listed(kept)} "
                "after all its weights were spoiled. Leave --check-weight-update-equal out for this model."
            )


def refuse_unrestored(began: Sequence[HeldWeights], ended: Sequence[HeldWeights]) -> None:
    """Returns if every process of every engine holds what it held in ``began``.

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
    """Digests of what was sent, under the engines' names; feed it every weight once, in any order.

    Keeps the bytes of a fused parameter's pieces only until the last of them has come.

    Arguments:
        dtype: what the engines keep their weights in, torch's name; they cast what they receive.
    """

    def __init__(self, *, dtype: str) -> None:
        self._dtype = dtype
        self._digests: dict[str, str] = {}
        self._pieces: dict[str, dict[int, bytes]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Note ``tensor``, sent under the Hugging Face name ``name``."""
        content = self._bytes(name, tensor)
        for part, (fused, position, count) in FUSED.items():
            if f".{part}." in name:
                self._add_piece(name.replace(part, fused), position, count, content)
                return
        self._digests[name] = _digest([content])

    def verify(self, held: HeldWeights) -> int:
        """The number of the engine's weights that were proven equal to what was sent; the rest has names that are not
        known here.

        Raises:
            WeightSyncError: a weight is not what was sent.
        """
        if len(held.ranks) != 1:
            return 0
        known = {name: digest for name, digest in held.ranks[0].items() if name in self._digests}
        wrong = _different([{name: self._digests[name] for name in known}], [known])
        if wrong:
            raise WeightSyncError(f"After the update {held.url} does not hold what was sent: {wrong}")
        return len(known)

    def _add_piece(self, name: str, position: int, count: int, content: bytes) -> None:
        pieces = self._pieces.setdefault(name, {})
        pieces[position] = content
        if len(pieces) == count:
            self._digests[name] = _digest(pieces[index] for index in range(count))
            del self._pieces[name]

    def _bytes(self, name: str, tensor: torch.Tensor) -> bytes:
        import torch

        kept = tensor.detach().to("cpu", getattr(torch, self._dtype)).contiguous()
        content = kept.reshape(-1).view(torch.uint8).numpy().tobytes()
        if name.endswith(PADDED):
            content += bytes(-tensor.shape[0] % ROWS * (len(content) // tensor.shape[0]))
        return content


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
