"""What a Hugging Face folder's ``config.json`` says about its model, read without transformers.

:func:`described` reads it; :func:`torch_dist_folder` finds weights in Megatron's format; :func:`forward_flops` counts
what a forward pass over a sequence costs; :func:`expected` compares Megatron's flags that describe a model, which
users' launch scripts carry. The model is the checkpoint's, and nothing here changes it: a flag that disagrees with the
file, or that the file does not decide, is a mistake, because it was meant for another checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.config.section import Value
from slime_core.untrusted import read_object, read_text

NOT_THE_MODEL = frozenset(
    [
        *("_name_or_path", "auto_map", "transformers_version", "torch_dtype", "dtype", "use_cache"),
        *("initializer_range", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("max_position_embeddings", "sliding_window", "max_window_layers"),
    ]
)
"""What two config.json may differ in and still describe one model: how it was trained and saved, how far it reads, and
windows, which count only where the layers' types say so."""

CARRIED = "huggingface"
"""Subfolder of a torch_dist folder with the model's config.json, tokenizer and chat template."""

TRACKER = "latest_checkpointed_iteration.txt"
"""File in which Megatron records its newest checkpoint, a folder in the same place."""

LARGEST = 2**31 - 1
"""The largest size of a model's part; what is more is no size, and nothing is built from it."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What config.json calls the number of experts: Qwen, Mixtral, DeepSeek."""


def described(folder: Path) -> dict[str, Any] | None:
    """The object in ``config.json``; None: there is none that can be read."""
    try:
        return read_object(folder / "config.json")
    except (OSError, ValueError):
        return None


def torch_dist_folder(path: Path) -> Path | None:
    """The torch_dist folder that ``path`` names, or None.

    Arguments:
        path: the folder itself, one of Megatron with a tracker file, a checkpoint of a run, or a run folder (then its
            newest checkpoint).
    """
    checkpoints = [*path.glob("checkpoints/step-*/torch_dist"), *path.glob("step-*/torch_dist")]
    newest = max(checkpoints, key=lambda one: (len(one.parent.name), one.parent.name), default=None)
    places = [path, path / "torch_dist", *([newest] if newest else [])]
    if (path / TRACKER).is_file():
        iteration = read_text(path / TRACKER, limit=100).strip()
        places.append(path / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else "release"))
    return next((place for place in places if (place / ".metadata").is_file()), None)


def is_mixture(folder: Path | None) -> bool:
    """Whether the model of ``folder`` chooses experts; False where there is no folder, or it cannot be read."""
    found = None if folder is None else described(folder)
    return found is not None and _experts(found) not in (None, 0, 1)


def config_folder(torch_dist: Path) -> Path | None:
    """The folder with the config.json and the tokenizer of a torch_dist folder; None: it carries none."""
    places = (torch_dist / CARRIED, torch_dist.parent / "hf")
    return next((place for place in places if (place / "config.json").is_file()), None)


def start_weights(config: RunConfig) -> Path:
    """The folder of the start weights, the user's or the embedded one."""
    return config.model.hf_checkpoint or ARITHMETIC / "model"


def differences(a: Mapping[str, Any], b: Mapping[str, Any], *, missing: bool = False) -> list[str]:
    """``name = value of a instead of value of b``, for every field that makes two configs describe different models.

    Arguments:
        missing: a field that only one of them has counts as None in the other; False: it says nothing.
    """
    names = (a.keys() | b.keys() if missing else a.keys() & b.keys()) - NOT_THE_MODEL
    return [f"{name} = {a.get(name)} instead of {b.get(name)}" for name in sorted(names) if a.get(name) != b.get(name)]


def whole_number(folder: Path, *names: str) -> int | None:
    """The first of ``names`` that ``config.json`` gives a positive whole number; None: it gives none."""
    found = described(folder) or {}
    numbers = (found.get(name) for name in names)
    return next((number for number in numbers if isinstance(number, int) and 0 < number <= LARGEST), None)


