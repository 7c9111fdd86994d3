"""``custom_tis_function_path``: a function of slime's users that corrects the policy loss before it is summed.

The function gets the policy loss itself and may return any other, not only a weighted one. A token that it masks is
removed from every term of the loss; the divisor of the loss does not change.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from slime_compat.batches import joined, refuse_wider_mask, response_lengths, split, total_lengths
from slime_compat.paths import PathOptions
from slime_core.errors import PluginError
from slime_core.provisional import MicroBatch

__all__ = ["CustomCorrection"]

SETTING = "custom_tis_function_path"


class CustomCorrection:
    """A :class:`slime_core.provisional.LossCorrection` around a function of slime's signature."""

    def __init__(self, options: PathOptions) -> None:
        self._function = options.function(SETTING)
        self._args = options.arguments

    def __call__(
        self, loss_U: torch.Tensor, log_probs_U: torch.Tensor, mask_U: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
        """See the protocol. An idle micro-batch is returned unchanged, because it has no tokens to train.

        Raises:
            PluginError: the function failed, returned another structure than slime's functions do, or a loss without a
                gradient, which would train nothing.
        """
        if not micro.scale:
            return loss_U, mask_U, {}
        lengths = response_lengths(micro)
        returned = self._function(
            args=self._args,
            pg_loss=loss_U,
            train_log_probs=split(log_probs_U, micro),
            rollout_log_probs=split(micro.rollout_log_probs_U, micro),
            loss_masks=split(mask_U, micro),
            total_lengths=total_lengths(micro),
            response_lengths=lengths,
        )
        if not (isinstance(returned, tuple) and len(returned) == 3 and isinstance(returned[2], Mapping)):
            raise self._function.refused(returned, "a tuple of the policy loss, the loss masks and a dict of metrics")
        loss, masks, metrics = returned
        corrected_U = joined(self._function, "the policy loss", loss, loss_U, lengths)
        if loss_U.requires_grad and not corrected_U.requires_grad:
            raise PluginError(
                f"{self._function}: the policy loss came back without a gradient, so it would train nothing; detach "
                "the weights only, and return pg_loss times them."
            )
        trained_U = joined(self._function, "the loss masks", masks, mask_U, lengths)
        refuse_wider_mask(self._function, trained_U, mask_U)
        named = {
            name: joined(self._function, f"metric {name!r}", values, micro.mask_U, lengths)
            for name, values in metrics.items()
        }
        return corrected_U, trained_U, named
