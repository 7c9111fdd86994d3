"""Ways to break the learner, each of which some case has to notice.

A mutant is applied in forked ranks only. It names the layout and the case that have to notice it; a mutant on one rank
is compared with plain torch, the others with one rank that is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from campaigns.exactness.layouts import ONE

__all__ = ["MUTANTS", "SMALL_MUTANTS", "Mutant"]


@dataclass(frozen=True)
class Mutant:
    """What is broken, and where it has to show."""

    name: str
    layout: str
    case: str
    apply: Callable[[], None]


# --- Gradients over ranks ---------------------------------------------------------------------------------------------


def _no_finalisation() -> None:
    optimizer: Any = import_module("slime_core.learner.optimizer")

    optimizer.finalize_model_grads = lambda *_, **__: None


def _divided_by_tokens() -> None:
    """Megatron's own division, on top of the weights that the samples carry."""
    optimizer: Any = import_module("slime_core.learner.optimizer")

    finish = optimizer.finalize_model_grads
    optimizer.finalize_model_grads = lambda model, _, **options: finish(model, torch.tensor(10), **options)


def _dropped_rank() -> None:
    """The gradients of the second data-parallel rank are lost; its metrics are not."""
    from megatron.core import parallel_state

    optimizer: Any = import_module("slime_core.learner.optimizer")

    finish = optimizer.finalize_model_grads

    def drop(model: list[Any], *arguments: Any, **options: Any) -> None:
        if parallel_state.get_data_parallel_rank() == 1:
            for chunk in model:
                chunk.zero_grad_buffer()
        finish(model, *arguments, **options)

    optimizer.finalize_model_grads = drop


