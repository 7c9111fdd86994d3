"""Log-probabilities and entropies of tokens, from logits whose vocabulary may be split over ranks, chunk by chunk.

Of a row ``z = logits / temperature``: its largest entry ``m``, ``S = sum_v exp(z_v - m)`` and
``E = sum_v exp(z_v - m) (z_v - m)``, whence for a token ``t``

    log p_t = (z_t - m) - log S          d log p_t / d z_v = [v = t] - p_v
    H       = log S - E / S              d H / d z_v       = -p_v (log p_v + H)

(Cover and Thomas, Elements of Information Theory, eq. 2.1; the derivatives follow from the softmax Jacobian.) Both
terms of ``H`` are at least 0, so nothing cancels, and ``m`` is never added to ``log S``, which large logits would round
away. A logit of -inf adds 0 to ``H``, the limit of p log p. A rank that holds part of the vocabulary computes
``m``, ``S`` and ``E`` of that part; all ranks exchange them once, for all rows, and add them up in the same order.

Truncated sampling (top-p, top-k) samples a token from a set ``K`` of the vocabulary:

    log q_t = z_t - log sum_{v in K} exp(z_v)          d log q_t / d z_v = [v = t] - [v in K] q_v

A :class:`KeptTokens` mask records the sets. Later log-probabilities of the tokens use the same sets, so old and new
distributions have the same support and their ratio is an importance ratio (DeepSeek-V3.2, 2512.02556, section 3.1,
"keep sampling mask"). ``H`` stays that of the whole vocabulary.

:func:`log_probs_and_entropy` takes logits. In bfloat16 they have 8 bits: those between 16 and 32 are multiples of 1/8.
:func:`projected_log_probs` takes the two factors of the logits and multiplies them in float32, a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime_core.errors import RunError

__all__ = ["KeptTokens", "log_probs_and_entropy", "projected_log_probs"]


CACHED_NUMBERS = 2**20
"""Logits that a CPU computes with at a time: 4 MiB of float32. A block is read and written about ten times, which is
faster while it is in the caches."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The sets of tokens from which u tokens were sampled, one set after the other.

    Example, of three tokens, the first sampled from 7 and 2, the second from all, the third from 5 alone: ``ids_S = [7,
    2, 5]``, ``counts_U = [2, 0, 1]``.

    Arguments:
        ids_S: int64 [s], numbers in the whole vocabulary; no set holds one twice.
        counts_U: int64 [u], size of each set; 0: the whole vocabulary.
    """

    ids_S: torch.Tensor
    counts_U: torch.Tensor

    @property
    def is_truncated_U(self) -> torch.Tensor:
        """Bool [u]: places where sampling was truncated."""
        return self.counts_U > 0

    def entries(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids of the sets at ``places``, int64 [n], set after set, and each id's index in ``places``."""
        counts = self.counts_U[places]
        firsts = self.counts_U.cumsum(0)[places] - counts
        of_n = torch.repeat_interleave(torch.arange(len(places), device=places.device), counts)
        ordinals_n = torch.arange(len(of_n), device=places.device) - (counts.cumsum(0) - counts)[of_n]
        return self.ids_S[firsts[of_n] + ordinals_n], of_n

    def at(self, places: torch.Tensor) -> KeptTokens:
        """Return the sets at ``places``."""
        return KeptTokens(self.entries(places)[0], self.counts_U[places])


