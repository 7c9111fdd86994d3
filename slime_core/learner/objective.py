"""Turns the log-probabilities of a micro-batch into the loss to minimise, and its metrics. ``trained_model.py``
calls it in every optimizer step.

The loss of an optimizer step is a plain sum over response tokens, each already weighted by
``PackedMicroBatch.weights_U``: nothing here is divided. Metrics are summed with the same weights, so they are averages
of the same kind as the loss.

    Objective             policy loss + KL divergence from the reference - entropy bonus, after corrections
    Corrections           weights and masks for tokens that were sampled by other weights
    subtract_teacher_kl   on-policy distillation: subtracts the divergence from the teacher from the advantages
    mismatch_metrics      how much learner and engine differ, as metrics
    compare               the same for the parity gate, which ends the run if they differ too much
    MetricSums            metrics of a micro-batch; summed by name over micro-batches and ranks, a missing name as 0

Contracts of corrections are checked on the device: faulty tokens are counted, the counts are summed with the metrics,
and :meth:`Corrections.refuse_faults` reads them once per step. Reading them in each micro-batch would wait for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from slime_core.config.learning import AlgorithmConfig
from slime_core.contracts import (
    Correction,
    CorrectionOutput,
    CorrectionTerms,
    LossOutput,
    LossParts,
    LossSettings,
    LossTerms,
    PolicyLoss,
    Segments,
)
from slime_core.errors import RunError
from slime_core.learner.checks import require_per_token, require_type
from slime_core.learner.micro_batches import PackedMicroBatch
from slime_core.ops.losses import LARGEST_LOG_RATIO, approximate_kl
from slime_core.user_code.failures import boundary


@dataclass(slots=True)
class MetricSums:
    """Weighted sums of a micro-batch by metric name, and maxima, which are at least 0; without gradient."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    largest: dict[str, torch.Tensor] = field(default_factory=dict)


FAULTS = "faults/"
"""Prefix of a metric that counts the faulty tokens of a correction and is removed before metrics are reported."""


@dataclass(frozen=True, slots=True)
class NamedCorrection:
    """A correction, and its label in messages: the component and its plugin."""

    correct: Correction
    label: str


@dataclass(slots=True)
class Corrected:
    """The combined result of all corrections for u tokens.

    Arguments:
        weights_U: float32, the product of the weights; 1 without corrections, 0 at masked tokens.
        trained_U: bool, the mask after all corrections.
        metrics_U: metric name -> float [u].
        faults: :data:`FAULTS` and the label of a correction -> count of faulty tokens.
    """

    weights_U: torch.Tensor
    trained_U: torch.Tensor
    metrics_U: dict[str, torch.Tensor] = field(default_factory=dict)
    faults: dict[str, torch.Tensor] = field(default_factory=dict)


class Corrections:
    """The corrections of a run in order; without any, every weight is 1.

    Arguments:
        named: the components.
    """

    def __init__(self, named: Sequence[NamedCorrection] = ()) -> None:
        self._named = tuple(named)

    def __len__(self) -> int:
        return len(self._named)

    def __call__(
        self, log_probs_U: torch.Tensor, micro: PackedMicroBatch, segments: Segments, *, current_U: torch.Tensor
    ) -> Corrected:
        """Apply the corrections to the tokens of ``micro``; without gradient.

        Arguments:
            log_probs_U: float32 [u], the old ones of the policy loss: of the actor before the first optimizer step of
                the rollout, or of the engine if the run uses the engine's.
            current_U: float32 [u], of the actor in this optimizer step.

        Raises:
            RunError: a correction failed, returned something other than one number per token, or a metric under a
                name that is taken.
        """
        mask_U = micro.mask_U
        result = Corrected(torch.ones_like(mask_U), mask_U != 0)
        for named in self._named:
            terms = CorrectionTerms(
                log_probs_U,
                micro.rollout_log_probs_U,
                mask_U,
                segments,
                current_log_probs_T=current_U.detach(),
                advantages_T=micro.advantages_U,
                engine_columns_T=micro.engine_columns_U,
            )
            with torch.no_grad(), boundary(named.label, "correcting a micro-batch", error=RunError):
                output = named.correct(terms)
            _require_correction(output, mask_U, named.label)
            result.faults[FAULTS + named.label] = _count_faults(output, mask_U)
            mask_U = output.mask_T.detach().float()
            result.trained_U = mask_U != 0
            result.weights_U = (result.weights_U * output.weights_T.detach()).where(result.trained_U, 0.0)
            add_metrics(result.metrics_U, output.metrics_T, of=named.label)
        return result

    def refuse_faults(self, metrics: dict[str, float], *, rollout: int) -> None:
        """Remove the counts of faulty tokens from a step's ``metrics``, and check that they are 0.

        Raises:
            RunError: a count is not 0.
        """
        counts = {named.label: metrics.pop(FAULTS + named.label) for named in self._named}
        for label, count in counts.items():
            if count:
                raise RunError(
                    f"rollout {rollout}: {label} returned an invalid correction for {count:.0f} response tokens: a "
                    "weight that is negative, NaN or infinite, a mask other than 0 and 1, or a mask that trains what "
                    "was masked before. Nothing was trained. Leave it out of --corrections, or report this to the "
                    "plugin's author."
                )


