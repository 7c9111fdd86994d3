"""A plugin with a model that sees: Qwen3 whose token 47 stands for one patch of a picture, projected into its place.

Its Hugging Face checkpoint is a Qwen3 one with one more weight, ``model.picture.weight`` [hidden, PATCH].
"""

from __future__ import annotations

from typing import Any

from slime_core import Registration, hookimpl
from slime_core.modeling.spec import MBridgeSpec

PLACEHOLDER = 47
PATCH = 3
ARCHITECTURE = "PicturesForCausalLM"


@hookimpl
def slime_register(add: Registration) -> None:
    add.model_spec(
        "pictures",
        Pictures,
        architectures=frozenset({ARCHITECTURE}),
        inputs=frozenset({"pixel_values"}),
        summary="Qwen3 that sees, for tests",
    )


class Pictures(MBridgeSpec):
    """Adds the projection to the chunk that embeds tokens."""

    def build(self, *args: Any, **options: Any) -> list[Any]:
        import torch
        from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

        chunks = super().build(*args, **options)
        self._bridge._DIRECT_MAPPING["embedding.picture.weight"] = "model.picture.weight"
        for chunk in chunks:
            chunk.__class__ = _seeing()
            if chunk.pre_process:
                hidden, dtype = chunk.config.hidden_size, chunk.config.params_dtype
                chunk.embedding.picture = torch.nn.Linear(PATCH, hidden, bias=False, dtype=dtype)
                set_defaults_if_not_set_tensor_model_parallel_attributes(chunk.embedding.picture.weight)
        return chunks


def _seeing() -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    class Seeing(GPTModel):
        def forward(self, input_ids: Any, position_ids: Any, *rest: Any, pixel_values: Any = None, **more: Any) -> Any:
            if pixel_values is not None:
                assert self.pre_process, "a chunk that embeds nothing was handed pixels"
                places = (input_ids[0] == PLACEHOLDER).nonzero()[:, 0]
                assert len(places) == len(pixel_values), f"{len(places)} placeholders, {len(pixel_values)} patches"
                embedded = self.embedding(input_ids, position_ids)
                seen = self.embedding.picture(pixel_values.to(embedded.dtype))
                added = embedded.new_zeros(input_ids.size(1), *embedded.shape[1:]).index_add(0, places, seen[:, None])
                if self.config.sequence_parallel:  # embedded are this rank's tokens only
                    added = scatter_to_sequence_parallel_region(added)
                more["decoder_input"] = embedded + added
            return super().forward(input_ids, position_ids, *rest, **more)

    return Seeing
