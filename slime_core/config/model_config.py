"""Reads the ``config.json`` of Hugging Face folders without transformers.

:func:`described` reads it, :func:`torch_dist_folder` finds weights in Megatron's format, and :func:`forward_flops`
counts the operations of a forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.untrusted import read_object, read_text

NOT_THE_MODEL = frozenset(
    [
        *("_name_or_path", "auto_map", "transformers_version", "torch_dtype", "dtype", "use_cache"),
        *("initializer_range", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("max_position_embeddings", "sliding_window", "max_window_layers"),
    ]
)
"""Fields in which two config.json of the same model may differ: training and saving, context length, and attention
windows, which ``layer_types`` turn on."""

CARRIED = "huggingface"
"""Subfolder of a torch_dist folder with the model's config.json, tokenizer and chat template."""

TRACKER = "latest_checkpointed_iteration.txt"
"""File in which Megatron records the number of its newest checkpoint."""

LARGEST = 2**31 - 1
"""Largest size in config.json that counts as one."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in config.json: Qwen, Mixtral, DeepSeek."""


def described(folder: Path) -> dict[str, Any] | None:
    """Return the object in ``config.json``, or None if it cannot be read."""
    try:
        return read_object(folder / "config.json")
    except (OSError, ValueError):
        return None


def architecture_of(folder: Path | None) -> str | None:
    """Return the architecture in ``config.json``, or None if there is none.

    Arguments:
        folder: Hugging Face folder; None for the built-in model.
    """
    try:
        return str((described(folder or ARITHMETIC / "model") or {})["architectures"][0])
    except (LookupError, TypeError):
        return None


def torch_dist_folder(path: Path) -> Path | None:
    """Return the torch_dist folder that ``path`` names, or None.

    Arguments:
        path: the folder itself, a folder of Megatron with a tracker file, a checkpoint of a run, or a run folder (for
            its newest checkpoint).
    """
    checkpoints = [*path.glob("checkpoints/step-*/torch_dist"), *path.glob("step-*/torch_dist")]
    newest = max(checkpoints, key=lambda folder: (len(folder.parent.name), folder.parent.name), default=None)
    places = [path, path / "torch_dist", *([newest] if newest else [])]
    if (path / TRACKER).is_file():
        iteration = read_text(path / TRACKER, limit=100).strip()
        places.append(path / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else "release"))
    return next((place for place in places if (place / ".metadata").is_file()), None)


def config_folder(torch_dist: Path) -> Path | None:
    """Return the folder with the config.json and the tokenizer of a torch_dist folder, or None."""
    places = (torch_dist / CARRIED, torch_dist.parent / "hf")
    return next((place for place in places if (place / "config.json").is_file()), None)


def start_weights(config: RunConfig) -> Path:
    """Return the folder of the start weights."""
    return config.model.hf_checkpoint or ARITHMETIC / "model"


def differences(a: Mapping[str, Any], b: Mapping[str, Any], *, missing: bool = False) -> list[str]:
    """Return ``name = value of a instead of value of b`` for each field that differs between different models.

    Arguments:
        missing: a field that only one of them has counts as None in the other. False: it is not compared.
    """
    names = (a.keys() | b.keys() if missing else a.keys() & b.keys()) - NOT_THE_MODEL
    return [f"{name} = {a.get(name)} instead of {b.get(name)}" for name in sorted(names) if a.get(name) != b.get(name)]


def whole_number(folder: Path, *names: str) -> int | None:
    """Return the value of the first of ``names`` that is a positive whole number in ``config.json``, or None."""
    fields = described(folder) or {}
    numbers = (fields.get(name) for name in names)
    return next((number for number in numbers if isinstance(number, int) and 0 < number <= LARGEST), None)


def routes_shape(folder: Path) -> tuple[int, int] | None:
    """Return the layers of a mixture of experts and the experts of each token, or None for other models."""
    layers, experts = whole_number(folder, "num_hidden_layers"), whole_number(folder, "num_experts_per_tok")
    return None if layers is None or experts is None or whole_number(folder, *EXPERTS) is None else (layers, experts)