def add_metrics(per_token: dict[str, torch.Tensor], metrics_U: Mapping[str, torch.Tensor], *, of: str) -> None:
    """Add ``metrics_U``, without gradient, to ``per_token``.

    Raises:
        RunError: a name is taken.
    """
    twice = sorted(per_token.keys() & metrics_U.keys())
    if twice:
        raise RunError(
            f"{of} reports the metric {', '.join(twice)}, which another part of the loss reports already; use "
            "another name. Report this to the plugin's author."
        )
    per_token |= {name: values_U.detach() for name, values_U in metrics_U.items()}


def _require_correction(output: CorrectionOutput, mask_U: torch.Tensor, label: str) -> None:
    require_type(output, CorrectionOutput, label)
    columns = {"weights_T": output.weights_T, "mask_T": output.mask_T}
    require_per_token(columns, output.metrics_T, metrics_name="metrics_T", count=len(mask_U), label=label)


def _count_faults(output: CorrectionOutput, mask_U: torch.Tensor) -> torch.Tensor:
    weights_U, left_U = output.weights_T, output.mask_T.float()
    bad_weight_U = (left_U != 0) & ~(weights_U.isfinite() & (weights_U >= 0))
    bad_mask_U = ((left_U != 0) & (left_U != 1)) | ((left_U != 0) & (mask_U == 0))
    return (bad_weight_U | bad_mask_U).sum().double()


DISTANCE, LARGEST_DISTANCE = "train_rollout_logprob_abs_diff", "train_rollout_logprob_max_diff"
"""Metrics of the distance between the learner's and the engines' log-probabilities."""


TOKENS, SUM, BEYOND, LARGEST = "parity_tokens", "parity_sum", "parity_beyond", "parity_largest"
"""Metrics of :func:`compare`, which ``ParityGate.check`` takes out of a step's metrics."""