def log_probs_and_entropy(
    logits_TV: torch.Tensor,
    *,
    rows_U: torch.Tensor,
    targets_U: torch.Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = True,
    consume: bool = False,
    kept_tokens: KeptTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log p(token), and the entropy in nats of the token's distribution; float32 [u], differentiable once.

    Beyond the logits, and their gradient unless they are consumed, at most ``chunk_size`` rows of float32 are in memory
    at a time, forward and backward; but never less than two. Rows that predict nothing get a gradient of 0.
    The sets of ``kept_tokens`` add a few numbers for each of their entries, of a block of tokens at a time.

    Arguments:
        logits_TV: floating point [t, v], this rank's part of the vocabulary; parts are equally large, in the order of
            ranks. Computed in float32, or in float64 if the logits are float64.
        rows_U: int64 [u], the row that predicts each token; several tokens may share one.
        targets_U: int64 [u], numbers in the whole vocabulary.
        temperature: divides the logits.
        chunk_size: rows; None for all.
        group: the ranks that share the vocabulary; None if this rank has all of it.
        with_entropy: False for less work: None is returned instead of the entropy.
        consume: the backward pass writes the gradient over the logits, so no other code may read them later: autograd
            raises an error if another operation saved them, and at a second pass through the same graph.
        kept_tokens: the set of tokens that each token was sampled from, itself included: log p is over that set, the
            entropy over the whole vocabulary. If None, both are over the whole vocabulary.
    """
    on_cpu = logits_TV.device.type == "cpu"
    cached = max(CACHED_NUMBERS // max(logits_TV.size(1), 1), 1) if on_cpu else None
    how = _How(temperature, chunk_size, group, with_entropy, consume, kept_tokens, cached)
    results: tuple[torch.Tensor, torch.Tensor | None] = _LogProbsAndEntropy.apply(  # type: ignore[no-untyped-call]
        logits_TV, rows_U, targets_U, how
    )
    return results


def projected_log_probs(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    *,
    rows_U: torch.Tensor,
    targets_U: torch.Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = True,
    kept_tokens: KeptTokens | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return :func:`log_probs_and_entropy` of the logits ``hidden weight^T``, which are products in float32.

    At most ``chunk_size`` rows of logits are in memory at a time, but never less than two: the backward pass computes
    them again. Their gradient is rounded to the dtype of the factors; that of the weights is added up in float32.

    Arguments:
        hidden_TH: [t, h]; with a group, its gradient is that of this rank's part of the vocabulary.
        weight_VH: [v, h], this rank's part of the vocabulary, in the dtype of ``hidden_TH``.
        rows_U, targets_U, temperature, chunk_size, group, with_entropy, kept_tokens: see :func:`log_probs_and_entropy`.
    """
    # A chunk of logits, and as many rows while they are computed with.
    size = None if chunk_size is None else max(chunk_size // 2, 1)
    how = _How(temperature, size, group, with_entropy, consume=True, kept_tokens=kept_tokens)
    results: tuple[torch.Tensor, torch.Tensor | None] = _ProjectedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, rows_U, targets_U, how
    )
    return results


class _ProjectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        rows_U: torch.Tensor,
        targets_U: torch.Tensor,
        how: _How,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.how = how
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_TH, weight_VH, rows_U, targets_U)
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        log_probs_U = torch.empty(rows_U.shape, dtype=dtype, device=hidden_TH.device)
        entropy_U = torch.empty_like(log_probs_U) if how.with_entropy else None
        multiply = _multiplier(weight_VH)
        for chunk in _chunks(rows_U, targets_U, how):
            log_probs_u, entropy_u = chunk.log_probs(multiply(hidden_TH[chunk.rows_r]), how)
            log_probs_U[chunk.tokens_u] = log_probs_u
            if entropy_U is not None and entropy_u is not None:
                entropy_U[chunk.tokens_u] = entropy_u
        return log_probs_U, entropy_U

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor | None) -> Any:
        _refuse_second_derivative()
        if all(slope_U is None for slope_U in slopes):
            return (None,) * 5
        hidden_TH, weight_VH, rows_U, targets_U = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        of_hidden_TH = torch.zeros_like(hidden_TH) if needs_hidden else None
        of_weight_VH: torch.Tensor | None = None
        multiply = _multiplier(weight_VH)
        for chunk in _chunks(rows_U, targets_U, ctx.how):
            hidden_rH = hidden_TH[chunk.rows_r]
            with torch.enable_grad():
                logits_rV = multiply(hidden_rH).requires_grad_()
                results = chunk.log_probs(logits_rV, ctx.how)
            used = [
                (result, slope[chunk.tokens_u])
                for result, slope in zip(results, slopes, strict=True)
                if slope is not None
            ]
            values, weights = zip(*used, strict=True)
            (of_logits_rV,) = torch.autograd.grad(values, logits_rV, weights)
            del logits_rV, results, used, values
            of_logits_rV = of_logits_rV.to(weight_VH.dtype)
            if of_hidden_TH is not None:
                of_hidden_TH[chunk.rows_r] = of_logits_rV @ weight_VH
            if needs_weight:
                part_VH = _product(of_logits_rV.t(), hidden_rH)
                of_weight_VH = part_VH if of_weight_VH is None else of_weight_VH.add_(part_VH)
        if of_weight_VH is not None:
            of_weight_VH = of_weight_VH.to(weight_VH.dtype)
        elif needs_weight:  # no token
            of_weight_VH = torch.zeros_like(weight_VH)
        return of_hidden_TH, of_weight_VH, None, None, None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some of the rows that predict tokens, and these tokens.

    Arguments:
        rows_r: the rows, ascending.
        tokens_u: numbers of the tokens among all.
        of_u: index in ``rows_r`` of each token's row.
        targets_u: the tokens.
    """

    rows_r: torch.Tensor
    tokens_u: torch.Tensor
    of_u: torch.Tensor
    targets_u: torch.Tensor

    def log_probs(self, logits_rV: torch.Tensor, how: _How) -> tuple[torch.Tensor, torch.Tensor | None]:
        return log_probs_and_entropy(
            logits_rV,
            rows_U=self.of_u,
            targets_U=self.targets_u,
            temperature=how.temperature,
            chunk_size=how.chunk_size,
            group=how.group,
            with_entropy=how.with_entropy,
            consume=how.consume,
            kept_tokens=None if how.kept_tokens is None else how.kept_tokens.at(self.tokens_u),
        )


def _chunks(rows_U: torch.Tensor, targets_U: torch.Tensor, how: _How) -> Iterator[_Chunk]:
    rows_R, of_U = torch.unique(rows_U, return_inverse=True)
    size = how.chunk_size or max(len(rows_R), 1)
    blocks = [(start, min(start + size, len(rows_R))) for start in range(0, len(rows_R), size)]
    for (start, end), tokens_u in zip(blocks, _tokens(of_U, blocks), strict=True):
        yield _Chunk(rows_R[start:end], tokens_u, of_U[tokens_u] - start, targets_U[tokens_u])


def _multiplier(weight_VH: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the product of its argument [r, h] with the weights, in float32 or better: [r, v]."""
    if not weight_VH.is_cuda:
        weight_VH = weight_VH.to(torch.promote_types(weight_VH.dtype, torch.float32))  # once, not for each chunk
    return lambda hidden_rH: _product(hidden_rH, weight_VH.t())


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the matrix product in float32 or better. On a GPU, factors of 16 bits are not copied."""
    if a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    dtype = torch.promote_types(a.dtype, torch.float32)
    return a.to(dtype) @ b.to(dtype)


@dataclass(frozen=True, slots=True)
class _How:
    temperature: float
    chunk_size: int | None
    group: dist.ProcessGroup | None
    with_entropy: bool
    consume: bool
    kept_tokens: KeptTokens | None = None
    cached: int | None = None
    """Largest number of rows in a block; None for as many as a chunk allows."""

    @property
    def num_ranks(self) -> int:
        return 1 if self.group is None else int(self.group.size())

    def blocks(self, num_rows: int) -> list[tuple[int, int]]:
        """Start and end of each block of rows; two blocks fit a chunk, and no step holds more than two."""
        size = max((self.chunk_size or num_rows) // 2, 1)
        size = size if self.cached is None else min(size, self.cached)
        return [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


class _LogProbsAndEntropy(torch.autograd.Function):
    """Works on the R rows that predict a token, each once; ``of_U`` is the row of each token among them."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, rows_U: torch.Tensor, targets_U: torch.Tensor, how: _How
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows_R, of_U = torch.unique(rows_U, return_inverse=True)
        columns_U, held_U = _held(targets_U, logits_TV.size(1), how)
        chosen_U = _numbers(logits_TV[rows_U, columns_U], how).where(held_U, 0.0)
        highest_R, sum_R, moment_R, chosen_U = _over_ranks(_statistics(logits_TV, rows_R, how), chosen_U, how)
        log_sum_R = sum_R.log()
        entropy_R = log_sum_R - moment_R / sum_R
        highest_U, log_sum_U = highest_R[of_U], log_sum_R[of_U]
        if how.kept_tokens is not None:
            highest_U, log_sum_U = _over_sets(logits_TV, rows_U, how.kept_tokens, how, (highest_U, log_sum_U))
        ctx.how = how
        ctx.set_materialize_grads(False)
        rows = (rows_R, of_U, columns_U, held_U, highest_R, log_sum_R, entropy_R)
        ctx.save_for_backward(logits_TV, *rows, highest_U, log_sum_U)
        log_probs_U = (chosen_U - highest_U) - log_sum_U
        return log_probs_U, entropy_R[of_U] if how.with_entropy else None

    @staticmethod
    def backward(ctx: Any, slope_U: torch.Tensor | None, entropy_slope_U: torch.Tensor | None) -> Any:
        _refuse_second_derivative()
        logits_TV, rows_R, of_U, columns_U, held_U, highest_R, log_sum_R, entropy_R, *of_sets = ctx.saved_tensors
        how: _How = ctx.how
        level_R, bends = torch.zeros_like(highest_R), []
        if slope_U is not None:
            level_R.index_add_(
                0, of_U, slope_U if how.kept_tokens is None else slope_U.where(~how.kept_tokens.is_truncated_U, 0.0)
            )
        if entropy_slope_U is not None:
            bends = [torch.zeros_like(highest_R).index_add_(0, of_U, entropy_slope_U)]
            level_R = level_R + bends[0] * entropy_R
        columns_KR = torch.stack([highest_R, log_sum_R, level_R, *bends])
        result_TV = _cleared(logits_TV, rows_R, consume=how.consume)
        blocks = how.blocks(len(rows_R))
        for (start, end), tokens in zip(blocks, _tokens(of_U, blocks), strict=True):
            ones_r = None if slope_U is None else slope_U[tokens].where(held_U[tokens], 0.0)
            places_r = (of_U[tokens] - start, columns_U[tokens])
            if how.kept_tokens is not None and slope_U is not None and ones_r is not None:
                entries = _Entries.of(logits_TV, rows_R[of_U[tokens]], how.kept_tokens, tokens, how)
                ones_r = torch.cat([ones_r, entries.slopes(slope_U[tokens], *(column[tokens] for column in of_sets))])
                rows_n, columns_n = places_r[0][entries.of_n], entries.columns_n
                places_r = (torch.cat([places_r[0], rows_n]), torch.cat([places_r[1], columns_n]))
            gradient_rv = _gradient(logits_TV, rows_R[start:end], columns_KR[:, start:end], ones_r, places_r, how)
            result_TV.index_copy_(0, rows_R[start:end], gradient_rv)
            del gradient_rv
        return result_TV, None, None, None


