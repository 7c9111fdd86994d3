"""Checks that end a run before it publishes a wrong step, and checks of the model. The ranks and the critic call them.

require_...         losses, gradients and weights are finite; loss weights add up; plugins' results keep their contract
require_same_model  the weights of another folder can be loaded into the actor's model
can_share_prompts   rows in which several samples share tokens give the same sums (docs/shared-prompts.md)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_core.config.model_config import differences
from slime_core.errors import ConfigError, NonFiniteError, RunError

REPORT = "Report this to the plugin's author."


def require_finite_metrics(metrics: dict[str, float], rollout: int, *, of: str = "") -> None:
    """Raise NonFiniteError if a metric is not a finite number.

    Arguments:
        of: prefix of the settings that the message names, ``"critic_"`` for the critic.
    """
    bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    if bad:
        settings = " or ".join(f"--{of}{name}".replace("_", "-") for name in ("lr", "clip_grad"))
        raise NonFiniteError(
            f"rollout {rollout}: not finite (NaN or infinity): {', '.join(bad)}. Nothing of this step was published or "
            f"saved. Look at the samples of this rollout, then lower {settings}, or resume from the last "
            "checkpoint with --load."
        )


def require_gradient(has_gradient: float) -> None:
    """Raise RunError if minimising the loss of a step would change no weight.

    Arguments:
        has_gradient: 1 if the loss of any micro-batch on any rank needs a gradient, else 0.
    """
    if not has_gradient:
        raise RunError(
            "the loss of a step needs no gradient: no weight that trains has a part in it, so the step would change "
            "nothing. A loss of --custom-loss-function-path has to be computed from the logits that it is given; else "
            "name other weights in --only-train-params-name-list or --freeze-params-name-list."
        )


def require_loss_weight(weight: float, rollout: int) -> None:
    """Raise RunError unless the loss weights of a step add up to 1, or to 0 if every token is masked."""
    if not (math.isclose(weight, 1.0, abs_tol=1e-3) or weight == 0.0):
        raise RunError(
            f"rollout {rollout}: the loss weights of a step add up to {weight:.6f} instead of 1; "
            "a shard is missing or doubled"
        )


def require_finite_weights(chunks: Sequence[torch.nn.Module], *, rollout: int, of: str = "") -> None:
    """Raise NonFiniteError if a parameter of this rank holds NaN or infinity. One pass, one wait for the device.

    Finite gradients do not make the step finite: a learning rate may be too large for the dtype.

    Arguments:
        of: prefix of the setting that the message names, ``"critic_"`` for the critic's weights.
    """
    named = [(name, parameter.detach()) for chunk in chunks for name, parameter in chunk.named_parameters()]
    # A square norm with a NaN or an infinity is not finite, and on a CPU takes a fifteenth of the largest magnitude's
    # time. The norm of finite weights may overflow; then every element is inspected.
    if math.isfinite(torch.nn.utils.get_total_norm([parameter for _, parameter in named]).item()):
        return
    bad = sorted(name for name, parameter in named if not bool(parameter.isfinite().all()))
    if not bad:
        return
    whose = f"the {of.removesuffix('_')} on " if of else ""
    setting = f"--{of}lr".replace("_", "-")
    raise NonFiniteError(
        f"rollout {rollout}: the optimizer left NaN or infinity in {len(bad)} weights of {whose}this rank, "
        f"{bad[0]} among them. Nothing of this rollout was published or saved. Lower {setting}, or resume from the "
        "last checkpoint with --load."
    )


def require_type(output: Any, expected: type, label: str) -> None:
    """Raise RunError unless ``output`` is an ``expected``."""
    if not isinstance(output, expected):
        raise RunError(f"{label} returned a {type(output).__name__}; accepted: a {expected.__name__}. {REPORT}")


def require_per_token(values: Mapping[str, Any], metrics: Any, *, metrics_name: str, count: int, label: str) -> None:
    """Raise RunError unless every value and every metric is a tensor of one number per response token.

    Arguments:
        values: name of a field -> value.
        metrics: content of the field ``metrics_name``: name of a metric -> tensor.
        count: response tokens.
    """
    if not isinstance(metrics, Mapping):
        raise RunError(
            f"{label} returned {metrics_name} as a {type(metrics).__name__}; accepted: a dict of one number a token "
            f"by name. {REPORT}"
        )
    for name, value in {**values, **{f"{metrics_name}[{name!r}]": metric for name, metric in metrics.items()}}.items():
        is_tensor = isinstance(value, torch.Tensor)
        if not (is_tensor and value.shape == (count,)):
            kind = f"of shape {tuple(value.shape)}" if is_tensor else f"as a {type(value).__name__}"
            raise RunError(
                f"{label} returned {name} {kind} for {count} response tokens; accepted: one number a token. {REPORT}"
            )


def require_same_model(
    folder: Path,
    actor: Path,
    *,
    role: str,
    why: str = "takes turns with the actor in one model",
    trust_remote_code: bool = False,
) -> None:
    """Raise ConfigError unless both folders describe the same model; fields that a config leaves out have defaults.

    Weights of the same shapes load even if the configs differ elsewhere, for example in the base of the rotary
    positions, which changes the log-probabilities.

    Arguments:
        why: reason why ``role`` has to be the same model, for the message.
    """
    from transformers import AutoConfig

    configs = [
        AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).to_dict() for path in (folder, actor)
    ]
    if fields := differences(*configs, missing=True):
        raise ConfigError(
            f"the {role} of {folder} {why}, but it is another one than {actor}: {'; '.join(fields)}. "
            "Accepted is a folder whose config.json describes the same model."
        )


def can_share_prompts(chunks: Sequence[Any], *, context: int, device: torch.device) -> bool:
    """Return whether a row of shared prefixes gives the same sums as one with all tokens repeated. Collective.

    It does not if a module other than our attention mixes tokens, or if the result of a token depends on the other
    tokens of the row or on random numbers.

    Arguments:
        chunks: of the model spec.
        context: ranks that share a row.
        device: of this rank.

    Returns:
        The same on every rank.
    """
    able = torch.tensor(int(context == 1 and all(map(_is_able, chunks))), device=device)
    dist.all_reduce(able, op=dist.ReduceOp.MIN)
    return bool(able)


def _is_able(chunk: Any) -> bool:
    from megatron.core.models.gpt import GPTModel

    from slime_core.modeling.layers import WholeModel

    if isinstance(chunk, WholeModel):
        return chunk.shares_prompts
    if not isinstance(chunk, GPTModel) or chunk.position_embedding_type not in ("rope", "learned_absolute", "none"):
        return False
    config = chunk.config
    routed_together = config.moe_expert_capacity_factor is not None or config.moe_router_enable_expert_bias
    by_chance = bool(config.hidden_dropout or config.attention_dropout)
    across = config.multi_latent_attention or config.mtp_num_layers
    return not (routed_together or by_chance or across) and all(map(_is_ours, chunk.decoder.layers))


def _is_ours(layer: Any) -> bool:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from slime_core.modeling.layers import PackedAttention, PackedSelfAttention

    if type(layer) is not TransformerLayer or not isinstance(layer.self_attention, PackedSelfAttention):
        return False
    return isinstance(layer.self_attention.core_attention, PackedAttention)