@dataclass(slots=True, eq=False)
class Objective:
    """Policy loss, plus the divergence from the reference, minus the entropy bonus.

    Arguments:
        policy_loss: the component that turns log-probabilities and advantages into a loss per token.
        label: the component in messages, with its plugin.
        algorithm: clip ranges and coefficients.
        corrections: weight the policy loss of each token, and mask tokens.
        context_group: the ranks that share every row, over which sums over a sequence extend; None if a rank holds
            complete rows.
        parts: functions of plugins between the corrected policy loss and its sum, or instead of the loss, see
            :meth:`from_logits`.
        engine_sampled: whether engines sampled the tokens; if so, the difference from their log-probabilities is a
            metric.
    """

    policy_loss: PolicyLoss
    algorithm: AlgorithmConfig
    _: KW_ONLY
    label: str = "the policy loss"
    corrections: Corrections = field(default_factory=Corrections)
    context_group: Any = None
    parts: LossParts = field(default_factory=LossParts)
    engine_sampled: bool = True

    @property
    def reads_old(self) -> bool:
        """True if the loss reads the old log-probabilities anywhere except in the policy loss."""
        corrects = self.parts.correct is not None or len(self.corrections) > 0
        return corrects or self.algorithm.use_unbiased_kl or self.algorithm.get_mismatch_metrics

    def take_from_engine(self, micro_batches: Iterable[PackedMicroBatch]) -> None:
        """Use the engine's log-probabilities as the old ones; 0 at masked tokens, for which it may have none."""
        for micro in micro_batches:
            micro.old_log_probs_U = micro.rollout_log_probs_U.where(micro.mask_U != 0, 0.0)

    def __call__(
        self, log_probs_U: torch.Tensor, entropy_U: torch.Tensor, micro: PackedMicroBatch
    ) -> tuple[torch.Tensor, MetricSums]:
        """Compute the weighted loss of one micro-batch (a scalar with gradient) and its metrics.

        Metrics are averages over the tokens that the rollout trains, those that a correction masks included;
        ``pg_loss`` and ``loss`` are the minimised values, after corrections.

        Raises:
            RunError: the policy loss or a correction failed or broke its contract.
            PluginError: a function that the run names by path failed or broke its contract.
        """
        old_U = log_probs_U.detach() if micro.old_log_probs_U is None else micro.old_log_probs_U
        micro = subtract_teacher_kl(micro, old_U, self.algorithm.opd_kl_coef)
        segments = _Segments(micro, self.context_group)
        output = self._policy_terms(log_probs_U, old_U, micro, segments)
        corrected = self.corrections(old_U, micro, segments, current_U=log_probs_U)
        policy_U = (output.loss_T * corrected.weights_U).where(corrected.trained_U, 0.0)
        trained_U = corrected.trained_U
        shaped: Mapping[str, torch.Tensor] = {}
        if self.parts.correct is not None:
            policy_U, mask_U, shaped = self.parts.correct(policy_U, old_U, trained_U.float(), micro)
            trained_U = mask_U != 0
        summed_U = policy_U if self.parts.reduce is None else torch.zeros_like(policy_U)
        loss_U = summed_U - self.algorithm.entropy_coef * entropy_U
        difference_U = _difference(log_probs_U.detach(), micro)
        per_token = {"pg_loss": policy_U, "entropy_loss": entropy_U, **self._distance(difference_U)}
        if self.algorithm.use_kl_loss:
            per_token["kl_loss"] = self._divergence(log_probs_U, old_U, micro)
            loss_U = loss_U + self.algorithm.kl_loss_coef * per_token["kl_loss"]
        loss = _weighted(loss_U, micro.weights_U, trained_U)
        if self.algorithm.get_mismatch_metrics:
            per_token |= mismatch_metrics(
                log_probs_U if self.algorithm.use_rollout_logprobs else old_U,
                rollout_log_probs_U=micro.rollout_log_probs_U,
                mask_U=micro.mask_U,
                segments=segments,
            )
        add_metrics(per_token, output.metrics_T, of="the policy loss")
        add_metrics(per_token, corrected.metrics_U, of="a correction")
        add_metrics(per_token, micro.metrics_U, of="the advantage estimator")
        add_metrics(per_token, shaped, of="a plugin's step after corrections")
        if self.parts.reduce is None:
            return loss, _sums(loss, per_token, difference_U, micro, corrected.faults)
        pg_loss = self.parts.reduce(policy_U, trained_U.float(), micro)
        metrics = _sums(loss + pg_loss, per_token, difference_U, micro, corrected.faults)
        metrics.sums["pg_loss"] = pg_loss.detach()
        return loss + pg_loss, metrics

    def from_logits(
        self, logits_1TV: torch.Tensor, log_probs_U: torch.Tensor, entropy_U: torch.Tensor, micro: PackedMicroBatch
    ) -> tuple[torch.Tensor, MetricSums]:
        """Compute the loss of one micro-batch with ``of_logits``, and its metrics.

        Arguments:
            log_probs_U: float32 [u], without gradient.
        """
        assert self.parts.of_logits is not None
        old_U = log_probs_U if micro.old_log_probs_U is None else micro.old_log_probs_U
        micro = subtract_teacher_kl(micro, old_U, self.algorithm.opd_kl_coef)
        loss, metrics = self.parts.of_logits(logits_1TV.float(), micro)
        difference_U = _difference(log_probs_U, micro)
        per_token = {"entropy_loss": entropy_U, **self._distance(difference_U)}
        add_metrics(per_token, micro.metrics_U, of="the advantage estimator")
        measured = _sums(loss, per_token, difference_U, micro, {})
        return loss, MetricSums({**metrics, **measured.sums}, measured.largest)

    def _distance(self, difference_U: torch.Tensor) -> dict[str, torch.Tensor]:
        return {DISTANCE: difference_U} if self.engine_sampled else {}

    def _policy_terms(
        self, log_probs_U: torch.Tensor, old_U: torch.Tensor, micro: PackedMicroBatch, segments: Segments
    ) -> LossOutput:
        terms = LossTerms(
            log_probs_T=log_probs_U,
            old_log_probs_T=old_U,
            advantages_T=micro.advantages_U,
            mask_T=micro.mask_U,
            settings=LossSettings(
                eps_clip=self.algorithm.eps_clip,
                eps_clip_high=self.algorithm.eps_clip_high,
                eps_clip_c=self.algorithm.eps_clip_c,
            ),
            segments=segments,
            engine_columns_T=micro.engine_columns_U,
        )
        with boundary(self.label, "computing the loss of a micro-batch", error=RunError):
            output = self.policy_loss(terms)
        _require_losses(output, log_probs_U, self.label)
        return output

    def _divergence(self, log_probs_U: torch.Tensor, old_U: torch.Tensor, micro: PackedMicroBatch) -> torch.Tensor:
        assert micro.ref_log_probs_U is not None, "the reference's pass comes before the loss"
        trained_U = micro.mask_U != 0
        return approximate_kl(
            log_probs_U.where(trained_U, 0.0),
            base_log_probs_T=micro.ref_log_probs_U.where(trained_U, 0.0),
            estimator=self.algorithm.kl_loss_type,
            sampled_log_probs_T=old_U.where(trained_U, 0.0) if self.algorithm.use_unbiased_kl else None,
        )