def _gradient(
    logits_TV: torch.Tensor,
    rows_r: torch.Tensor,
    columns_Kr: torch.Tensor,
    ones_r: torch.Tensor | None,
    places_r: tuple[torch.Tensor, torch.Tensor],
    how: _How,
) -> torch.Tensor:
    """Return the gradient of a block, ``-p_v (level + bend log p_v)`` in each row, in the precision of the logits.

    Arguments:
        columns_Kr: ``m``, ``log S``, level, and bend if the entropy has a gradient.
        ones_r: added at ``places_r``, the chosen tokens and sets.
    """
    highest_r, log_sum_r, level_r, *bend_r = columns_Kr[:, :, None]
    logs_rv = _numbers(logits_TV.index_select(0, rows_r), how).sub_(highest_r).sub_(log_sum_r)
    if not bend_r:
        gradient_rv = logs_rv.exp_().mul_(-level_r)
    else:
        gradient_rv = logs_rv.exp()
        logs_rv.clamp_(min=torch.finfo(logs_rv.dtype).min)  # 0 x inf is NaN
        gradient_rv.mul_(logs_rv.mul_(-bend_r[0]).sub_(level_r))
    del logs_rv
    if ones_r is not None:
        gradient_rv.index_put_(places_r, ones_r, accumulate=True)
    return gradient_rv.div_(how.temperature).to(logits_TV.dtype)


