"""The weights of the cases, as Hugging Face folders ``MODEL/actor``, ``MODEL/reference`` and ``MODEL/second``.

The last two are the first with some noise; ``second`` is where the second optimizer step starts. Models: ``fresh``
weights in the shape of the embedded model; the same with ``tied`` embeddings; a small mixture of ``experts``; and
``trained``, the embedded weights themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import slime_core
from slime_core.types import Sample

__all__ = ["ARITHMETIC", "ROUTER_GAP", "load", "make_models", "router_gap"]

ARITHMETIC = Path(slime_core.__file__).parent / "builtin" / "arithmetic"
NOISE = {"reference": 0.3, "second": 0.03}
"""In standard deviations of a weight: divergences far above what float32 rounds, and ratios about the clip range."""
ROUTER_GAP = 1e-4
"""Probability; see :func:`router_gap`."""
SHAPE = {"initializer_range": 0.1, "dtype": torch.float32}
EXPERTS: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}


def make_models(folder: Path) -> None:
    """All of them, into ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = {
        is_tied: AutoConfig.from_pretrained(ARITHMETIC / "model", **SHAPE, tie_word_embeddings=is_tied)
        for is_tied in (False, True)
    }
    made = {
        "fresh": AutoModelForCausalLM.from_config(shape[False]),
        "tied": AutoModelForCausalLM.from_config(shape[True]),
        "experts": Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS)),
        "trained": AutoModelForCausalLM.from_pretrained(ARITHMETIC / "model", dtype=torch.float32),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name / "actor")
        for other, noise in NOISE.items():
            _disturbed(model, noise).save_pretrained(folder / name / other)


@torch.no_grad()
def _disturbed(model: Any, noise: float) -> Any:
    """A copy."""
    changed = copy.deepcopy(model)
    for parameter in changed.parameters():
        parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return changed


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of transformers in ``folder``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def router_gap(model: Any, samples: Iterable[Sample]) -> float:
    """How far the last expert that a token takes is ahead of the first that it does not: probability, the smallest.

    Over all tokens of ``samples`` and all layers; infinity for a dense model. Two computations that round differently
    choose the same experts as long as this is far above what they round.
    """
    smallest = [float("inf")]

    def look(gate: Any, inputs: tuple[torch.Tensor, ...], _: Any) -> None:
        states_TH = inputs[0].reshape(-1, inputs[0].shape[-1])
        ranked_TE = (states_TH @ gate.weight.T).softmax(-1).sort(-1, descending=True).values
        taken = model.config.num_experts_per_tok
        smallest.append(float((ranked_TE[:, taken - 1] - ranked_TE[:, taken]).min()))

    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(look) for gate in gates]
    with torch.no_grad():
        for sample in samples:
            model(torch.tensor([list(sample.tokens)]))
    for hook in hooks:
        hook.remove()
    return min(smallest)