def subtract_teacher_kl(micro: PackedMicroBatch, student_U: torch.Tensor, coefficient: float) -> PackedMicroBatch:
    """Return ``micro`` with the divergence from the teacher subtracted from its advantages (on-policy distillation).

    The divergence is the reverse one, KL(student || teacher), estimated at the tokens that the student sampled (GKD,
    2306.13649, section 3, with all data from the student). It is an undiscounted reward of one token, so it
    is subtracted from the token's advantage (Thinking Machines, On-Policy Distillation, 2025):

        A_t <- A_t - opd_kl_coef * (log p_student(t) - log p_teacher(t))

    Estimation and whitening come before; the divergence is in nats. Its k1 estimate at each token is the metric
    ``opd_reverse_kl``. Left out: the divergence over the whole vocabulary, which would need the teacher's distribution
    at every token, and responses that the teacher samples.

    Arguments:
        student_U: float32 [u], log-probabilities of the actor before the first optimizer step of the rollout.
        coefficient: weight of the divergence.
    """
    if micro.teacher_log_probs_U is None:
        return micro
    divergence_U = student_U.detach() - micro.teacher_log_probs_U
    return replace(
        micro,
        advantages_U=micro.advantages_U - coefficient * divergence_U,
        metrics_U=micro.metrics_U | {"opd_reverse_kl": divergence_U},
    )