def _norms_not_reduced() -> None:
    from slime_core.modeling.layers import RMSNorm

    build = RMSNorm.__init__

    def init(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        build(self, config, *arguments, **options)
        self.weight.sequence_parallel = False

    RMSNorm.__init__ = init  # type: ignore[method-assign]


def _experts_over_all_ranks() -> None:
    """Expert gradients are summed over all data-parallel ranks, also over those that hold other experts."""
    optimizer: Any = import_module("slime_core.learner.optimizer")

    wrap = optimizer.wrap

    def wrong(chunks: list[Any], **options: Any) -> list[Any]:
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.allreduce = True
        wrapped: list[Any] = wrap(chunks, **options)
        return wrapped

    optimizer.wrap = wrong


def _tied_not_summed() -> None:
    """First and last stage each keep the gradient that they found for the shared embedding."""
    # The package has a function of the module's name.
    module = import_module("megatron.core.distributed.finalize_model_grads")
    module._allreduce_word_embedding_grads = lambda *_, **__: None  # type: ignore[attr-defined]


# --- The loss ---------------------------------------------------------------------------------------------------------


def _wrong_divisor() -> None:
    """One response more than there is."""
    from slime_core.ops import groups

    divisor = groups.loss_divisor
    for module in (groups, import_module("slime_core.rollout.shards")):
        setattr(module, "loss_divisor", lambda *arguments, **options: divisor(*arguments, **options) + 1)  # noqa: B010


def _change_micro_batches(change: Callable[[Any], Any]) -> None:
    from slime_core.learner.micro_batches import _Rows

    make = _Rows.micro_batch
    _Rows.micro_batch = lambda *arguments: change(make(*arguments))  # type: ignore[method-assign]


def _shifted_label() -> None:
    _change_micro_batches(lambda micro: replace(micro, targets_U=micro.targets_U.roll(1)))


def _shifted_mask() -> None:
    """By one place over the packed row; the sum of weights stays what it was."""
    _change_micro_batches(lambda micro: replace(micro, mask_U=micro.mask_U.roll(1), weights_U=micro.weights_U.roll(1)))


def _shifted_rows() -> None:
    """Log-probabilities come from the logits one place too early."""
    _change_micro_batches(lambda micro: replace(micro, rows_U=(micro.rows_U - 1).clamp(min=0)))


def _doubled_siblings() -> None:
    """Each sample counts as a rollout of its own."""
    import numpy as np

    from slime_core.rollout import shards

    shards.rollout_numbers = lambda samples: np.arange(len(samples))


def _forgotten_temperature() -> None:
    _change_micro_batches(lambda micro: replace(micro, temperature=1.0))


def _forgotten_reference() -> None:
    """The reference is the actor."""
    from slime_core.learner.frozen_models import WeightSnapshots

    WeightSnapshots.load = lambda self, role, load: self.snapshot(role)  # type: ignore[method-assign]


def _late_old_log_probs() -> None:
    """The old log-probabilities are those of the step itself, so that no ratio leaves 1."""
    from slime_core.learner.frozen_models import RequiredColumns

    RequiredColumns.old = lambda *_, **__: False  # type: ignore[method-assign]


# --- Sums over ranks --------------------------------------------------------------------------------------------------


def _no_key_gather() -> None:
    """A context-parallel rank takes its own keys for those of every rank."""
    attention: Any = import_module("slime_core.modeling.layers")

    class Alone:
        def __getattr__(self, name: str) -> Any:
            from megatron.core import tensor_parallel

            return getattr(tensor_parallel, name)

        def gather_from_sequence_parallel_region(self, pairs: torch.Tensor, *, group: Any) -> torch.Tensor:
            return torch.cat([pairs] * group.size())

    attention.tensor_parallel = Alone()


def _no_sequence_sums() -> None:
    from slime_core.learner import objective

    class Held:
        @staticmethod
        def apply(values_b: torch.Tensor, _: Any) -> torch.Tensor:
            return values_b

    objective._SumOverRanks = Held  # type: ignore[misc,assignment]


def _no_gradient_of_sequence_sums() -> None:
    """A rank hears of the others' tokens, and they do not hear what its loss asks of theirs."""
    from slime_core.learner import objective

    objective._SumOverRanks.backward = staticmethod(  # type: ignore[method-assign]
        lambda ctx, gradient_b: (gradient_b, None)
    )


def _whitened_alone() -> None:
    from slime_core.learner.advantages import DataParallelSums

    DataParallelSums.sum = lambda self, values: values.detach().clone()  # type: ignore[method-assign]


MUTANTS = (
    Mutant("gradients not finalised", "DP2", "clipped", _no_finalisation),
    Mutant("gradients not finalised, sequence parallel", "TP2 SP", "clipped", _no_finalisation),
    Mutant("gradients divided by tokens once more", "DP2", "clipped", _divided_by_tokens),
    Mutant("gradients of a data-parallel rank dropped", "DP2", "clipped", _dropped_rank),
    Mutant("norm gradients not reduced", "TP2 SP", "clipped", _norms_not_reduced),
    Mutant("expert gradients summed over all ranks", "EP2", "experts", _experts_over_all_ranks),
    Mutant("tied gradients not summed", "PP2xVPP2", "tied", _tied_not_summed),
    Mutant("divisor off by one", ONE, "clipped", _wrong_divisor),
    Mutant("labels shifted", ONE, "clipped", _shifted_label),
    Mutant("mask off by one", ONE, "clipped", _shifted_mask),
    Mutant("logits off by one", ONE, "clipped", _shifted_rows),
    Mutant("siblings counted twice", ONE, "clipped", _doubled_siblings),
    Mutant("temperature forgotten", ONE, "clipped", _forgotten_temperature),
    Mutant("reference forgotten", ONE, "clipped", _forgotten_reference),
    Mutant("old log-probabilities of the step itself", ONE, "gspo", _late_old_log_probs),
    Mutant("keys not gathered", "CP2", "clipped", _no_key_gather),
    Mutant("sequences not summed", "CP2", "gspo", _no_sequence_sums),
    Mutant("sums of sequences without gradient", "CP2", "divisor", _no_gradient_of_sequence_sums),
    Mutant("advantages whitened a rank", "DP2", "tokens", _whitened_alone),
)

_SMALL = (
    "gradients not finalised",
    "labels shifted",
    "mask off by one",
    "sequences not summed",
    "norm gradients not reduced",
    "expert gradients summed over all ranks",
)
SMALL_MUTANTS = tuple(mutant for mutant in MUTANTS if mutant.name in _SMALL)
"""What `make test` runs."""
