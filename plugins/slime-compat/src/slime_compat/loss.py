"""``custom_loss_function_path``: a function of slime's users that computes the loss of a micro-batch from its logits.

It replaces policy loss, divergence and entropy bonus. ``sum_of_sample_mean(x)``, with one number per response token,
concatenated over samples, is the sum over samples of the mean over each one's trained tokens; siblings of one rollout
share one mean. With ``calculate_per_token_loss`` it is the plain sum over trained tokens. The function's loss is
multiplied by ``MicroBatch.scale``: one over the number of rollouts of the optimizer step that train a token, or of its
trained tokens. A function that computes the core's loss therefore has the core's gradients, for any split of the step
into micro-batches and ranks.

Logits are those of the whole row, ``[1, t, v]``, not divided by the temperature; with tensor parallelism, v is this
rank's part of the vocabulary. :func:`get_log_probs_and_entropy` handles all three.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from slime_compat.batches import refuse_no_gradient, response_lengths, split, total_lengths
from slime_compat.paths import PathOptions
from slime_core import boundary
from slime_core.provisional import MicroBatch

__all__ = ["CustomLoss", "get_log_probs_and_entropy"]

SETTING = "custom_loss_function_path"


class CustomLoss:
    """A :class:`slime_core.provisional.LogitsLoss` around a function of slime's signature."""

    def __init__(self, options: PathOptions) -> None:
        self._function = options.function(SETTING)
        self._args = options.arguments

    def __call__(self, logits_1TV: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """See the protocol. The loss of an idle micro-batch is 0, without a call: it has no tokens to divide by.

        Raises:
            PluginError: the function failed, or returned another structure than slime's functions do.
        """
        if not micro.scale:
            return logits_1TV[:, :0].float().sum(), {}
        batch, reduce = _batch(micro), _sum_of_sample_mean(micro)
        returned = self._function(self._args, batch, logits_1TV, reduce)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
            raise self._function.refused(returned, "a tuple of the loss and a dict of metrics")
        loss, metrics = refuse_no_gradient(self._function, returned[0]), returned[1]
        return loss * micro.scale, {name: self._number(name, value, micro) for name, value in metrics.items()}

    def _number(self, name: str, value: Any, micro: MicroBatch) -> torch.Tensor:
        with boundary(self._function, f"reading metric {name!r} as one number"):
            number = torch.as_tensor(value, dtype=torch.float32, device=micro.mask_U.device).detach()
            return number.reshape(()) * micro.scale


def _sum_of_sample_mean(micro: MicroBatch) -> Callable[[torch.Tensor], torch.Tensor]:
    weights_U = micro.weights_U / micro.scale

    def reduce(values_U: torch.Tensor) -> torch.Tensor:
        return (values_U.where(micro.mask_U != 0, 0.0) * weights_U).sum()

    return reduce


def _batch(micro: MicroBatch) -> dict[str, Any]:
    """Return the micro-batch under slime's names; lists have one entry per sample."""
    lengths = total_lengths(micro)
    row_T = micro.tokens_1T[0, : sum(lengths)]
    per_token = {
        "loss_masks": micro.mask_U,
        "advantages": micro.advantages_U,
        "returns": micro.advantages_U if micro.returns_U is None else micro.returns_U,
        "rollout_log_probs": micro.rollout_log_probs_U,
        "log_probs": micro.old_log_probs_U,
        "ref_log_probs": micro.ref_log_probs_U,
    }
    return {
        "tokens": micro.tokens_1T,
        "unconcat_tokens": list(row_T.split(lengths)),
        "total_lengths": lengths,
        "response_lengths": response_lengths(micro),
        "packed_seq_params": micro.packed_sequence,
        **{name: split(values_U, micro) for name, values_U in per_token.items() if values_U is not None},
        **micro.extra,
    }


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Return log-probabilities, and entropies, of the response tokens; slime's function of this name.

    Arguments:
        logits: ``[1, t, v]``, as a loss function gets them.
        args: ``rollout_temperature`` and ``log_probs_chunk_size`` are used.
        unconcat_tokens, total_lengths, response_lengths: entries of ``batch``.

    Returns:
        An empty tensor, as in slime, and a dict with a list of one float32 [response length] a sample under
        ``log_probs`` and, ``with_entropy``, ``entropy``; both with gradient.
    """
    from megatron.core import parallel_state

    from slime_core.ops.log_probs import log_probs_and_entropy

    ends = list(accumulate(total_lengths))
    rows = [range(end - length - 1, end - 1) for end, length in zip(ends, response_lengths, strict=True)]
    pairs = zip(unconcat_tokens, response_lengths, strict=True)
    log_probs_U, entropy_U = log_probs_and_entropy(
        logits[0],
        rows_U=torch.tensor([row for part in rows for row in part], dtype=torch.int64, device=logits.device),
        targets_U=torch.cat([tokens[len(tokens) - length :] for tokens, length in pairs]),
        temperature=args.rollout_temperature,
        chunk_size=args.log_probs_chunk_size,
        group=parallel_state.get_tensor_model_parallel_group(),
        with_entropy=with_entropy,
    )
    columns = {"entropy": entropy_U, "log_probs": log_probs_U}
    lengths = list(response_lengths)
    return logits.new_empty(0), {
        name: list(values_U.split(lengths)) for name, values_U in columns.items() if values_U is not None
    }