def mismatch_metrics(
    log_probs_U: torch.Tensor, *, rollout_log_probs_U: torch.Tensor, mask_U: torch.Tensor, segments: Segments
) -> dict[str, torch.Tensor]:
    """Measure how much learner and engine differ; each metric float32 [u], without gradient, 0 at masked tokens.

    With d_t = log pi(o_t) - log mu(o_t), pi the learner and mu the engine that sampled the tokens, over trained tokens:

        mismatch_kl          -d_t                     k1 estimate of KL(mu || pi), nats; of either sign
        mismatch_k3          exp(d_t) - 1 - d_t       k3 estimate of the same; never negative
        mismatch_chi2_token  exp(2 d_t) - 1           estimate of chi^2(pi || mu), of a token: the variance of its ratio
        mismatch_chi2_seq    exp(2 sum_t d_t) - 1     the same of a whole response
        mismatch_ppl_ratio   exp(mean_t(-d_t))        perplexity of a response: the learner's over the engine's

    The last two are one number per response, repeated at each of its tokens. Exponents are clamped at 20 nats.

    Sources: J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020), with the roles swapped,
    as the engine sampled the tokens; chi^2(p || q) = E_q[(p / q)^2] - 1.

    Arguments:
        log_probs_U: float32 [u], of the learner.
        rollout_log_probs_U: float32 [u], of the engine.
        mask_U: float32 [u], 1 at trained tokens.
    """
    trained_U = mask_U != 0
    difference_U = (log_probs_U.detach() - rollout_log_probs_U).where(trained_U, 0.0).double()
    counts_b = segments.sums(mask_U.double()).clamp(min=1.0)
    sums_b = segments.sums(difference_U)
    values = {
        "mismatch_kl": -difference_U,
        "mismatch_k3": _expm1(difference_U) - difference_U,
        "mismatch_chi2_token": _expm1(2 * difference_U),
        "mismatch_chi2_seq": segments.spread(_expm1(2 * sums_b)),
        "mismatch_ppl_ratio": segments.spread((-sums_b / counts_b).clamp(max=LARGEST_LOG_RATIO).exp()),
    }
    return {name: values_U.where(trained_U, 0.0).float() for name, values_U in values.items()}


def _expm1(exponent: torch.Tensor) -> torch.Tensor:
    return torch.expm1(exponent.clamp(max=LARGEST_LOG_RATIO))


def _require_losses(output: LossOutput, log_probs_U: torch.Tensor, label: str) -> None:
    require_type(output, LossOutput, label)
    columns = {"loss_T": output.loss_T}
    require_per_token(columns, output.metrics_T, metrics_name="metrics_T", count=len(log_probs_U), label=label)
    if log_probs_U.requires_grad and not output.loss_T.requires_grad:
        raise RunError(
            f"{label} returned loss_T without a gradient, so it would train nothing; accepted: a loss that depends "
            "on log_probs_T. Report this to the plugin's author."
        )


def _sums(
    loss: torch.Tensor,
    per_token: dict[str, torch.Tensor],
    difference_U: torch.Tensor,
    micro: PackedMicroBatch,
    faults: dict[str, torch.Tensor],
) -> MetricSums:
    trained_U, weights_U = micro.mask_U != 0, micro.weights_U
    sums = {name: _weighted(values_U.detach(), weights_U, trained_U) for name, values_U in per_token.items()}
    sums |= {"loss": loss.detach(), "weight": weights_U.sum(), **faults}
    largest = difference_U.where(trained_U, 0.0).max() if difference_U.numel() else difference_U.sum()
    measured = {LARGEST_DISTANCE: largest} if DISTANCE in per_token else {}
    fresh_sums, fresh_largest = compare(difference_U, micro)
    return MetricSums(sums | fresh_sums, measured | fresh_largest)


def _weighted(values_U: torch.Tensor, weights_U: torch.Tensor, trained_U: torch.Tensor) -> torch.Tensor:
    # A masked token may hold anything, an infinity included; 0 x inf would poison the sum.
    return (values_U.where(trained_U, 0.0) * weights_U).sum()


class _Segments:
    """Sums over whole samples of a micro-batch, including the tokens of other context-parallel ranks."""

    def __init__(self, micro: PackedMicroBatch, context_group: Any) -> None:
        self._samples_U = micro.samples_U
        self._count = micro.num_samples
        self._group = context_group

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        zeros: Any = values_T.new_zeros(self._count)
        held: torch.Tensor = zeros.index_add(0, self._samples_U, values_T)
        if self._group is None:
            return held
        result: torch.Tensor = _SumOverRanks.apply(held, self._group)  # type: ignore[no-untyped-call]
        return result

    def spread(self, values_b: torch.Tensor) -> torch.Tensor:
        return values_b.index_select(0, self._samples_U)


