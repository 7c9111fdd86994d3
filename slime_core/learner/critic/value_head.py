"""The head of a critic: one value a token, in the place of the actor's output layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime_core.errors import ConfigError

__all__ = ["ValueHead", "replace_output_layer"]


class ValueHead(torch.nn.Module):
    """One number a token, float32, from the hidden states of the last layer; takes the place of the output layer.

    Weight and bias start at 0, so that the first advantages are rewards alone, and are held by every tensor-parallel
    rank. Where these share the tokens (sequence parallelism), each computes the values of its own and all get all of
    them; a rank's gradient is then that of its tokens, and the mark has Megatron sum it over the ranks
    (distributed/finalize_model_grads.py:354). Elsewhere every rank has the whole gradient.

    Arguments:
        config: Megatron's TransformerConfig.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._shares_tokens = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden_T1H: torch.Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Values, float32 [t, 1, 1], of all tokens of the row; called as Megatron calls an output layer.

        Arguments:
            hidden_T1H: [t, 1, hidden], under sequence parallelism this rank's share of the tokens.
            weight: of tied embeddings; there are none.
            runtime_gather_output: values are never split over the vocabulary.
        """
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        assert weight is None, "a critic's head shares no weight with its embedding"
        values_T11 = torch.nn.functional.linear(hidden_T1H.float(), self.weight.float(), self.bias.float())
        if self._shares_tokens:
            # Every rank goes on with all tokens and has their whole gradient: each takes back its share of it.
            values_T11 = gather_from_sequence_parallel_region(values_T11, tensor_parallel_output_grad=False)
        return values_T11, None


def replace_output_layer(chunks: Sequence[torch.nn.Module]) -> None:
    """Replace the output layer of the last chunk by a value head, and untie every embedding from it.

    Raises:
        ConfigError: the model has no output layer that a head could replace.
    """
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    for chunk in chunks:
        model: Any = chunk
        _untie(model)
        if not model.post_process:
            continue
        if not hasattr(model, "output_layer"):
            raise ConfigError(
                f"a critic needs a value head in the place of the output layer, and a {type(model).__name__} has no "
                "attribute output_layer; build the model from Megatron's GPTModel, or choose an advantage estimator "
                "without a critic"
            )
        device = next(model.parameters()).device
        model.output_layer = ValueHead(model.config).to(device)
        for parameter in model.output_layer.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def _untie(model: Any) -> None:
    # Megatron would add the gradients of the head to those of the embedding, over the pipeline's two ends.
    model.share_embeddings_and_output_weights = False
    if model.pre_process:
        model.embedding.word_embeddings.weight.shared_embedding = False
