"""The functions that replace parts of the loss."""

from __future__ import annotations

from slime_compat import correction, loss, reducer
from slime_compat.options import PathOptions
from slime_core.provisional import LossParts

__all__ = ["loss_parts"]


def loss_parts(options: PathOptions) -> LossParts:
    """Import and check the loss functions that the run names by path; other parts are the core's.

    Raises:
        PluginError: a function cannot be imported, or its signature is not accepted.
    """
    named = options.sources.keys()
    return LossParts(
        of_logits=loss.CustomLoss(options) if loss.SETTING in named else None,
        correct=correction.CustomCorrection(options) if correction.SETTING in named else None,
        reduce=reducer.CustomReducer(options) if reducer.SETTING in named else None,
    )