class _SumOverRanks(torch.autograd.Function):
    """Each rank's loss depends on every rank's summand, so the gradients are summed over the ranks as well."""

    @staticmethod
    def forward(ctx: Any, values_b: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total_b = values_b.clone()
        dist.all_reduce(total_b, group=group)
        return total_b

    @staticmethod
    def backward(ctx: Any, gradient_b: torch.Tensor) -> Any:
        total_b = gradient_b.contiguous().clone()
        dist.all_reduce(total_b, group=ctx.group)
        return total_b, None


def _difference(log_probs_U: torch.Tensor, micro: PackedMicroBatch) -> torch.Tensor:
    """Return the distance of learner and engine; keep the learner's log-probabilities if they are compared."""
    if micro.learner_log_probs_U is not None:
        micro.learner_log_probs_U.copy_(log_probs_U)  # in place: the caller's micro-batch may be a copy
    return (log_probs_U - micro.rollout_log_probs_U).abs()


def compare(
    difference_U: torch.Tensor, micro: PackedMicroBatch
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return number, sum, count above the bound, and maximum of the fresh, trained tokens' absolute differences.

    Arguments:
        difference_U: absolute differences of log-probabilities in nats, without gradient.

    Returns:
        Metrics to sum over micro-batches and ranks, and metrics to take the maximum of. Empty if no token is marked.
    """
    if micro.fresh_U is None:
        return {}, {}
    # The mask too: a function that the run names by path may leave out tokens that have a weight.
    counted_U = micro.fresh_U & (micro.mask_U != 0) & (micro.weights_U != 0)
    # Never selected by the mask: on a GPU that would wait for the device.
    compared_U = difference_U.double().where(counted_U, 0.0)
    largest = compared_U.max() if compared_U.numel() else compared_U.sum()
    beyond = (compared_U >= micro.parity_bound).sum().double()
    return {TOKENS: counted_U.sum().double(), SUM: compared_U.sum(), BEYOND: beyond}, {LARGEST: largest}


# --- Metrics of a step ------------------------------------------------------------------------------------------------


def reduce_metrics(parts: Sequence[MetricSums], group: Any) -> dict[str, float]:
    """Return sums and maxima over micro-batches and ranks, the same on every rank. Collective over ``group``.

    Ranks exchange them by name, because plugins may report different metrics for different samples.

    Arguments:
        parts: one per micro-batch; empty on all ranks of the group, or on none of them.
    """
    if not parts:
        return {}
    sums = _over_parts([part.sums for part in parts], torch.sum)
    largest = _over_parts([part.largest for part in parts], torch.max)
    numbers = iter(torch.stack([*sums.values(), *largest.values()]).tolist())  # the one wait for the device
    mine = {name: next(numbers) for name in sums}, {name: next(numbers) for name in largest}
    ranks: list[Any] = [mine]
    if group.size() > 1:
        ranks = [None] * group.size()
        dist.all_gather_object(ranks, mine, group=group)
    of_sums, of_largest = zip(*ranks, strict=True)
    added = {name: sum(rank.get(name, 0.0) for rank in of_sums) for name in _names(of_sums)}
    return added | {name: max(rank.get(name, 0.0) for rank in of_largest) for name in _names(of_largest)}


def _over_parts(
    parts: Sequence[Mapping[str, torch.Tensor]], reduce: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    device = next((value.device for part in parts for value in part.values()), None)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return {name: reduce(torch.stack([part.get(name, zero).double() for part in parts])) for name in _names(parts)}


def average_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over the optimizer steps; of ``..._max_diff`` take the maximum."""
    return {name: _over_steps(name, [step.get(name, 0.0) for step in steps]) for name in _names(steps)}


def _over_steps(name: str, values: list[float]) -> float:
    return max(values) if name.endswith("_max_diff") else sum(values) / len(values)


def _names(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return every name once, in the order of its first occurrence."""
    return list(dict.fromkeys(name for part in parts for name in part))
