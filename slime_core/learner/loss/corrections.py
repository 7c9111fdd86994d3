"""Applies a run's off-policy corrections to a micro-batch, one after the other, and checks what they return.

The check runs on the device: it counts faulty tokens, the counts are summed with the metrics, and
:meth:`Corrections.refuse_faults` reads them once a step. Reading them in each micro-batch would wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from slime_core.errors import RunError
from slime_core.learner.checks import require_per_token, require_type
from slime_core.learner.micro_batches import MicroBatch
from slime_core.plugins.boundary import boundary
from slime_core.plugins.contracts import Correction, CorrectionOutput, CorrectionTerms, Segments

__all__ = ["Corrected", "Corrections", "NamedCorrection", "add_metrics"]

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
        weights_U: float32, the product of the weights; 1 without corrections, 0 where nothing is trained.
        trained_U: bool, what is left of the mask.
        metrics_U: a number a token by name.
        faults: count of faulty tokens, by :data:`FAULTS` and the correction.
    """

    weights_U: torch.Tensor
    trained_U: torch.Tensor
    metrics_U: dict[str, torch.Tensor] = field(default_factory=dict)
    faults: dict[str, torch.Tensor] = field(default_factory=dict)


class Corrections:
    """The corrections of a run in order; none: every weight is 1.

    Arguments:
        named: the components.
    """

    def __init__(self, named: Sequence[NamedCorrection] = ()) -> None:
        self._named = tuple(named)

    def __len__(self) -> int:
        return len(self._named)

    def __call__(
        self, log_probs_U: torch.Tensor, micro: MicroBatch, segments: Segments, *, current_U: torch.Tensor
    ) -> Corrected:
        """Weights and mask of the tokens of ``micro``; without gradient.

        Arguments:
            log_probs_U: float32 [u], the old ones of the policy loss: of the actor before the first optimizer step of
                the rollout, or of the engine where the run takes those.
            current_U: float32 [u], of the actor in this optimizer step.

        Raises:
            RunError: a correction failed, returned something else than one number a token, or a metric under a name
                that is taken.
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
            )
            with torch.no_grad(), boundary(named.label, "correcting a micro-batch", error=RunError):
                output = named.correct(terms)
            _require_contract(output, mask_U, named.label)
            result.faults[FAULTS + named.label] = _count_faults(output, mask_U)
            mask_U = output.mask_T.detach().float()
            result.trained_U = mask_U != 0
            result.weights_U = (result.weights_U * output.weights_T.detach()).where(result.trained_U, 0.0)
            add_metrics(result.metrics_U, output.metrics_T, of=named.label)
        return result

    def refuse_faults(self, metrics: dict[str, float], *, rollout: int) -> None:
        """Take the counts of faulty tokens out of a step's ``metrics``.

        Raises:
            RunError: one of them is not 0.
        """
        counts = {named.label: metrics.pop(FAULTS + named.label) for named in self._named}
        for label, count in counts.items():
            if count:
                raise RunError(
                    f"rollout {rollout}: {label} returned what is no correction for {count:.0f} response tokens: a "
                    "weight that is negative, NaN or infinite, a mask other than 0 and 1, or a mask that trains what "
                    "was masked before. Nothing was trained. Leave it out of --corrections, or report this to the "
                    "plugin's author."
                )


def add_metrics(per_token: dict[str, torch.Tensor], metrics_U: dict[str, torch.Tensor], *, of: str) -> None:
    """``per_token`` also holds ``metrics_U``, without gradient.

    Raises:
        RunError: a name is taken.
    """
    twice = sorted(per_token.keys() & metrics_U.keys())
    if twice:
        raise RunError(
            f"{of} reports the metric {', '.join(twice)}, which another part of the loss reports already; each needs "
            "its own name. Report this to the plugin's author."
        )
    per_token |= {name: values_U.detach() for name, values_U in metrics_U.items()}


def _require_contract(output: CorrectionOutput, mask_U: torch.Tensor, label: str) -> None:
    require_type(output, CorrectionOutput, label)
    columns = {"weights_T": output.weights_T, "mask_T": output.mask_T}
    require_per_token(columns, output.metrics_T, metrics_name="metrics_T", count=len(mask_U), label=label)


def _count_faults(output: CorrectionOutput, mask_U: torch.Tensor) -> torch.Tensor:
    weights_U, left_U = output.weights_T, output.mask_T.float()
    bad_weight_U = (left_U != 0) & ~(weights_U.isfinite() & (weights_U >= 0))
    bad_mask_U = ((left_U != 0) & (left_U != 1)) | ((left_U != 0) & (mask_U == 0))
    return (bad_weight_U | bad_mask_U).sum().double()
