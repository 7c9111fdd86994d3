"""Layers for Megatron layer specs: the norm, the router of a mixture of experts, attention over packed rows.

    RMSNorm              the norm of every layer
    KeepingRouter        the router of a mixture of experts: records and replays the experts of each token, see
                         :mod:`slime_core.learner.routing_replay`
    PackedAttention      the core attention: softmax(q k) v
    PackedSelfAttention  the layer around it: rotary positions of every packed token
    PackedRow            Megatron's description of a row, and its sequences that continue others

A row has hundreds of short sequences. On CUDA a kernel processes them directly. Elsewhere they are gathered into
right-padded batches ``[n, L]``, one batch for all lengths between two powers of two, so that at most half of a batch is
padding and a row needs a handful of calls. Under a causal mask no token sees tokens to its right, so the padding needs
no mask: it repeats the sequence's last token, and its output is not used, so its gradient is exactly zero
(:mod:`slime_core.modeling.rows`).

The rotary part avoids three problems of Megatron's THD path (models/common/embeddings/rope_utils.py:178), which slices
the table of angles once a sequence, for queries and for keys, in every layer: its time (with 256 sequences of 12
tokens some 7 % of a small model's step), six waits for the device in every layer (``cu_seqlens.tolist()``), and its
refusal of padding at the end of a row. The same function accepts a table with one entry a token, which it recognises by
the length (:211). So the layer looks the entries up by position and passes the row as one sequence, which Megatron
itself slices for a context-parallel rank.

Under context parallelism a rank has two ranges of the row. Sequences that enter a range from before need keys and
values of other ranks; these are gathered, and their gradients return through a reduce-scatter. The sums of softmax are
never split, so the result equals that of one rank up to the order of additions.

If a row contains once what several samples start with, sequences continue it: they see its keys, and their rotary
positions continue after it (:mod:`slime_core.modeling.rows`, ``docs/shared-prompts.md``).

Left out: sliding windows, dropout, attention that is not causal, padded batches. All are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter

from slime_core.errors import ConfigError
from slime_core.modeling.rows import Positions, Sequences, attend

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "KeepingRouter",
    "PackedAttention",
    "PackedRow",
    "PackedSelfAttention",
    "RMSNorm",
    "WholeModel",
    "by_position",
]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm as a module of Megatron's layer spec, with the weight's mark for sequence parallelism.

    Megatron's own wrapper (transformer/torch_norm.py:32) refuses sequence parallelism, which needs only the mark: by
    it the gradients of the weight are summed over the tensor-parallel ranks
    (distributed/finalize_model_grads.py:354).

    Arguments:
        config: Megatron's TransformerConfig.
        hidden_size: size of the last dimension.
        eps: added to the mean square.

    Raises:
        ValueError: the config requests another norm, or zero-centred weights.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"normalization {config.normalization!r} (zero-centred: {config.layernorm_zero_centered_gamma}); "
                "accepted: a plain RMSNorm. Give another norm through the layer spec"
            )
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Routed(Protocol):
    """Expert choices of a micro-batch of t tokens, which routers read and write.

    Attributes:
        routes: layer -> int16 [t, k], the experts that this layer used for each token.
        given_routes_TLK: int8 or int16 [t, layers, k], the engine's choices, -1 if unknown; None if all are unknown.
    """

    routes: dict[int, torch.Tensor]
    given_routes_TLK: torch.Tensor | None


class KeepingRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router, with a choice of experts that can be replayed; replaces it in the layer spec.

    Attributes:
        choice: replaces Megatron's RouterReplay (moe/router_replay.py), which keeps one list for all models of a
            process.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.router_replay = self.choice = _Choice()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KeepingRouter:
        """Apply ``fn`` as Megatron does, but keep the bias that selects experts in float32, without rounding it."""
        bias: torch.Tensor | None = self._buffers.get("expert_bias")
        super()._apply(fn, recurse)
        if bias is not None:
            self._buffers["expert_bias"] = bias.to(self.weight.device)
        return self


class _Choice:
    """The choice of experts of one router; ``topk_routing_with_score_function`` calls it instead of top-k."""

    def __init__(self) -> None:
        self._layer = 0
        self._micro_batches: Sequence[Routed] | None = None
        self._calls = [0, 0]

    def start_pass(self, layer: int, micro_batches: Sequence[Routed]) -> None:
        self._layer = layer
        self._micro_batches = micro_batches
        self._calls = [0, 0]

    def end(self) -> None:
        self._micro_batches = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and numbers of the experts of every token: float [n, topk], int64 [n, topk].

        Arguments: as in Megatron's ``RouterReplay.get_replay_topk``.
        """
        assert default_compute_topk is not None
        if self._micro_batches is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        has_gradient = torch.is_grad_enabled()
        micro = self._micro_batches[self._calls[has_gradient]]
        self._calls[has_gradient] += 1
        if self._layer not in micro.routes:
            _, routes = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
            if micro.given_routes_TLK is not None:
                routes = _completed(micro.given_routes_TLK[:, self._layer - 1], routes)
            micro.routes[self._layer] = routes.to(torch.int16)
        chosen = micro.routes[self._layer].long()
        return scores.gather(1, chosen), chosen


