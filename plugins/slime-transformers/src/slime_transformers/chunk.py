"""A model of transformers as the one chunk of a learner's model: :class:`TransformersChunk`.

Its parts have the names and shapes that the learner expects of Megatron's GPTModel: an embedding, an output layer that
may compute some rows only or be replaced by a critic's head, and logits ``[1, t, vocabulary]``. The layers are those of
transformers. Two of the model's parts are replaced in transformers' model by callers of the chunk's:

    _Projection   in the place of the output layer: calls that of the chunk, tokens first as Megatron does
    _Samples      in the place of the layers, if rows are not packed: calls them for one sample after the other
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from slime_core.errors import ConfigError
from slime_core.modeling.layers import WholeModel
from slime_transformers.attention import ROW


class OutputLayer(torch.nn.Module):
    """transformers' output layer, called as Megatron calls its own: tokens first.

    Arguments:
        linear: transformers' layer.
        is_tied: it has no weight and gets the embedding's at each call.
    """

    def __init__(self, linear: torch.nn.Linear, *, is_tied: bool) -> None:
        super().__init__()
        self.weight = None if is_tied else linear.weight
        self.bias: torch.Tensor | None = linear.bias

    def forward(self, hidden_T1H: torch.Tensor, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        """Return the logits [t, 1, vocabulary] of hidden states [t, 1, hidden]."""
        weight = self.weight if weight is None else weight
        assert weight is not None, "the embedding's weight is passed if the layer has none"
        return torch.nn.functional.linear(hidden_T1H, weight, self.bias), None


class _Projection(torch.nn.Module):
    def __init__(self, project: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._project = project

    def forward(self, hidden_1TH: torch.Tensor) -> torch.Tensor:
        return self._project(hidden_1TH)


class _Samples(torch.nn.Module):
    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self._layers = (layers,)  # in a tuple, so that it is no submodule
        self.lengths: list[int] = []

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        (layers,) = self._layers
        outputs = [layers(sample, **options) for sample in input_ids.split(self.lengths, dim=1) if sample.numel()]
        outputs[-1].last_hidden_state = torch.cat([output.last_hidden_state for output in outputs], dim=1)
        return outputs[-1]

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in self.__dict__ else getattr(self.__dict__["_layers"][0], name)


class TransformersChunk(WholeModel):
    """A whole causal language model of transformers.

    Arguments:
        config: Megatron's TransformerConfig.
        model: transformers' model. Its output layer is taken out of it.
        packs: its attention is ``slime_packed``; False: it gets one sample at a time.

    Attributes:
        output_layer: projects hidden states on the vocabulary; a critic replaces it.
        output_name: name of the output layer in a checkpoint.

    Raises:
        ConfigError: the output layer is no linear layer, or parameters are outside the parts of the model.
    """

    def __init__(self, config: TransformerConfig, model: Any, *, packs: bool) -> None:
        super().__init__(config)
        self.layers_are = f"transformers ({'packed rows' if packs else 'one sample at a time'})"
        self.shares_prompts = packs
        linear, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if type(linear) is not torch.nn.Linear:
            raise ConfigError(f"the output layer of {type(model).__name__} is a {type(linear).__name__}, no Linear")
        parameters = {id(parameter) for parameter in model.parameters()}
        self.output_name = next(name for name, part in model.named_modules() if part is linear)
        self.share_embeddings_and_output_weights = linear.weight is embedding.weight
        # In a tuple, so that they are no submodules: their parts are.
        self._model, self._layers, self._embedding = (model,), (model.base_model,), (embedding,)
        for name, part in model.named_children():
            if part is not linear:
                self.add_module(name, part)
        self.output_layer: torch.nn.Module = OutputLayer(linear, is_tied=self.share_embeddings_and_output_weights)
        self._language_head = (self.output_layer,)
        if parameters != {id(parameter) for parameter in self.parameters()}:
            raise ConfigError(f"{type(model).__name__} has parameters outside its layers, which cannot be trained")
        model.set_output_embeddings(_Projection(self._project))
        if not packs:
            self._layers = (_Samples(model.base_model),)
            setattr(model, model.base_model_prefix, self._layers[0])
        for parameter in self.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        self.train()

    @property
    def model_of_transformers(self) -> Any:
        """transformers' model."""
        return self._model[0]

    @property
    def embedding(self) -> SimpleNamespace:
        """The embedding under Megatron's name."""
        return SimpleNamespace(word_embeddings=self._embedding[0])

    def train(self, mode: bool = True) -> TransformersChunk:
        """Set the layers that recompute to training, and everything else never: nothing is dropped by chance."""
        super().train(False)
        for part in self.modules():
            if isinstance(part, GradientCheckpointingLayer) and part.gradient_checkpointing:
                part.training = mode
        self.training = mode
        return self

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedSeqParams,
    ) -> torch.Tensor:
        """Return what the output layer returns for a packed row, [1, rows, vocabulary].

        Arguments:
            input_ids, position_ids: int64 [1, t]; positions are those in the samples.
            attention_mask: not used.
            packed_seq_params: borders of the sequences.
        """
        inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if isinstance(layers := self._layers[0], _Samples):
            layers.lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        else:
            inputs |= {"position_ids": position_ids, ROW: packed_seq_params}
        if self.output_layer is self._language_head[0]:
            logits: torch.Tensor = self._model[0](**inputs).logits
            return logits
        # A critic's values are numbers of another meaning: no soft cap or scale of logits applies to them.
        return self._project(layers(**inputs)[0])

    def _project(self, hidden_1TH: torch.Tensor) -> torch.Tensor:
        weight = self._embedding[0].weight if self.share_embeddings_and_output_weights else None
        output: torch.Tensor = self.output_layer(hidden_1TH.transpose(0, 1), weight=weight)[0]
        return output.transpose(0, 1)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and the stored buffers with their names in transformers' model."""
        for name, tensor in self.state_dict(keep_vars=True).items():
            part, _, of_part = name.partition(".")
            yield (f"{self.output_name}.{of_part}" if part == "output_layer" else name), tensor

    def copy_from(self, model: Any) -> None:
        """Copy all weights and buffers of a model of transformers with the same layers; weights are cast."""
        stored = model.state_dict()
        with torch.no_grad():
            for name, tensor in self.named_tensors():
                tensor.copy_(stored[name])
            for name, buffer in model.named_buffers():  # some are computed when transformers loads weights
                part, _, of_part = name.rpartition(".")
                self.get_submodule(part)._buffers[of_part] = buffer.to(next(self.parameters()).device, copy=True)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TransformersChunk:
        """Apply ``fn``, but keep the dtype of buffers: rotary frequencies and routers' biases stay in float32."""
        before = [(part, name, buffer) for part in self.modules() for name, buffer in part.named_buffers(recurse=False)]
        super()._apply(fn, recurse)
        device = next(self.parameters()).device
        for part, name, buffer in before:
            part._buffers[name] = buffer.to(device)
        return self
