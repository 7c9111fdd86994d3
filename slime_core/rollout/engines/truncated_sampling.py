"""Which tokens were left to sample from at each place, and the log-probabilities of the distribution over just those.

An engine reports log-probabilities after the temperature and before it cuts (sglang 0.5.23, layers/sampler.py:309), and
the likeliest tokens with theirs. From these the cut is found again, by the engine's own rule
(``top_k_top_p_min_p_sampling_from_probs_torch`` there): tokens in falling order of probability, of which those stay

    whose rank, from 0, is below top_k; before which at most top_p of the mass stands; of at least min_p times the first

All three read the probabilities before any cut; nothing is renormalised in between. What a grammar or a least number of
new tokens forbids has probability 0 there and never stays. Then, with ``S`` what stayed,

    log q(t) = log p(t) - log sum_{v in S} p(v)

The engine compares float32 numbers that it has not sent, and breaks ties in an order of its own. A token that was
sampled is therefore always counted among those that stayed, if it stands at the border; elsewhere it is an error.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import EngineError, RequestRefused
from slime_core.generation.sampling import Kept

FORBID = ("min_new_tokens", "json_schema", "regex", "ebnf", "structural_tag")
"""Fields of SGLang's sampling parameters that forbid tokens before probabilities are taken."""

BORDER = 1e-3
"""Share of a probability, and of the whole mass, within which a token counts as standing at the border of the cut."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """The limits of the tokens that may be sampled.

    Example: ``Truncation.of({"top_p": 0.9, "top_k": -1}, most=64, vocab_size=16)`` is ``Truncation(16, 0.9, 0.0)``.

    Arguments:
        top_k: most tokens that are kept, and the number that is requested.
        top_p: mass in (0, 1] before the last token that stays.
        min_p: of the likeliest token's probability; 0: no bound.
    """

    top_k: int
    top_p: float = 1.0
    min_p: float = 0.0

    @staticmethod
    def of(fields: Mapping[str, Any], *, most: int | None, vocab_size: int | None) -> Truncation | None:
        """The cut that the fields of a request ask for; None: all tokens stay, or the likeliest one is taken.

        Arguments:
            fields: SGLang's sampling parameters.
            most: tokens that are kept where there is no top_k; None: the mask is not needed.
            vocab_size: there are no more; None: unknown.

        Raises:
            RequestRefused: min_p goes with another cut, and how the engine combines them depends on its backend.
        """
        top_k, top_p, min_p = fields.get("top_k", -1), fields.get("top_p", 1.0), fields.get("min_p", 0.0)
        if most is not None and min_p > 0 and (top_p < 1 or top_k != -1):
            raise RequestRefused(
                f"min_p {min_p:g} with top_p {top_p:g} and top_k {top_k}: with min_p, an engine cuts by its sampling "
                "backend's rule (pytorch takes top_p of the whole mass, flashinfer of what top_k left), so the "
                "set that a token was sampled from is unknown. Train with min_p alone, or with top_p and top_k"
            )
        is_cut = top_k != -1 or top_p < 1 or min_p > 0 or any(fields.get(name) for name in FORBID)
        if most is None or fields.get("temperature") == 0 or not is_cut:
            return None
        return Truncation(min(top_k if top_k > 0 else most, vocab_size or 2**30), top_p, min_p)

    def stays(self, probs_TK: NDArray[np.float64], *, slack: float = 0.0) -> NDArray[np.bool_]:
        """Which of the K likeliest tokens, in falling order, stay; with ``slack``, those at the border too."""
        before_TK = probs_TK.cumsum(axis=1) - probs_TK
        in_mass_TK = before_TK <= self.top_p + slack
        likely_TK = probs_TK >= probs_TK[:, :1] * self.min_p * (1 - slack)
        stays_TK = in_mass_TK & likely_TK & (probs_TK > 0)
        stays_TK[:, self.top_k :] = False
        return np.asarray(stays_TK)


def truncate(
    token_ids: Sequence[int], log_probs: Sequence[float], top: Sequence[Sequence[Sequence[Any]]], cut: Truncation
) -> tuple[Kept, array[float]]:
    """The tokens kept at each of t positions, and the log-probability of each sampled token among them, float32.

    Arguments:
        token_ids: that were sampled.
        log_probs: of these, before the cut.
        top: ``[log-prob, id, ...]`` of the likeliest tokens at each place, in falling order, before the cut.

    Raises:
        EngineError: the engine sent fewer than ``cut.top_k`` of them, or sampled a token that the cut leaves out.
    """
    if not token_ids:
        return Kept(array("i"), array("i", [0])), array("f")
    ids_TK, logs_TK = _table(token_ids, top, cut)
    sampled_T, logs_T = np.asarray(token_ids, np.int64), np.asarray(log_probs, np.float64)
    probs_TK = np.exp(logs_TK)
    stays_TK = cut.stays(probs_TK)
    sampled_TK = ids_TK == sampled_T[:, None]
    outside_T = ~(stays_TK & sampled_TK).any(axis=1)
    if outside_T.any():
        _require_border(sampled_T, logs_T, probs_TK, stays_TK, sampled_TK, outside_T, cut)
    # Tokens at the border are appended, whether they are among the K or not.
    mass_T = (probs_TK * stays_TK).sum(axis=1) + np.where(outside_T, np.exp(logs_T), 0.0)
    ids_TJ = np.concatenate([ids_TK, sampled_T[:, None]], axis=1)
    stays_TJ = np.concatenate([stays_TK, outside_T[:, None]], axis=1)
    offsets = np.concatenate([[0], stays_TJ.sum(axis=1).cumsum()])
    kept = Kept(_array("i", ids_TJ[stays_TJ], np.int32), _array("i", offsets, np.int32))
    return kept, _array("f", logs_T - np.log(mass_T), np.float32)


def _array(code: str, values: NDArray[Any], dtype: type[np.generic]) -> array[Any]:
    return array(code, values.astype(dtype).tobytes())


def _table(
    token_ids: Sequence[int], top: Sequence[Sequence[Sequence[Any]]], cut: Truncation
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The ids and the log-probabilities of the likeliest tokens, each [t, k]."""
    counts = {len(row) for row in top}
    if len(top) != len(token_ids) or min(counts) < cut.top_k or len(counts) > 1:
        raise EngineError(
            f"The engine sent {sorted(counts)} likeliest tokens at {len(top)} places; {cut.top_k} at each of "
            f"{len(token_ids)} were requested, to compute which tokens top_p and top_k kept"
        )
    shape = (len(top), counts.pop())
    ids = np.fromiter((entry[1] for entry in chain.from_iterable(top)), np.int64, shape[0] * shape[1])
    # JSON has no infinity: SGLang writes null for the logarithm of a probability that is 0 in float32.
    logs = (-np.inf if entry[0] is None else entry[0] for entry in chain.from_iterable(top))
    return ids.reshape(shape), np.fromiter(logs, np.float64, shape[0] * shape[1]).reshape(shape)


def _require_border(
    sampled_T: NDArray[np.int64],
    logs_T: NDArray[np.float64],
    probs_TK: NDArray[np.float64],
    stays_TK: NDArray[np.bool_],
    sampled_TK: NDArray[np.bool_],
    outside_T: NDArray[np.bool_],
    cut: Truncation,
) -> None:
    least_T = np.where(stays_TK, probs_TK, np.inf).min(axis=1)
    ties_T = np.exp(logs_T) >= least_T * (1 - BORDER)
    near_T = (cut.stays(probs_TK, slack=BORDER) & sampled_TK).any(axis=1)
    wrong = np.flatnonzero(outside_T & ~ties_T & ~near_T)
    if len(wrong):
        raise EngineError(
            f"The engine sampled token {sampled_T[wrong[0]]} of probability {np.exp(logs_T[wrong[0]]):.3g} at place "
            f"{wrong[0]} of a response, which top_p {cut.top_p:g}, top_k {cut.top_k} and min_p {cut.min_p:g} leave "
            "out. Its sampling rule differs from that of sglang 0.5.23, or a proxy changed the request; leave "
            "--rollout-top-p and --rollout-top-k out"
        )
