"""``custom_advantage_function_path``: a function of slime's users as an advantage estimator of scope ``token``."""

from __future__ import annotations

from typing import Any

import torch

from slime_compat.batches import joined
from slime_compat.paths import PathOptions
from slime_core import Reductions, ResponseTokens, TokenAdvantages
from slime_core.errors import PluginError
from slime_core.ops.losses import approximate_kl

__all__ = ["CustomAdvantage"]

SETTING = "custom_advantage_function_path"


class CustomAdvantage:
    """The function of --custom-advantage-function-path, fn(args, rollout_data)."""

    def __init__(self, options: PathOptions) -> None:
        self._function = options.function(SETTING)
        self._args = options.arguments

    def estimate(self, batch: ResponseTokens, reduce: Reductions) -> TokenAdvantages:
        """See the protocol; the function itself must reduce over ranks if it needs to.

        Raises:
            PluginError: the function failed, or set no advantages or returns that match the samples.
        """
        lengths: list[int] = batch.lengths_B.tolist()
        data = _rollout_data(batch, lengths)
        self._function(self._args, data)
        missing = [name for name in ("advantages", "returns") if name not in data]
        if missing:
            raise PluginError(
                f"{self._function}: it set no {' and no '.join(missing)} in rollout_data; "
                "set both, one tensor per sample."
            )
        advantages_U, returns_U = (
            joined(self._function, name, data[name], batch.mask_U, lengths) for name in ("advantages", "returns")
        )
        return TokenAdvantages(advantages_U, returns_U)


def _rollout_data(batch: ResponseTokens, lengths: list[int]) -> dict[str, Any]:
    """Return the shard under slime's names; every list has one entry per sample."""
    per_token = {
        "loss_masks": batch.mask_U,
        "log_probs": batch.log_probs_U,
        "ref_log_probs": batch.ref_log_probs_U,
        "rollout_log_probs": batch.rollout_log_probs_U,
        "values": batch.values_U,
        "kl": _divergence(batch),
    }
    columns = {name: list(values_U.split(lengths)) for name, values_U in per_token.items() if values_U is not None}
    data: dict[str, Any] = {"response_lengths": lengths, "rewards": batch.rewards_B.tolist(), **columns}
    if batch.tokens_T is not None and batch.total_lengths_B is not None:
        data["total_lengths"] = batch.total_lengths_B.tolist()
        data["tokens"] = list(batch.tokens_T.split(data["total_lengths"]))
    return data


def _divergence(batch: ResponseTokens) -> torch.Tensor:
    """Return the k1 estimate of the divergence from the reference; zeros if ``kl_coef`` is 0, as in slime."""
    if not batch.settings.kl_coef or batch.log_probs_U is None or batch.ref_log_probs_U is None:
        return torch.zeros_like(batch.mask_U)
    return approximate_kl(batch.log_probs_U, base_log_probs_T=batch.ref_log_probs_U, estimator="k1")