def _completed(engine_routes: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
    """Return ``engine_routes`` of this router's tokens; ``routes`` if they are unknown."""
    if engine_routes.size(0) != routes.size(0):  # with sequence parallelism each rank routes a part of the tokens
        parts = engine_routes.tensor_split(parallel_state.get_tensor_model_parallel_world_size())
        engine_routes = parts[parallel_state.get_tensor_model_parallel_rank()]
    return torch.where(engine_routes < 0, routes, engine_routes.long())


@dataclass
class PackedRow(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed row whose sequences may continue others.

    Arguments:
        continues: see :meth:`slime_core.modeling.rows.Sequences.of`. None: no sequence continues another.
    """

    continues: torch.Tensor | None = None


class WholeModel(MegatronModule):  # type: ignore[misc]
    """A model with layers other than Megatron's, as the only chunk of a rank.

    A subclass has the parts of Megatron's GPTModel that the learner uses: ``forward``, ``output_layer``, called with
    hidden states [t, 1, h], ``embedding.word_embeddings`` and ``share_embeddings_and_output_weights``.

    Attributes:
        layers_are: whose layers they are, printed by the run.
        shares_prompts: whether a row may have sequences that continue others; see :class:`PackedRow`.
    """

    layers_are: str
    shares_prompts: bool = False
    pre_process = post_process = True
    model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, input_tensor: object) -> None:
        """Do nothing; Megatron's schedule passes the output of an earlier pipeline stage, and there is none."""


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal core attention over packed rows; replaces Megatron's in the layer spec.

    Queries may have a multiple of the heads of keys and values, and values may have another size than queries
    (multi-latent attention).

    Arguments: as Megatron passes them to every core attention (transformer/attention.py:318).

    Raises:
        ConfigError: a sliding window, dropout, or attention that is not causal was requested.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        _refuse_unsupported(config, attn_mask_type, attention_type)
        self._context = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: object,
    ) -> torch.Tensor:
        """Return softmax(scale q k + causal mask) v.

        Arguments:
            query, key, value: [t, heads, size], with or without a batch dimension of 1 in second place.
            attention_mask: not used.
            packed_seq_params: borders of the sequences; always of the whole row, even if a context-parallel rank has
                only its share.

        Returns:
            [t, heads * size] or [t, 1, heads * size].
        """
        is_batched = query.dim() == 4
        if is_batched:
            query, key, value = (part.squeeze(1) for part in (query, key, value))
        ends, num_tokens, group = packed_seq_params.cu_seqlens_q, query.size(0), self._context
        if group is None:
            sequences = Sequences.of(ends, num_tokens=num_tokens, continues=_continues(packed_seq_params))
        else:
            sequences = Sequences.of_rank(ends, num_tokens=num_tokens, rank=group.rank(), size=group.size())
        if sequences.exchanges:
            # One collective for both; its backward is a reduce-scatter.
            pairs = torch.cat([key, value], dim=-1)
            everywhere = tensor_parallel.gather_from_sequence_parallel_region(pairs, group=group)
            key, value = everywhere.split([key.size(-1), value.size(-1)], dim=-1)
        output = attend(query, key, value, sequences, scale=self._scale)
        return output.unsqueeze(1) if is_batched else output


def _continues(packed: PackedSeqParams) -> torch.Tensor | None:
    return packed.continues if isinstance(packed, PackedRow) else None


def _refuse_unsupported(config: TransformerConfig, mask_type: AttnMaskType, attention_type: str) -> None:
    if config.window_size is not None:
        raise ConfigError(f"sliding-window attention {config.window_size} is not built; accepted: full attention")
    if config.attention_dropout:
        raise ConfigError(
            f"attention_dropout {config.attention_dropout} would make two passes over the same tokens differ; "
            "accepted: 0"
        )
    if attention_type != "self" or mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise ConfigError(
            f"{attention_type} attention with mask {mask_type.name} is not built; accepted: causal self-attention"
        )


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's self-attention layer, which looks the rotary angles of a packed row up in one call."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run Megatron's forward; ``rotary_pos_emb`` [longest sequence, 1, 1, size] has the angles by position."""
        if packed_seq_params is not None and rotary_pos_emb is not None:
            positions_T, packed_seq_params = by_position(packed_seq_params, hidden_states, self.config)
            rotary_pos_emb = rotary_pos_emb.index_select(0, positions_T)
        output: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
            hidden_states,
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **options,
        )
        return output


def by_position(
    packed: PackedSeqParams, hidden_states: torch.Tensor, config: TransformerConfig
) -> tuple[torch.Tensor, PackedSeqParams]:
    """Return the positions of the tokens of the whole row, over all ranks that share it, and ``packed`` for a table of
    angles that has one entry a token."""
    shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
    num_tokens = hidden_states.size(0) * int(shards * config.context_parallel_size)
    row = Positions.of(packed.cu_seqlens_q, num_tokens=num_tokens, continues=_continues(packed))
    return row.positions_T, replace(packed, cu_seqlens_q_padded=row.whole, cu_seqlens_kv_padded=row.whole)