def context_length(folder: Path) -> int | None:
    """Return the maximum tokens of prompt plus response, or None if it is unknown.

    With scaled rotary embeddings a model reads further than ``max_position_embeddings``, as the engine computes.
    """
    if (described(folder) or {}).get("rope_scaling"):
        return None
    return whole_number(folder, "max_position_embeddings")


def weights_dtype(folder: Path) -> str | None:
    """Return the dtype of the weights in ``config.json``, such as ``bfloat16``, or None.

    transformers 4 calls it torch_dtype. Models of several parts may have it only in ``text_config``.
    """
    fields = described(folder) or {}
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, dict) else {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if isinstance(name, str):
            return name.removeprefix("torch.")
    return None


NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
SHARED = "shared_expert_intermediate_size"


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Floating-point operations of a forward pass: a multiplication and an addition are two.

    Example: a model of 100 operations a token and 8 a pair works 3 x 100 + 6 x 8 = 348 on a sequence of 3 tokens.

    Arguments:
        per_token: operations of matrix products for each token, logits included.
        per_pair: operations of attention for each pair of a token and a token that it attends to.
    """

    per_token: int
    per_pair: int

    def of(self, length: int) -> int:
        """Return the operations of a sequence of ``length`` tokens; causal attention has ``length (length + 1) / 2``
        pairs."""
        return self.per_token * length + self.per_pair * (length * (length + 1) // 2)


def forward_flops(described: Mapping[str, Any]) -> ForwardFlops:
    """Count the operations of the decoder in ``config.json``: grouped-query attention, gated MLPs or experts, logits.

    A matrix of n x m costs 2 n m a token (Kaplan et al., 2001.08361, section 2.1). Of h hidden entries, q query heads
    and k key-value heads of d entries, a layer has ``2 h d (2 q + 2 k)`` for its projections, ``6 h i`` for a gated MLP
    of width i (three matrices), or ``6 h i_e`` for each expert of a token and for a shared one, and ``2 h`` for each
    number that routes; a pair costs ``2 d q`` for the score and as much for the value. Left out
    are norms, rotations and softmax, which grow with the tokens as well and are below a hundredth of the whole.

    Raises:
        ValueError: a field is missing, or the attention is of another kind.
    """
    missing = [name for name in NEEDED if not isinstance(described.get(name), int)]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}")
    if described.get("kv_lora_rank"):
        raise ValueError("describes latent attention (kv_lora_rank), whose work is not counted")
    hidden, layers, heads = (int(described[name]) for name in NEEDED[:3])
    width = int(described.get("head_dim") or hidden // heads)
    key_values = int(described.get("num_key_value_heads") or heads)
    projections = 2 * hidden * width * (2 * heads + 2 * key_values)
    experts = _layers_of_experts(described)
    mlps = (layers - experts) * 6 * hidden * int(described["intermediate_size"]) + experts * _expert_flops(described)
    logits = 2 * hidden * int(described["vocab_size"])
    return ForwardFlops(layers * projections + mlps + logits, layers * 4 * heads * width)


def num_experts(described: Mapping[str, Any]) -> int:
    """Return the experts of a layer; 0 for models without experts."""
    return next((int(described[name]) for name in EXPERTS if described.get(name)), 0)


def _layers_of_experts(described: Mapping[str, Any]) -> int:
    """Return the number of layers with experts, by the fields of Qwen (``decoder_sparse_step``, ``mlp_only_layers``)
    and DeepSeek (``first_k_dense_replace``)."""
    if not num_experts(described):
        return 0
    every, dense = int(described.get("decoder_sparse_step") or 1), described.get("mlp_only_layers") or ()
    first = int(described.get("first_k_dense_replace") or 0)
    layers = range(first, int(described["num_hidden_layers"]))
    return sum((layer + 1) % every == 0 and layer not in dense for layer in layers)


def _expert_flops(described: Mapping[str, Any]) -> int:
    hidden, width = int(described["hidden_size"]), described.get("moe_intermediate_size")
    each = int(width or described["intermediate_size"])
    shared = int(described.get(SHARED) or 0)
    gate = 2 * hidden if shared else 0
    shared = shared or each * int(described.get("n_shared_experts") or 0)
    used = int(described.get("num_experts_per_tok") or 1)
    return 6 * hidden * (used * each + shared) + 2 * hidden * num_experts(described) + gate
