"""The shape of a decoder: the fields of ``config.json`` in one typed form.

Fields have the names of Hugging Face's ``config.json``, so that users can look up the names in messages. :func:`read`
converts a checkpoint's file to a :class:`Shape`; a preset is written as a :class:`Shape`, which :func:`config_of`
converts to the object of a file. Nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slime_core.types import JsonValue

__all__ = ["Experts", "Latent", "Positions", "Shape", "ShapeError", "config_of", "differences", "read"]


class ShapeError(ValueError):
    """A field of ``config.json`` is missing or has an invalid value; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Rotary positions (RoFormer, 2104.09864).

    Arguments:
        rope_theta: base of the angles.
        partial_rotary_factor: fraction of a head's entries that are rotated.
        rope_type: ``llama3`` (Llama 3, 2407.21783) and ``yarn`` (2309.00071) scale the angles.
        factor: context length after scaling, divided by the original one.
        original_max_position_embeddings: original context length in tokens; required if ``rope_type`` scales.
        mscale, mscale_all_dim: parameters of YaRN with which DeepSeek-V3 scales attention scores.
    """

    rope_theta: float
    partial_rotary_factor: float = 1.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-latent attention (DeepSeek-V2, 2405.04434): sizes of the compressed queries, keys and values."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Routed experts of a mixture, and the shared experts that every token uses.

    Arguments:
        scoring_func: of the router. ``sigmoid``: with a bias per expert, used only to select (DeepSeek-V3, 2412.19437).
        n_group, topk_group: experts are selected within the best ``topk_group`` of ``n_group`` groups.
        first_k_dense_replace: number of layers at the start without experts.
    """

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder with gated MLPs or experts, RMS norms and rotary positions.

    Arguments:
        architecture, model_type: the names in ``config.json``.
        head_dim: entries of a query head; with ``latent``, only the rotated entries.
        attention_bias: True: queries, keys and values have biases.
        use_qk_norm: True: queries and keys have norms; multi-latent attention has separate norms.
        sandwich_norm: True: additional norms after attention and MLP (GLM-4).
        num_nextn_predict_layers: multi-token prediction layers in the checkpoint, which slime does not build.
    """

    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    positions: Positions
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    use_qk_norm: bool = False
    sandwich_norm: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    num_nextn_predict_layers: int = 0

    @property
    def dense_layers(self) -> int:
        """Number of layers without experts."""
        return self.experts.first_k_dense_replace if self.experts else self.num_hidden_layers


def differences(first: Shape, second: Shape) -> Iterator[tuple[str, object, object]]:
    """Yield field, first value and second value for every field that differs; nested records field by field."""
    yield from _different(first, second)


def _different(first: object, second: object) -> Iterator[tuple[str, object, object]]:
    if not is_dataclass(first):
        return
    for field in fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if type(a) is type(b) and is_dataclass(a):
            yield from _different(a, b)
        elif a != b:
            yield field.name, a, b


# --- config.json ------------------------------------------------------------------------------------------------------

QK_NORMS = ("qwen3", "qwen3_moe")
"""Model types whose files do not mention norms on queries and keys, although the models have them."""

QKV_BIASES = ("qwen2",)
"""Model types whose files do not mention biases on queries, keys and values, although the models have them."""

GLM_MIXTURES = ("glm4_moe", "glm4_moe_lite")
SIGMOID = ("deepseek_v3", "kimi_k2", *GLM_MIXTURES)
"""Model types whose routers use a sigmoid; some files do not mention it."""


def read(config: Mapping[str, JsonValue]) -> Shape:
    """Read the object of a ``config.json``, in the format of transformers 4 or 5.

    Raises:
        ShapeError: a field is missing or has an invalid value.
    """
    kind = str(config.get("model_type"))
    heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    latent = _latent(config) if config.get("kv_lora_rank") else None
    return Shape(
        architecture=_architecture(config),
        model_type=kind,
        hidden_size=hidden,
        intermediate_size=_whole(config, "intermediate_size"),
        num_hidden_layers=_whole(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=_whole(config, "num_key_value_heads", default=heads),
        head_dim=latent.qk_rope_head_dim if latent else _whole(config, "head_dim", default=hidden // heads),
        vocab_size=_whole(config, "vocab_size"),
        max_position_embeddings=_whole(config, "max_position_embeddings"),
        rms_norm_eps=_number(config, "rms_norm_eps"),
        positions=_positions(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias") or kind in QKV_BIASES) and latent is None,
        use_qk_norm=bool(config.get("use_qk_norm") or kind in QK_NORMS),
        sandwich_norm=kind == "glm4",
        latent=latent,
        experts=_experts(config, kind),
        num_nextn_predict_layers=_whole(config, "num_nextn_predict_layers", default=0),
    )


def _architecture(config: Mapping[str, JsonValue]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ShapeError("names no architecture (architectures)")
    return names[0]


def _whole(config: Mapping[str, JsonValue], *names: str, default: int | None = None) -> int:
    number = next((config[name] for name in names if config.get(name) is not None), default)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
        raise ShapeError(f"has {names[0]} = {number!r}; accepted: a whole number")
    return number


def _number(config: Mapping[str, JsonValue], name: str, default: float | None = None) -> float:
    number = config.get(name)
    number = default if number is None else number
    if not isinstance(number, int | float) or isinstance(number, bool):
        raise ShapeError(f"has {name} = {number!r}; accepted: a number")
    return float(number)


def _positions(config: Mapping[str, JsonValue]) -> Positions:
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise ShapeError(f"has rope parameters {table!r}; accepted: an object")
    held = {**config, **table}
    kind = str(table.get("rope_type") or table.get("type") or "default")
    scaled = kind != "default"
    share = 0.5 if str(config.get("model_type")) in ("glm4", "glm4_moe") else 1.0
    return Positions(
        rope_theta=_number(held, "rope_theta"),
        partial_rotary_factor=_number(held, "partial_rotary_factor", share),
        rope_type=kind,
        factor=_number(held, "factor", 1.0) if scaled else 1.0,
        original_max_position_embeddings=_whole(held, "original_max_position_embeddings") if scaled else None,
        mscale=_number(held, "mscale", 1.0) if scaled else 1.0,
        mscale_all_dim=_number(held, "mscale_all_dim", 0.0) if scaled else 0.0,
    )


def _latent(config: Mapping[str, JsonValue]) -> Latent:
    return Latent(
        q_lora_rank=_whole(config, "q_lora_rank", default=0) or None,
        kv_lora_rank=_whole(config, "kv_lora_rank"),
        qk_nope_head_dim=_whole(config, "qk_nope_head_dim"),
        qk_rope_head_dim=_whole(config, "qk_rope_head_dim"),
        v_head_dim=_whole(config, "v_head_dim"),
    )


def _experts(config: Mapping[str, JsonValue], kind: str) -> Experts | None:
    if not (number := _whole(config, "n_routed_experts", "num_experts", "num_local_experts", default=0)):
        return None
    first = 1 if kind == "glm4_moe_lite" else 0
    return Experts(
        n_routed_experts=number,
        num_experts_per_tok=_whole(config, "num_experts_per_tok"),
        moe_intermediate_size=_whole(config, "moe_intermediate_size"),
        n_shared_experts=_whole(config, "n_shared_experts", default=0),
        first_k_dense_replace=_whole(config, "first_k_dense_replace", default=first),
        scoring_func="sigmoid" if kind in SIGMOID else "softmax",
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        routed_scaling_factor=_number(config, "routed_scaling_factor", 1.0),
        n_group=_whole(config, "n_group", default=1),
        topk_group=_whole(config, "topk_group", default=1),
    )


def config_of(shape: Shape) -> dict[str, JsonValue]:
    """Return the object of a ``config.json`` in the format of transformers 4, which 5 also reads; inverts ``read``."""
    held: dict[str, JsonValue] = {"architectures": [shape.architecture], "hidden_act": "silu"}
    special = ("architecture", "positions", "latent", "experts", "sandwich_norm", "use_qk_norm", "attention_bias")
    held |= {field.name: getattr(shape, field.name) for field in fields(shape) if field.name not in special}
    if shape.model_type not in QKV_BIASES:
        held["attention_bias"] = shape.attention_bias
    if shape.model_type == "glm4_moe":
        held["use_qk_norm"] = shape.use_qk_norm
    if shape.latent is not None:
        held |= {field.name: getattr(shape.latent, field.name) for field in fields(shape.latent)}
        del held["head_dim"]
    if shape.experts is not None:
        held |= _config_of_experts(shape.experts, shape.model_type)
    if shape.model_type not in SIGMOID:  # for these, transformers assumes 1 if the file has no number
        del held["num_nextn_predict_layers"]
    return held | _config_of_positions(shape.positions)


def _config_of_experts(experts: Experts, kind: str) -> dict[str, JsonValue]:
    if kind == "qwen3_moe":
        names = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        return {"num_experts": experts.n_routed_experts, **{name: getattr(experts, name) for name in names}}
    held: dict[str, JsonValue] = {field.name: getattr(experts, field.name) for field in fields(experts)}
    if kind in GLM_MIXTURES:  # their files contain neither scoring_func nor topk_method
        del held["scoring_func"]
        return held
    return {**held, "topk_method": "noaux_tc"}


def _config_of_positions(positions: Positions) -> dict[str, JsonValue]:
    held: dict[str, JsonValue] = {"rope_theta": positions.rope_theta}
    if positions.partial_rotary_factor != 1.0:
        held["partial_rotary_factor"] = positions.partial_rotary_factor
    scaling: dict[str, JsonValue] = {
        "rope_type": positions.rope_type,
        "factor": positions.factor,
        "original_max_position_embeddings": positions.original_max_position_embeddings,
    }
    if positions.rope_type == "llama3":
        held["rope_scaling"] = {**scaling, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if positions.rope_type == "yarn":
        yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": positions.mscale}
        held["rope_scaling"] = {**scaling, **yarn, "mscale_all_dim": positions.mscale_all_dim}
    return held
