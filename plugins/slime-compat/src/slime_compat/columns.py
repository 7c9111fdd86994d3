"""``rollout_data_postprocess_path``: a function of slime's users that changes the training data of a rank.

Changes of ``advantages``, ``loss_masks``, all log-probabilities, and, with a critic, ``returns`` are used. A loss mask
may only remove tokens, because the divisors in the loss weights are counted already. Other columns go to the loss of
``custom_loss_function_path``; without such a loss they would be unused, which is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime_compat.batches import joined, refuse_wider_mask, response_lengths, split
from slime_compat.paths import PathOptions
from slime_core import boundary
from slime_core.errors import PluginError
from slime_core.provisional import MicroBatch
from slime_core.types import TrainBatch

__all__ = ["Postprocess"]

SETTING = "rollout_data_postprocess_path"

PER_TOKEN = {
    "advantages": "advantages_U",
    "loss_masks": "mask_U",
    "rollout_log_probs": "rollout_log_probs_U",
    "log_probs": "old_log_probs_U",
    "ref_log_probs": "ref_log_probs_U",
    "returns": "returns_U",
}
"""slime's name of a column -> our name."""

FIXED = ("tokens", "total_lengths", "response_lengths", "sample_indices")
PASSED_ON = ("returns", "rewards")
"""Once there are advantages, only a loss named by path uses these columns; a critic also uses returns."""


class Postprocess:
    """``slime_before_training`` around a function of slime's signature."""

    def __init__(self, options: PathOptions) -> None:
        self._function = options.function(SETTING)
        self._args = options.arguments
        self._has_loss = "custom_loss_function_path" in options.sources

    def __call__(self, shard: TrainBatch, steps: Sequence[Sequence[MicroBatch]]) -> None:
        """See the protocol.

        Raises:
            PluginError: the function failed, removed a column, or left one that does not match the samples.
        """
        micro_batches = [micro for step in steps for micro in step]
        data = _columns(shard, micro_batches)
        before = set(data)
        self._function(self._args, shard.rollout, data)
        self._refuse_other_columns(before, data, shard)
        used = _used(micro_batches)
        extra = {name: values for name, values in data.items() if name not in (*used, *FIXED)}
        for micro in micro_batches:
            self._take_back({name: data[name] for name in used if name in data}, micro)
            micro.extra = {name: [values[member] for member in micro.members] for name, values in extra.items()}

    def _take_back(self, data: Mapping[str, Any], micro: MicroBatch) -> None:
        lengths = response_lengths(micro)
        for name in data:
            columns = [data[name][member] for member in micro.members]
            values_U = joined(self._function, name, columns, micro.advantages_U, lengths)
            if name == "loss_masks":
                # An idle micro-batch repeats samples and stays masked.
                values_U = values_U if micro.scale else micro.mask_U
                refuse_wider_mask(self._function, values_U, micro.mask_U)
            if name == "rollout_log_probs" and micro.fresh_U is not None:
                # Values that are not the engine's cannot show whether learner and engine agree.
                micro.fresh_U &= values_U == micro.rollout_log_probs_U
            setattr(micro, PER_TOKEN[name], values_U)

    def _refuse_other_columns(self, before: set[str], data: Mapping[str, Any], shard: TrainBatch) -> None:
        gone = sorted(before - data.keys())
        if gone:
            raise PluginError(f"{self._function}: it took {', '.join(gone)} away; leave every column of rollout_data.")
        new = sorted(data.keys() - before - PER_TOKEN.keys() - set(PASSED_ON))
        if new and not self._has_loss:
            raise PluginError(
                f"{self._function}: it added {', '.join(new)}, which nothing reads; columns that are read: "
                f"{', '.join((*PER_TOKEN, *PASSED_ON))}. Only the loss of --custom-loss-function-path gets others."
            )
        for name, column in sorted(data.items()):
            if not (isinstance(column, list | tuple) or (isinstance(column, torch.Tensor) and column.ndim)):
                kind = type(column).__name__
                raise PluginError(f"{self._function}: {name} is a {kind}; accepted: a list, one entry per sample.")
            if name not in FIXED and len(column) != len(shard):
                raise PluginError(
                    f"{self._function}: {name} has {len(column)} entries; accepted: one for each of the "
                    f"{len(shard)} samples."
                )
        self._refuse_changed(data, shard)

    def _refuse_changed(self, data: Mapping[str, Any], shard: TrainBatch) -> None:
        for name, column in _fixed(shard, "cpu").items():
            with boundary(self._function, f"reading {name} after the call"):
                values = [torch.as_tensor(value).cpu() for value in data[name]]
            same = len(values) == len(column) and all(
                torch.equal(now, torch.as_tensor(before)) for now, before in zip(values, column, strict=True)
            )
            if not same:
                raise PluginError(f"{self._function}: it changed {name}, which is packed already; leave it unchanged.")


def _used(micro_batches: Sequence[MicroBatch]) -> list[str]:
    """Return the columns whose changes are used; without a critic, ``returns`` is one of PASSED_ON instead."""
    has_critic = all(micro.returns_U is not None for micro in micro_batches)
    return [name for name in PER_TOKEN if has_critic or name != "returns"]


def _columns(shard: TrainBatch, micro_batches: Sequence[MicroBatch]) -> dict[str, Any]:
    """Return the shard under slime's names; every list has one entry per sample, in the shard's order."""
    per_token: dict[str, list[Any]] = {name: [None] * len(shard) for name in PER_TOKEN}
    for micro in micro_batches:
        if not micro.scale:
            continue
        for name, attribute in PER_TOKEN.items():
            values_U = getattr(micro, attribute)
            if values_U is None:
                continue
            for member, value in zip(micro.members, split(values_U, micro), strict=True):
                per_token[name][member] = value.clone()
    columns = {name: values for name, values in per_token.items() if all(value is not None for value in values)}
    if "returns" not in columns:
        columns["returns"] = [value.clone() for value in columns["advantages"]]
    rewards_B = shard.columns_B.get("rewards")
    if rewards_B is not None:
        columns["rewards"] = rewards_B.tolist()
    device = micro_batches[0].tokens_1T.device
    return {**_fixed(shard, device), **columns}


def _fixed(shard: TrainBatch, device: torch.device | str) -> dict[str, Any]:
    lengths = shard.lengths_B.tolist()
    return {
        "tokens": list(torch.tensor(shard.tokens_T, dtype=torch.int64, device=device).split(lengths)),
        "total_lengths": lengths,
        "response_lengths": shard.response_lengths_B.tolist(),
        "sample_indices": shard.indices_B.tolist(),
    }
