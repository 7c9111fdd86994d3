"""Builds models of transformers for the learner, and maps their weights to checkpoints and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from slime_core import RunView
from slime_core.errors import CheckpointError, ConfigError
from slime_core.modeling.layout import ParallelLayout
from slime_core.modeling.patches import accelerator
from slime_core.modeling.spec import transformers_config
from slime_core.types import JsonValue
from slime_transformers.architectures import PACKED
from slime_transformers.refusals import is_in_transformers, unsupported

RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
"""Fields of Megatron's TransformerConfig that this spec reads; any granularity means whole layers, all of them."""


class Transformers:
    """Any architecture of transformers, computed by its modelling code; data parallel only."""

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._config: Mapping[str, JsonValue] = {}

    def build(
        self,
        config: Mapping[str, JsonValue],
        *,
        dtype: torch.dtype,
        parallel: ParallelLayout,
        overrides: Mapping[str, JsonValue] | None = None,
    ) -> list[torch.nn.Module]:
        """Build the model with uninitialised weights, as one chunk.

        Arguments: as for :class:`slime_core.ModelSpec`.

        Raises:
            ConfigError: the architecture, the layout or a field of ``overrides`` is not supported.
        """
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        from slime_transformers.attention import IMPLEMENTATION, register
        from slime_transformers.chunk import TransformersChunk

        problems = [*unsupported(config, self._run), *_unfollowed(parallel, overrides or {})]
        if problems:
            raise ConfigError(f"the {config.get('model_type')} model {', and '.join(problems)}")
        self._config = config
        hf_config = transformers_config(config, self._run)
        without_chance(hf_config)
        packs = (hf_config.architectures or [""])[0] in PACKED and not self._runs_code(config)
        if packs:
            register()
        with no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(
                hf_config,
                dtype=dtype,
                trust_remote_code=self._runs_code(config),
                **({"attn_implementation": IMPLEMENTATION} if packs else {}),
            )
        model.tie_weights()
        if (overrides or {}).get("recompute_granularity"):
            model.gradient_checkpointing_enable()
        chunk = TransformersChunk(megatron_config(hf_config, dtype=dtype), model, packs=packs)
        return [chunk.to(accelerator())]

    def load_weights(self, chunks: Sequence[torch.nn.Module], folder: str | Path) -> None:
        """Load the weights of the Hugging Face folder, in the dtype of the chunk.

        Raises:
            CheckpointError: the folder lacks weights of the model, or has others.
            ConfigError: the rows of the learner give other logits than transformers gives single samples.
        """
        from transformers import AutoModelForCausalLM

        from slime_transformers.comparison import require_same_logits

        chunk: Any = chunks[0]
        parameter = next(chunk.parameters())
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=transformers_config(self._config, self._run),
            dtype=parameter.dtype,
            trust_remote_code=chunk.model_of_transformers.is_custom_code(),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are in the report
            # Only this one has the soft caps of Gemma 2 (transformers 5.19, integrations/sdpa_attention.py).
            **({"attn_implementation": "eager"} if chunk.shares_prompts else {}),
        )
        model, report = loaded
        _refuse_mismatch(report, folder)
        chunk.model_of_transformers._weight_conversions = model._weight_conversions
        if chunk.share_embeddings_and_output_weights:
            _refuse_untied(model, folder)
        chunk.copy_from(model)
        if torch.distributed.get_rank() == 0:
            require_same_logits(chunk, model)

    def export_weights(self, chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight once, with its name and shape in the checkpoint; tied output weights as the embedding."""
        from transformers.core_model_loading import revert_weight_conversion

        chunk: Any = chunks[0]
        # One layer at a time, because reverting a conversion may copy.
        for _, tensors in groupby(chunk.named_tensors(), key=_layer):
            named = {name: tensor.detach() for name, tensor in tensors}
            yield from revert_weight_conversion(chunk.model_of_transformers, named).items()

    def _runs_code(self, config: Mapping[str, JsonValue]) -> bool:
        """Return whether the model is built by code of the checkpoint: that of transformers is preferred."""
        return self._run.settings.get("trust_remote_code") is True and not is_in_transformers(config)


def megatron_config(hf_config: Any, *, dtype: torch.dtype) -> Any:
    """Return Megatron's TransformerConfig for DDP, optimizer and schedule: the sizes, and nothing of the layers."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    text = hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 1  # of Mamba: it has none
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=heads,
        num_query_groups=getattr(text, "num_key_value_heads", None) or heads,
        kv_channels=getattr(text, "head_dim", None) or text.hidden_size // heads,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=None,
        calculate_per_token_loss=True,
    )


def without_chance(hf_config: Any) -> None:
    """Set every dropout rate and noise of the config to 0, so that two passes over the same tokens are equal."""
    for name, value in hf_config.to_dict().items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(hf_config, name, 0.0)


def _unfollowed(parallel: ParallelLayout, overrides: Mapping[str, JsonValue]) -> Iterator[str]:
    if parallel != ParallelLayout():
        yield f"asks for {parallel}; only data parallelism is built"
    free = {"calculate_per_token_loss", *RECOMPUTATION}
    if ignored := sorted(name for name, value in overrides.items() if name not in free and value is not None):
        yield f"asks for {', '.join(ignored)} of Megatron's TransformerConfig, which transformers' layers do not read"


def _refuse_mismatch(report: Any, folder: str | Path) -> None:
    lacks, extra = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    shapes = [f"{name} {list(stored)} instead of {list(built)}" for name, stored, built in report["mismatched_keys"]]
    if lacks or extra or shapes:
        raise CheckpointError(
            f"{folder} does not fit the model of transformers: it lacks {lacks[:5]}, the model has no place for "
            f"{extra[:5]}, and shapes differ: {shapes[:5]}; check config.json against the weights"
        )


def _refuse_untied(model: Any, folder: str | Path) -> None:
    if not torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight):
        raise CheckpointError(
            f"{folder}: config.json ties the output layer to the embedding, and the file has two different weights for "
            "them; set tie_word_embeddings to false in config.json"
        )


def _layer(named: tuple[str, torch.Tensor]) -> str:
    """Return the prefix of the layer that a tensor belongs to."""
    match = re.match(r".*?\.\d+\.", named[0])
    return match[0] if match else ""