@dataclass(frozen=True, slots=True)
class _Entries:
    """The logits of some tokens' sets, one after the other; 0 where another rank holds them."""

    numbers_n: torch.Tensor
    columns_n: torch.Tensor
    held_n: torch.Tensor
    of_n: torch.Tensor

    @staticmethod
    def of(
        logits_TV: torch.Tensor, rows_u: torch.Tensor, kept_tokens: KeptTokens, tokens_u: torch.Tensor, how: _How
    ) -> _Entries:
        ids_n, of_n = kept_tokens.entries(tokens_u)
        columns_n, held_n = _held(ids_n, logits_TV.size(1), how)
        return _Entries(_numbers(logits_TV[rows_u[of_n], columns_n], how), columns_n, held_n, of_n)

    def slopes(self, slope_u: torch.Tensor, highest_u: torch.Tensor, log_sum_u: torch.Tensor) -> torch.Tensor:
        """Return ``-slope q_v`` of every entry."""
        logs_n = self.numbers_n - highest_u[self.of_n] - log_sum_u[self.of_n]
        return (-slope_u[self.of_n] * logs_n.exp()).where(self.held_n, 0.0)


def _over_sets(
    logits_TV: torch.Tensor,
    rows_U: torch.Tensor,
    kept_tokens: KeptTokens,
    how: _How,
    everywhere: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``m`` and ``log S`` of each token's set, over all ranks; ``everywhere`` if sampling was not truncated."""
    set_2U = torch.zeros_like(torch.stack(everywhere))
    lowest = torch.finfo(set_2U.dtype).min
    set_2U[0] = lowest
    for start, end in how.blocks(len(rows_U)):
        tokens_u = torch.arange(start, end, device=rows_U.device)
        entries = _Entries.of(logits_TV, rows_U[start:end], kept_tokens, tokens_u, how)
        numbers_n = entries.numbers_n.where(entries.held_n, lowest)
        highest_u = set_2U[0, start:end].scatter_reduce_(0, entries.of_n, numbers_n, "amax")
        weights_n = (numbers_n - highest_u[entries.of_n]).exp_().where(entries.held_n, 0.0)
        set_2U[1, start:end].index_add_(0, entries.of_n, weights_n)
    every_N2U = set_2U[None]
    if how.num_ranks > 1:
        parts = [torch.empty_like(set_2U) for _ in range(how.num_ranks)]
        dist.all_gather(parts, set_2U, group=how.group)
        every_N2U = torch.stack(parts)
    highest_U = every_N2U[:, 0].amax(dim=0)
    sum_U = ((every_N2U[:, 0] - highest_U).exp() * every_N2U[:, 1]).sum(dim=0)
    return highest_U.where(kept_tokens.is_truncated_U, everywhere[0]), sum_U.log().where(
        kept_tokens.is_truncated_U, everywhere[1]
    )


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise RunError(
            "log-probs are differentiable once only, and create_graph requests a gradient of their gradient. "
            "Compute them with torch.log_softmax if a loss needs the second derivative."
        )


def _held(targets_U: torch.Tensor, width: int, how: _How) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the column of each target, 0 where another rank holds it, and whether this rank holds it."""
    columns_U = targets_U - width * (0 if how.group is None else how.group.rank())
    held_U = (columns_U >= 0) & (columns_U < width)
    return columns_U.where(held_U, 0), held_U


def _numbers(logits: torch.Tensor, how: _How) -> torch.Tensor:
    """Divide by the temperature, in float32 or better; may overwrite ``logits``, which callers copy."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(how.temperature)


def _statistics(logits_TV: torch.Tensor, rows_R: torch.Tensor, how: _How) -> torch.Tensor:
    """Return ``m``, ``S`` and ``E`` of each row, over this rank's part of the vocabulary."""
    local_3R = logits_TV.new_zeros(3, len(rows_R), dtype=torch.promote_types(logits_TV.dtype, torch.float32))
    for start, end in how.blocks(len(rows_R)):
        shifted_rv = _numbers(logits_TV.index_select(0, rows_R[start:end]), how)
        # If all of a rank's part is -inf, the difference from its highest would be NaN.
        highest_r = shifted_rv.amax(dim=-1).clamp_(min=torch.finfo(shifted_rv.dtype).min)
        shifted_rv.sub_(highest_r[:, None])
        local_3R[0, start:end] = highest_r
        if how.with_entropy:
            weights_rv = shifted_rv.exp()
            shifted_rv.clamp_(min=torch.finfo(shifted_rv.dtype).min)  # 0 x inf is NaN
            local_3R[1, start:end] = weights_rv.sum(dim=-1)
            local_3R[2, start:end] = weights_rv.mul_(shifted_rv).sum(dim=-1)
            del weights_rv
        else:
            local_3R[1, start:end] = shifted_rv.exp_().sum(dim=-1)
        del shifted_rv
    return local_3R


def _over_ranks(local_3R: torch.Tensor, chosen_U: torch.Tensor, how: _How) -> tuple[torch.Tensor, ...]:
    """Return ``m``, ``S`` and ``E`` over the whole vocabulary, and the chosen entries, from one exchange."""
    if how.num_ranks == 1:
        return (*local_3R, chosen_U)
    local = torch.cat([local_3R.flatten(), chosen_U])
    every = [torch.empty_like(local) for _ in range(how.num_ranks)]
    dist.all_gather(every, local, group=how.group)
    count = local_3R.size(1)
    highest_NR, sum_NR, moment_NR, chosen_NU = torch.stack(every).split([count, count, count, len(chosen_U)], dim=1)
    highest_R = highest_NR.amax(dim=0)
    below_NR = highest_NR - highest_R
    scale_NR = below_NR.exp()
    return (
        highest_R,
        (scale_NR * sum_NR).sum(dim=0),
        (scale_NR * (moment_NR + sum_NR * below_NR)).sum(dim=0),
        chosen_NU.sum(dim=0),
    )


def _cleared(logits_TV: torch.Tensor, rows_R: torch.Tensor, *, consume: bool) -> torch.Tensor:
    """Return the tensor for the gradient, with 0 in the rows that predict nothing.

    If it is the logits, it is detached: autograd still notices that they were overwritten.
    """
    if not consume:
        return torch.zeros_like(logits_TV)
    idle_T = torch.ones(len(logits_TV), dtype=torch.bool, device=logits_TV.device)
    idle_T[rows_R] = False
    return logits_TV.detach().masked_fill_(idle_T[:, None], 0.0)


def _tokens(of_U: torch.Tensor, blocks: list[tuple[int, int]]) -> Iterator[torch.Tensor]:
    """Iterate over the blocks; yield the tokens whose rows are in each."""
    order_U = of_U.argsort(stable=True)
    ends = torch.tensor([end for _, end in blocks], dtype=of_U.dtype, device=of_U.device)
    counts = torch.searchsorted(of_U[order_U], ends).diff(prepend=ends.new_zeros(1)).tolist()
    return iter(order_U.split(counts))
