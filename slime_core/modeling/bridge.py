"""What mbridge 0.15.1 is shown, which was written for transformers 4 and for layers of TransformerEngine.

The config it sees is a copy of what transformers reads (:func:`transformers_config`) in the old form
(:func:`classic_config`), the weights it sees carry TransformerEngine's names (:class:`NamedForMBridge`), and its bridge
is subclassed, never patched (:func:`local_bridge`). The last three go when mbridge builds the local spec itself.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from slime_core.errors import ConfigError
from slime_core.plugins.contracts import RunView
from slime_core.types import JsonValue

if TYPE_CHECKING:
    from mbridge.core.bridge import Bridge
    from transformers import PretrainedConfig

__all__ = ["NamedForMBridge", "classic_config", "local_bridge", "share_embedding", "transformers_config"]


def transformers_config(config: Mapping[str, JsonValue], run: RunView) -> PretrainedConfig:
    """The object of a ``config.json`` as transformers reads it.

    Raises:
        ConfigError: transformers does not know its ``model_type``, and the run does not trust the checkpoint's code.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = config.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        found: PretrainedConfig = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(config)))
        return found
    if run.model_folder is None or run.settings.get("trust_remote_code") is not True:
        raise ConfigError(
            f"config.json has model_type {kind!r}, which the installed transformers does not know; where the "
            "checkpoint brings Python code for it, add --trust-remote-code"
        )
    code: PretrainedConfig = AutoConfig.from_pretrained(run.model_folder, trust_remote_code=True)
    return code


def classic_config(hf_config: PretrainedConfig) -> PretrainedConfig:
    """A copy in the form of transformers 4: transformers 5 moved ``rope_theta`` into ``rope_parameters``."""
    classic = copy.deepcopy(hf_config)
    for name, value in (hf_config.rope_parameters or {}).items():
        if name in ("rope_theta", "partial_rotary_factor"):
            setattr(classic, name, value)
    return classic


@cache
def local_bridge(model_type: str) -> type[Bridge]:
    """mbridge's class for ``model_type``, made to build local layers and to keep its name table to itself."""
    from mbridge.core.bridge import _MODEL_REGISTRY

    if model_type not in _MODEL_REGISTRY:
        raise ConfigError(
            f"mbridge has no weight mapping for model type {model_type!r}, only for "
            f"{', '.join(sorted(_MODEL_REGISTRY))}; another family needs a plugin whose model spec brings its own "
            "mapping"
        )
    registered: Any = _MODEL_REGISTRY[model_type]

    class LocalBridge(registered):  # type: ignore[misc]
        has_vp_stage = True

        def __init__(self, hf_config: PretrainedConfig, dtype: torch.dtype, settings: Mapping[str, Any]) -> None:
            # A tied model writes into the table of its *class* (models/qwen2.py:60), for every later model.
            self._DIRECT_MAPPING = dict(registered._DIRECT_MAPPING)
            self._settings = settings
            super().__init__(hf_config, dtype=dtype)

        def _build_base_config(self, **derived: Any) -> Any:
            return super()._build_base_config(**{**derived, **self._settings})

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            return self.layers(self.config, vp_stage=vp_stage)

    return LocalBridge


def share_embedding(bridge: Bridge) -> None:
    """A last pipeline stage has its own copy of a tied embedding; mbridge 0.15.1 says so for Qwen2 and Qwen3 alone."""
    bridge._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"
    bridge._get_hf_shared_weight_keys = lambda: ["model.embed_tokens.weight"]


class NamedForMBridge:
    """A chunk whose parameters carry the names of TransformerEngine's layers, the only ones that mbridge maps."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        state = {name: tensor for name, tensor in chunk.state_dict().items() if "_extra_state" not in name}
        self.decoder = chunk.decoder
        self._names = {name: _engine_name(name, state) for name in state}
        self._state = {self._names[name]: tensor for name, tensor in state.items()}
        self._parameters = [(self._names[name], parameter) for name, parameter in chunk.named_parameters()]

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._state

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return self._parameters


def _engine_name(name: str, state: Mapping[str, Any]) -> str:
    """The name a parameter has in TransformerEngine's layers, which fuse a norm into the matrix that follows it."""
    layer = re.sub(r"^(decoder\.layers\.\d+\.).*", r"\1", name)
    name = re.sub(r"\.local_experts\.(\d+)\.(linear_fc\d)\.weight$", r".\2.weight\1", name)
    for norm, matrix in _FUSED_NORMS.items():
        if name.startswith(f"{layer}{norm}.") and f"{layer}{matrix}.weight" in state:
            return name.replace(f"{norm}.", f"{matrix}.layer_norm_")
    return name


_FUSED_NORMS: Mapping[str, str] = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
    "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
}
