"""``custom_pg_loss_reducer_function_path``: a function that reduces the policy loss of a micro-batch to one number.

The number is multiplied by ``MicroBatch.scale``: one over the number of rollouts of the step that train a token, or,
with ``calculate_per_token_loss``, of its trained tokens. So a function that returns the sum of the samples' means (then
of the tokens) gives the core's gradients. Divergence from the reference and entropy keep the core's sum.
"""

from __future__ import annotations

import torch

from slime_compat.batches import refuse_no_gradient, response_lengths, split, total_lengths
from slime_compat.paths import PathOptions
from slime_core.provisional import MicroBatch

__all__ = ["CustomReducer"]

SETTING = "custom_pg_loss_reducer_function_path"


class CustomReducer:
    """A :class:`slime_core.provisional.LossReducer` around a function of slime's signature."""

    def __init__(self, options: PathOptions) -> None:
        self._function = options.function(SETTING)
        self._per_token = options.plan.settings.get("calculate_per_token_loss") is True

    def __call__(self, loss_U: torch.Tensor, mask_U: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """See the protocol. The loss of an idle micro-batch is 0, without a call: it has no tokens to divide by.

        Raises:
            PluginError: the function failed, or did not return one number with a gradient.
        """
        if not micro.scale:
            return loss_U[:0].sum()
        trained_U = loss_U.where(mask_U != 0, 0.0)
        reduce = self._function(total_lengths(micro), response_lengths(micro), split(mask_U, micro), self._per_token)
        if not callable(reduce):
            raise self._function.refused(reduce, "a function of the tokens' losses")
        with self._function.blamed("calling its reducer"):
            value = reduce(trained_U)
        return refuse_no_gradient(self._function, value) * micro.scale
