"""Sets of tokens, one a place, that a distribution is cut to: top-p, top-k and what else leaves tokens out.

For a position with the set ``S``, logits ``z`` and the token ``t`` that was sampled from it,

    log q_t = z_t - log sum_{v in S} exp(z_v)          d log q_t / d z_v = [v = t] - [v in S] q_v

Where a set is recorded when a token is sampled, and later log-probabilities of the token are taken over the same set,
old and new distributions have the same support, and their ratio is an importance ratio (DeepSeek-V3.2, 2512.02556,
section 3.1, "keep sampling mask").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["KeptTokens"]


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The sets of u places, one after the other.

    Example, of three tokens, the first sampled from 7 and 2, the second from all, the third from 5 alone: ``ids_S = [7,
    2, 5]``, ``counts_U = [2, 0, 1]``.

    Arguments:
        ids_S: int64 [s], numbers in the whole vocabulary; no set holds one twice.
        counts_U: int64 [u], size of each set; 0: the whole vocabulary.
    """

    ids_S: torch.Tensor
    counts_U: torch.Tensor

    @property
    def cut_U(self) -> torch.Tensor:
        """Bool [u]: places where something is left out."""
        return self.counts_U > 0

    def entries(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of the sets at ``places``, int64 [n], set after set, and at which of ``places`` each of them is."""
        counts = self.counts_U[places]
        firsts = self.counts_U.cumsum(0)[places] - counts
        of_n = torch.repeat_interleave(torch.arange(len(places), device=places.device), counts)
        ordinals_n = torch.arange(len(of_n), device=places.device) - (counts.cumsum(0) - counts)[of_n]
        return self.ids_S[firsts[of_n] + ordinals_n], of_n
