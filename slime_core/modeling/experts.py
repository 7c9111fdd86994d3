"""The parts of a mixture of experts: which rows reach which expert, and the experts of a rank.

    TokenDispatcher   sorts the tokens by expert, exchanges them between ranks, and adds up what the experts return
    GroupedExperts    the experts of one rank, computed together

Megatron's plain dispatcher makes the host wait for the device several times a layer: it selects rows by a mask, whose
number the host has to read, and cuts what it receives into one piece per expert and rank. It sums what experts return,
and the gradients of tokens, with atomics in bfloat16. Here all of that happens on the device, in a fixed order
(:class:`slime_core.modeling.mlp.Order`). If ranks share experts, one wait a layer remains: the host reads the number
of rows that it exchanges with every other rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from slime_core.modeling.mlp import Order, chosen_groups, grouped_linear, swiglu

__all__ = ["GroupedExperts", "TokenDispatcher", "replace_dispatchers"]


def replace_dispatchers(chunk: torch.nn.Module) -> None:
    """Let the mixtures of ``chunk`` exchange tokens by :class:`TokenDispatcher`, if they exchange them all to all.

    A layer spec has no place for a dispatcher: Megatron's layer chooses it (transformer/moe/moe_layer.py).
    """
    for layer in chunk.modules():
        if isinstance(layer, MoELayer) and type(layer.token_dispatcher) is MoEAlltoAllTokenDispatcher:
            layer.token_dispatcher = TokenDispatcher(
                layer.num_local_experts,
                layer.local_expert_indices,
                config=layer.config,
                pg_collection=get_default_pg_collection(),
            )


class TokenDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Megatron's exchange of tokens all to all, sorted and summed on the device.

    Left out: an expert's capacity, padding for quantization, and shared experts that overlap with the exchange, which
    model specs refuse.
    """

    num_global_tokens_per_local_expert: torch.Tensor | None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [t * k, hidden] and weights [t * k], sorted by expert.

        Arguments:
            hidden_states: [..., hidden], t tokens.
            routing_map: bool [t, experts], the k experts of every token.
            probs: [t, experts], the weights of the experts.
        """
        self.hidden_shape, self.probs = hidden_states.shape, probs
        self.tokens_per_expert = None  # Megatron's methods would copy it to the host
        experts_TK = chosen_groups(routing_map, num=self.config.moe_router_topk)
        self._by_expert = Order.by_group(experts_TK, num_groups=self.num_experts)
        if self._exchanges:
            self.preprocess(torch.zeros_like(routing_map).scatter(1, experts_TK, True))
            # The counts stay on the device; Megatron would copy them to the host.
            self._counts = self.num_global_tokens_per_local_expert
            self.num_global_tokens_per_local_expert = None
            self._maybe_dtoh_and_synchronize("before_permutation_1")
        rows = self._by_expert.spread(hidden_states.reshape(-1, self.hidden_shape[-1]))
        return rows, self._by_expert.spread_pairs(probs.gather(1, experts_TK))

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows and weights of this rank's experts, sorted by expert, and how many rows each expert has.

        Arguments:
            global_input_tokens: [n, hidden], for each rank that sent some, sorted by expert.
            global_probs: [n].
        """
        rows, weights = global_input_tokens, global_probs
        if not self._exchanges:
            return rows, _sizes(self._by_expert.ends_G), weights
        if self.tp_size > 1:
            sizes = self.output_splits_tp.tolist()
            rows, weights = (
                gather_from_sequence_parallel_region(part, group=self.tp_group, output_split_sizes=sizes)
                for part in (rows, weights)
            )
        if self.num_local_experts == 1:
            return rows, torch.full((1,), rows.size(0), device=rows.device), weights
        # A piece for each sender and expert; the senders have the same experts.
        assert self._counts is not None
        ends = self._counts.flatten().cumsum(0)
        pieces_N = torch.searchsorted(ends, torch.arange(rows.size(0), device=ends.device), right=True)
        experts_N1 = (pieces_N % self.num_local_experts).unsqueeze(1)
        self._by_local_expert = Order.by_group(experts_N1, num_groups=self.num_local_experts)
        sizes_G = _sizes(self._by_local_expert.ends_G)
        return self._by_local_expert.spread(rows), sizes_G, self._by_local_expert.spread(weights)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return what this rank's experts computed, [n, hidden], in the order in which the tokens arrived."""
        if not self._exchanges:
            return hidden_states
        if self.num_local_experts > 1:
            hidden_states = self._by_local_expert.combine(hidden_states)
        if self.tp_size > 1:
            dtype = hidden_states.dtype
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs.dtype),
                group=self.tp_group,
                input_split_sizes=self.output_splits_tp.tolist(),
            ).to(dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Sum the rows [t * k, hidden] of each token, in the shape of the layer's input."""
        return self._by_expert.combine(permutated_local_input_tokens).view(self.hidden_shape)

    @property
    def _exchanges(self) -> bool:
        return bool(self.ep_size > 1 or self.tp_size > 1)


def _sizes(ends: torch.Tensor) -> torch.Tensor:
    return ends.diff(prepend=ends.new_zeros(1))


ALIGNMENT_BYTES = 16
"""torch's grouped product requires rows that start at multiples of this (aten/native/GroupedMMUtils.h)."""


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Megatron's experts of one rank, computed together; replaces SequentialMLP in the layer spec.

    Each expert has separate parameters, ``local_experts.N.linear_fc1.weight`` and ``.linear_fc2.weight``.
    """

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the last expert first.

        Megatron's buffers hold parameters in the reverse of the order in which modules have them
        (distributed/param_and_grad_buffer.py). So experts ascend there, each as far from the next, and the grouped
        product reads the matrices of all of them in place.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        path = f"{prefix}.local_experts" if prefix else "local_experts"
        yield prefix, self
        yield path, self.local_experts
        for name, expert in reversed([*self.local_experts.named_children()]):
            yield from expert.named_modules(memo, f"{path}.{name}", remove_duplicate)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute tokens [n, hidden], sorted by expert, with numbers of tokens and weights [n] -> [n, hidden].

        Arguments: as in Megatron's SequentialMLP.
        """
        tokens = permuted_local_hidden_states
        first = [expert.linear_fc1.weight for expert in self.local_experts]
        second = [expert.linear_fc2.weight for expert in self.local_experts]
        if not (self._is_plain and _are_aligned(first[0], second[0])):
            output: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                tokens, tokens_per_expert, permuted_probs
            )
            return output
        ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32)
        inner = swiglu(grouped_linear(tokens, ends, first), permuted_probs.unsqueeze(-1))
        return grouped_linear(inner, ends, second), None

    @property
    def _is_plain(self) -> bool:
        return self.local_experts[0].activation_func is swiglu and not self.config.moe_apply_probs_on_input


def _are_aligned(*weights: torch.Tensor) -> bool:
    return all(size * weight.element_size() % ALIGNMENT_BYTES == 0 for weight in weights for size in weight.shape)