def routes_shape(folder: Path) -> tuple[int, int] | None:
    """Layers of a mixture and the experts that each of its tokens takes; None: ``config.json`` describes none."""
    layers, experts = whole_number(folder, "num_hidden_layers"), whole_number(folder, "num_experts_per_tok")
    return None if layers is None or experts is None or whole_number(folder, *EXPERTS) is None else (layers, experts)


def context_length(folder: Path) -> int | None:
    """Tokens that the model reads, prompt and response together; None: ``config.json`` does not say.

    With scaled rotary embeddings a model reads further than ``max_position_embeddings``; how far is the engine's to
    know.
    """
    if (described(folder) or {}).get("rope_scaling"):
        return None
    return whole_number(folder, "max_position_embeddings")


def weights_dtype(folder: Path) -> str | None:
    """The type that ``config.json`` gives its weights, such as ``bfloat16``; transformers 4 calls it torch_dtype."""
    found = described(folder) or {}
    name = found.get("dtype") or found.get("torch_dtype")
    return name.removeprefix("torch.") if isinstance(name, str) else None


NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
SHARED = "shared_expert_intermediate_size"


@dataclass(frozen=True, slots=True)
class ForwardFlops:
    """Floating-point operations of a forward pass: a multiplication and an addition are two.

    Example: a model of 100 operations a token and 8 a pair works 3 x 100 + 6 x 8 = 348 on a sequence of 3 tokens.

    Arguments:
        per_token: of the matrix products that every token passes, logits included.
        per_pair: of attention, for a token and one that it sees; itself and all before it.
    """

    per_token: int
    per_pair: int

    def of(self, length: int) -> int:
        """Operations of one sequence of ``length`` tokens with causal attention: ``length (length + 1) / 2`` pairs."""
        return self.per_token * length + self.per_pair * (length * (length + 1) // 2)


def forward_flops(described: Mapping[str, Any]) -> ForwardFlops:
    """Operations of the decoder that ``config.json`` describes: grouped-query attention, gated MLPs or experts, logits.

    A matrix of n x m costs 2 n m a token (Kaplan et al., 2001.08361, section 2.1). Of h hidden entries, q query heads
    and k key-value heads of d entries, a layer has ``2 h d (2 q + 2 k)`` for its projections, ``6 h i`` for a gated MLP
    of width i (three matrices), or ``6 h i_e`` for each of the experts that a token is sent to and for a shared one,
    and ``2 h`` for each number that routes; a pair costs ``2 d q`` for the score and as much for the value. Left out
    are norms, rotations and softmax, which grow with the tokens as well and are below a hundredth of the whole.

    Raises:
        ValueError: something is missing, or the attention is of another kind; the text says what.
    """
    missing = [name for name in NEEDED if not isinstance(described.get(name), int)]
    if missing:
        raise ValueError(f"does not say {', '.join(missing)}")
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


def _num_experts(described: Mapping[str, Any]) -> int:
    return next((int(described[name]) for name in EXPERTS if described.get(name)), 0)


def _layers_of_experts(described: Mapping[str, Any]) -> int:
    """Layers whose MLP is a mixture, as Qwen (``decoder_sparse_step``, ``mlp_only_layers``) and DeepSeek
    (``first_k_dense_replace``) write them down."""
    if not _num_experts(described):
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
    return 6 * hidden * (used * each + shared) + 2 * hidden * _num_experts(described) + gate


Described = Mapping[str, Any]


def expected(name: str, value: Value, described: Described) -> Value | None:
    """What ``--name`` must say for the model: ``value`` itself where it agrees; None: ``config.json`` does not tell.

    Arguments:
        name: of a flag that describes the model, with underscores.
        value: what was given.
        described: the JSON object of the file.
    """
    try:
        return _expected(name, value, described)
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return None  # text where a number belongs, or the like


def _expected(name: str, value: Value, described: Described) -> Value | None:
    if name == "make_vocab_size_divisible_by":
        return _divisor(value, described)
    if name == "moe_layer_freq":
        return _frequency(value, described)
    found: Value | None = _EXPECTED[name](described)
    close = isinstance(found, float) and isinstance(value, float) and math.isclose(found, value, rel_tol=1e-9)
    return value if close else found


def _divisor(value: Value, described: Described) -> Value | None:
    """Megatron pads the vocabulary to a multiple of it; here nothing is padded."""
    size = described.get("vocab_size")
    return None if size is None else (value if isinstance(value, int) and value and size % value == 0 else 1)


def _frequency(value: Value, described: Described) -> Value | None:
    layers = _expert_layers(described)
    if layers is None or _listed(str(value), len(layers)) == layers:
        return None if layers is None else value
    return str(layers).replace(" ", "")


def _expert_layers(described: Described) -> list[int] | None:
    """1 for each layer with experts, 0 for each without."""
    number = described.get("num_hidden_layers")
    if _experts(described) is None or number is None:
        return None
    dense, every = described.get("first_k_dense_replace", 0), described.get("decoder_sparse_step", 1)
    only = described.get("mlp_only_layers") or ()
    return [int(place >= dense and (place + 1) % every == 0 and place not in only) for place in range(number)]


def _listed(text: str, number: int) -> list[int]:
    """``([0]*1+[1]*45)``, ``[0,1,1]`` or ``2`` (every second layer) as one entry a layer."""
    if text.isdigit():
        return [int(place % max(int(text), 1) == 0) for place in range(number)]
    found: list[int] = []
    for part in re.sub(r"[\s()]", "", text).split("+"):
        entries = re.fullmatch(r"\[([\d,]+)\](?:\*(\d{1,4}))?", part)
        found += [int(entry) for entry in entries[1].split(",")] * int(entries[2] or 1) if entries else []
    return found


def _first(*names: str) -> Callable[[Described], Any]:
    """The first of these keys that the file has."""
    return lambda described: next((described[name] for name in names if described.get(name) is not None), None)


def _number(*names: str) -> Callable[[Described], float | None]:
    return lambda described: None if (found := _first(*names)(described)) is None else float(found)


_experts = _first("num_experts", "n_routed_experts", "num_local_experts")
_heads = _first("num_attention_heads")


def _rope(described: Described) -> Mapping[str, Any] | None:
    """Parameters of rotary positions; transformers 5 has them in a table of their own, 4 among the others."""
    held = {**described, **(described.get("rope_parameters") or {})}
    return held if "rope_theta" in held else None


def _base(described: Described) -> float | None:
    rope = _rope(described)
    return None if rope is None else float(rope["rope_theta"])


def _share(described: Described) -> float | None:
    rope = _rope(described)
    return None if rope is None else float(rope.get("partial_rotary_factor") or 1.0)


def _head_size(described: Described) -> int | None:
    size, heads = described.get("hidden_size"), _heads(described)
    return described.get("head_dim") or (size // heads if size and heads else None)


def _is_grouped(described: Described) -> bool | None:
    heads, groups = _heads(described), _first("num_key_value_heads", "num_attention_heads")(described)
    return None if heads is None else groups != heads


def _shared_size(described: Described) -> int | None:
    number, size = described.get("n_shared_experts"), described.get("moe_intermediate_size")
    return described.get("shared_expert_intermediate_size") or (number * size if number and size else None)


def _is_untied(described: Described) -> bool | None:
    tied = described.get("tie_word_embeddings")
    return None if tied is None else not tied


def _has_qkv_bias(described: Described) -> bool:
    return bool(described.get("attention_bias", described.get("model_type") in _BIASED))


_BIASED = ("qwen2", "qwen2_moe")
"""What config.json calls the models that have biases on queries, keys and values without saying so."""


def _has_qk_norm(described: Described) -> bool:
    normed = described.get("kv_lora_rank") is not None or str(described.get("model_type")).startswith("qwen3")
    return bool(described.get("use_qk_norm", normed))


def _score_function(described: Described) -> str | None:
    """The files of Qwen and GLM do not name it."""
    named: str | None = described.get("scoring_func")
    if named is None and described.get("model_type") in _GLM_MIXTURES:
        return "sigmoid"
    return "softmax" if named is None and described.get("model_type") in _QWEN_MIXTURES else named


def _softmax_comes_first(described: Described) -> bool | None:
    """Over all experts, before some are chosen; else over the chosen ones, which norms their sum to 1.

    A sigmoid scores each expert by itself, so always before.
    """
    if _score_function(described) == "sigmoid":
        return True
    normed = described.get("norm_topk_prob")
    return None if normed is None or described.get("model_type") not in _QWEN_MIXTURES else not normed


_QWEN_MIXTURES = ("qwen2_moe", "qwen3_moe")
_GLM_MIXTURES = ("glm4_moe", "glm4_moe_lite")
"""What config.json calls them."""


def _corrects_routing(described: Described) -> bool | None:
    if _experts(described) is None:
        return None
    return described.get("topk_method") == "noaux_tc" or described.get("model_type") in _GLM_MIXTURES


_EXPECTED: Mapping[str, Callable[[Described], Any]] = {
    "num_layers": _first("num_hidden_layers"),
    "hidden_size": _first("hidden_size"),
    "ffn_hidden_size": _first("intermediate_size"),
    "num_attention_heads": _heads,
    "num_query_groups": _first("num_key_value_heads", "num_attention_heads"),
    "group_query_attention": _is_grouped,
    "kv_channels": _head_size,
    "vocab_size": _first("vocab_size"),
    "max_position_embeddings": _first("max_position_embeddings"),
    "norm_epsilon": _number("rms_norm_eps"),
    "layernorm_epsilon": _number("rms_norm_eps"),
    "normalization": lambda described: "RMSNorm" if "rms_norm_eps" in described else None,
    "swiglu": lambda described: described.get("hidden_act") == "silu",
    "untie_embeddings_and_output_weights": _is_untied,
    "disable_bias_linear": lambda described: not described.get("mlp_bias", False),
    "add_bias_linear": lambda described: bool(described.get("mlp_bias", False)),
    "add_qkv_bias": _has_qkv_bias,
    "qk_layernorm": _has_qk_norm,
    "position_embedding_type": lambda described: None if _rope(described) is None else "rope",
    "use_rotary_position_embeddings": lambda described: _rope(described) is not None,
    "no_position_embedding": lambda described: _rope(described) is not None,  # no *learned* ones
    "rotary_base": _base,
    "rotary_percent": _share,
    "num_experts": _experts,
    "moe_router_topk": _first("num_experts_per_tok"),
    "moe_ffn_hidden_size": _first("moe_intermediate_size"),
    "moe_shared_expert_intermediate_size": _shared_size,
    "moe_router_num_groups": _first("n_group"),
    "moe_router_group_topk": _first("topk_group"),
    "moe_router_topk_scaling_factor": _number("routed_scaling_factor"),
    "moe_router_score_function": _score_function,
    "moe_router_pre_softmax": _softmax_comes_first,
    "moe_router_enable_expert_bias": _corrects_routing,
    "multi_latent_attention": lambda described: described.get("kv_lora_rank") is not None,
    "q_lora_rank": _first("q_lora_rank"),
    "kv_lora_rank": _first("kv_lora_rank"),
    "qk_head_dim": _first("qk_nope_head_dim"),
    "qk_pos_emb_head_dim": _first("qk_rope_head_dim"),
    "v_head_dim": _first("v_head_dim"),
}
"""Flag -> what the file tells of it, by the names that Hugging Face's configs use."""
