"""Builds a Megatron model from a Hugging Face config and maps its weights both ways.

A family that mbridge knows takes three lines::

    class Qwen3(MBridgeSpec):
        pass

and declares its Hugging Face architecture in the traits of its component. If mbridge does not know the family, or maps
it wrongly, the family returns another bridge from :meth:`MBridgeSpec.bridge`. Any other class with the same
three methods is accepted.

mbridge 0.15.1 was written for transformers 4 and for layers of TransformerEngine. Its config is a copy of transformers'
config (:func:`transformers_config`) in the old format (:func:`classic_config`), its weights have the names of
TransformerEngine's layers (:class:`NamedForMBridge`), and its bridge is subclassed (:func:`local_bridge`).
The last three can go when mbridge builds the local spec itself.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_core.components.construction import construct, refusals, run_view
from slime_core.config.schema import ModelConfig, RunConfig
from slime_core.contracts import Place, RunView
from slime_core.errors import CheckpointError, ConfigError, RunError
from slime_core.modeling import unsupported
from slime_core.modeling.export import WeightGatherer
from slime_core.modeling.layout import ParallelLayout
from slime_core.modeling.patches import accelerator
from slime_core.plugins.activation import activate
from slime_core.plugins.lifecycle import Hooks
from slime_core.plugins.registration import Kind
from slime_core.types import JsonValue

if TYPE_CHECKING:
    from mbridge.core.bridge import Bridge
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import PretrainedConfig

__all__ = [
    "MBridgeSpec",
    "MappedWeight",
    "NamedForMBridge",
    "classic_config",
    "local_bridge",
    "local_layers",
    "share_embedding",
    "spec_of_checkpoint",
    "transformer_engine_layers",
    "transformers_config",
]


def transformers_config(config: Mapping[str, JsonValue], run: RunView) -> PretrainedConfig:
    """Return the object of a ``config.json`` as transformers parses it.

    Raises:
        ConfigError: transformers does not know its ``model_type``, and the run does not trust the checkpoint's code.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = config.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        kind_config = CONFIG_MAPPING[kind]
        # transformers writes an infinity as {"__float__": "Infinity"} (configuration_utils.py).
        fields = kind_config._decode_special_floats(copy.deepcopy(dict(config)))
        installed: PretrainedConfig = kind_config.from_dict(fields)
        return installed
    if run.model_folder is None or run.settings.get("trust_remote_code") is not True:
        raise ConfigError(
            f"config.json has model_type {kind!r}, which the installed transformers does not know; if the "
            "checkpoint brings Python code for it, add --trust-remote-code"
        )
    code: PretrainedConfig = AutoConfig.from_pretrained(run.model_folder, trust_remote_code=True)
    return code


def classic_config(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Copy the config in the format of transformers 4: transformers 5 moved ``rope_theta`` into ``rope_parameters``."""
    classic = copy.deepcopy(hf_config)
    for name, value in (hf_config.rope_parameters or {}).items():
        if name in ("rope_theta", "partial_rotary_factor"):
            setattr(classic, name, value)
    return classic


@cache
def local_bridge(registered: Any) -> type[Bridge]:
    """Subclass the bridge ``registered`` so that it builds local layers and has a separate table of names."""

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
    """Map the last pipeline stage's copy of a tied embedding; mbridge 0.15.1 does so only for Qwen2 and Qwen3."""
    bridge._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"
    bridge._get_hf_shared_weight_keys = lambda: ["model.embed_tokens.weight"]


class NamedForMBridge:
    """A chunk with the parameter names of TransformerEngine's layers, the only ones that mbridge maps."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        state = {name: tensor for name, tensor in chunk.state_dict().items() if "_extra_state" not in name}
        self.decoder = chunk.decoder
        self._names = {name: _engine_name(name, state) for name in state}
        self._state = {self._names[name]: tensor for name, tensor in state.items()}
        self._parameters = [(self._names[name], parameter) for name, parameter in chunk.named_parameters()]
        # Tensors of a state dict lack Megatron's attributes, such as the dimension that is split.
        self.tensors: Mapping[str, torch.Tensor] = self._state | dict(self._parameters)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._state

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return self._parameters


@dataclass(frozen=True, slots=True)
class MappedWeight:
    """A tensor of a chunk, and the weights of a Hugging Face checkpoint from which it is assembled.

    Arguments:
        tensor: this rank's share: a parameter, or a buffer such as a router's bias.
        names: Hugging Face names of the weights, such as query, key and value for one fused matrix.
    """

    tensor: torch.Tensor
    names: tuple[str, ...]
    _bridge: object
    _name: str
    _whole_name: str

    def load(self, read: Callable[[list[str]], Mapping[str, torch.Tensor]]) -> None:
        """Copy this rank's share of the full weights into the tensor. Not collective.

        Arguments:
            read: returns the full weights for Hugging Face names.
        """
        bridge: Any = self._bridge
        held = read(list(self.names))
        full = bridge._weight_to_mcore_format(self._name, [held[name] for name in self.names])
        size, rank = self._split
        shares = bridge._weight_split_across_tp(self._name, full, self.tensor, size)
        with torch.no_grad():
            self.tensor.copy_(shares[rank])

    def export(self) -> dict[str, torch.Tensor]:
        """Return Hugging Face name -> full weight, possibly a view; only valid if no other rank has a share."""
        return self._named(self.tensor.detach())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> shape of the full weight."""
        bridge: Any = self._bridge
        share = self.tensor.detach().to("meta")
        size, _ = self._split
        if size > 1 and getattr(self.tensor, "tensor_model_parallel", False):
            share = bridge._weight_merge_across_tp(self._whole_name, [share] * size, self.tensor)
        return {name: tuple(weight.shape) for name, weight in self._named(share).items()}

    def _named(self, full: torch.Tensor) -> dict[str, torch.Tensor]:
        bridge: Any = self._bridge
        return dict(zip(*bridge._weight_to_hf_format(self._whole_name, full), strict=True))

    @property
    def _split(self) -> tuple[int, int]:
        """(Number of ranks that share the tensor, index of this rank)."""
        bridge: Any = self._bridge
        ranks = bridge.mpu
        if ".mlp.experts.linear_fc" in self._name:
            return ranks.etp_size, ranks.etp_rank
        return ranks.tp_size, ranks.tp_rank


def _engine_name(name: str, state: Mapping[str, Any]) -> str:
    """Return the parameter's name in TransformerEngine's layers, which fuse a norm with the following matrix."""
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


#: No fused kernels, which the local layers lack, and no dropout, which would make two passes over one token differ.
PLAIN_LAYERS: Mapping[str, Any] = {
    "apply_rope_fusion": False,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cuda_graph_scope": None,  # the default is deprecated upstream and warns
    "gradient_accumulation_fusion": False,
    "hidden_dropout": 0.0,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
    "mtp_num_layers": None,
    "persist_layer_norm": False,
}


FOLLOWED = frozenset(
    [
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("layernorm_epsilon", "add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func"),
        *("qk_layernorm", "rotary_interleaved"),
        *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim"),
        *("v_head_dim", "rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor"),
        *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
        *("moe_shared_expert_gate", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk"),
        *("moe_router_topk_scaling_factor", "moe_router_pre_softmax", "moe_router_score_function"),
        *("moe_router_dtype", "moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
        *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        *("init_method", "output_layer_init_method", "embedding_init_method", "init_method_std"),
        *("embedding_init_method_std", "perform_initialization", "use_cpu_initialization"),
        *("calculate_per_token_loss", "autocast_dtype", "overlap_p2p_comm", "moe_token_dispatcher_type"),
        *("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage"),
        *("num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split"),
        *("account_for_loss_in_pipeline_split", "microbatch_group_size_per_vp_stage", "recompute_granularity"),
        *("recompute_method", "recompute_num_layers", "recompute_modules", "distribute_saved_activations"),
        *("disable_bf16_reduced_precision_matmul",),
    ]
)
"""Fields of Megatron's TransformerConfig that a model spec may set: the architecture, read by local layers and engines
from ``config.json``, and fields that change no result. Of the others, these layers ignore some (kernels of
TransformerEngine), and engines do not follow some (``softmax_type``)."""


class MBridgeSpec:
    """A model family that mbridge maps, with Megatron's local layers and attention over packed sequences.

    An object builds one model: call :meth:`build` first, then load and export the weights of its chunks.

    Arguments:
        options: the options of the plugin that registered it; this class uses none.
        run: names the checkpoint's own Python code, for a ``model_type`` that transformers does not know.

    Attributes:
        layers: creates the layer spec from ``(config, vp_stage=)``; None for :func:`local_layers`, or those of
            TransformerEngine, by ``transformer_impl``. Set before building.
        provider: creates a chunk from ``(config, pre_process=, post_process=, vp_stage=)``; None for a GPTModel of
            ``layers``.
        follows: names of further fields of Megatron's TransformerConfig that the family sets, because its layers and
            its engine compute them; see :data:`FOLLOWED`.
        unsupported: yields a text for each unsupported field of a ``config.json``. A family that supports less
            overrides it, and its component names the same function in ``add.model_spec(unsupported=...)``.
    """

    unsupported: Callable[[Mapping[str, JsonValue]], Iterator[str]] = staticmethod(unsupported)
    layers: Callable[..., object] | None = None
    provider: Callable[..., torch.nn.Module] | None = None
    follows: frozenset[str] = frozenset()

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._bridge: Any = None
        self._gatherer: WeightGatherer | None = None

    def bridge(self, model_type: str) -> type[object]:
        """Return the class that maps the family: a subclass of ``mbridge.core.LLMBridge``; by default mbridge's own.

        It converts the Hugging Face config to Megatron's TransformerConfig (``_build_config``) and to arguments of
        GPTModel (``_get_gptmodel_args``), and maps the name of every weight (``_DIRECT_MAPPING``,
        ``_ATTENTION_MAPPING``, ``_MLP_MAPPING``). Import mbridge in this method, not at module level.

        Raises:
            ConfigError: mbridge has no such class.
        """
        from mbridge.core.bridge import _MODEL_REGISTRY

        if model_type not in _MODEL_REGISTRY:
            raise ConfigError(
                f"mbridge has no weight mapping for model type {model_type!r}, only for "
                f"{', '.join(sorted(_MODEL_REGISTRY))}; another family needs a plugin with a model spec that maps it"
            )
        bridge: type[Bridge] = _MODEL_REGISTRY[model_type]
        return bridge

    def build(
        self,
        config: Mapping[str, JsonValue],
        *,
        dtype: torch.dtype,
        parallel: ParallelLayout,
        overrides: Mapping[str, JsonValue] | None = None,
    ) -> list[torch.nn.Module]:
        """Build this rank's chunks of the model with random weights, wrapped neither in DDP nor in Float16Module.

        A chunk's forward takes ``(input_ids [1, t], position_ids [1, t], None, packed_seq_params=...)`` and returns
        logits ``[1, t, vocabulary / tensor size]`` on the last pipeline stage. Collective.

        Arguments:
            config: the object of the checkpoint's ``config.json``; missing fields have the defaults of transformers.
            dtype: dtype of the parameters.
            parallel: the layout with which Megatron was initialised (:func:`~.layout.initialize_model_parallel`).
            overrides: fields of Megatron's TransformerConfig by name; they override the checkpoint's.

        Raises:
            ConfigError: the model needs something unsupported, or a field of the TransformerConfig is set that learner
                and engine do not both follow; names the field.
        """
        self._refuse_unsupported(config)
        hf_config = transformers_config(config, self._run)
        # Checked again, because transformers may set a missing field to a value that the layers do not support.
        self._refuse_unsupported(hf_config.to_dict())
        mapping: Any = self.bridge(hf_config.model_type)
        bridge_class: Any = local_bridge(mapping)
        # mbridge would enable sequence parallelism with any tensor parallelism.
        settings = {**PLAIN_LAYERS, "sequence_parallel": parallel.sequence, **(overrides or {})}
        if parallel.pipeline > 1:
            settings.setdefault("pipeline_model_parallel_layout", parallel.stages(hf_config.num_hidden_layers))
        expected = _expected_fields(mapping.TransformerConfigClass, dtype, parallel)
        self._refuse_unfollowed(overrides or {}, expected)  # first, since Megatron fails at some of them
        self._bridge = bridge_class(classic_config(hf_config), dtype, settings)
        self._gatherer = None
        self._refuse_unfollowed({name: getattr(self._bridge.config, name) for name in expected}, expected)
        self._bridge.layers = self._choose_layers()
        if hf_config.tie_word_embeddings:
            share_embedding(self._bridge)
        _refuse_router_losses(self._bridge.config)
        stages = range(parallel.virtual_pipeline)
        return [_build_chunk(self._bridge, stage, parallel, provider=self.provider) for stage in stages]

    def load_weights(self, chunks: Sequence[torch.nn.Module], folder: str | Path) -> None:
        """Load the weights of the Hugging Face checkpoint in ``folder`` into the chunks, in their dtype. Collective.

        Raises:
            CheckpointError: the folder has weights that the model has no place for, or lacks weights of the model.
            RunError: build() was not called.
        """
        bridge = self._built()
        files, mapped = bridge._get_safetensor_io(str(folder)), self.mapped(chunks)
        _refuse_mismatch(bridge, mapped, held=set(files.load_hf_weight_names()), folder=folder)
        for weight in mapped:
            weight.load(files.load_some_hf_weight)

    def leaves_out(self, name: str) -> bool:
        """Return whether the model has no place for weight ``name``: multi-token prediction, or a table of angles."""
        return _is_left_out(name, self._built().hf_config)

    def mapped(self, chunks: Sequence[torch.nn.Module]) -> list[MappedWeight]:
        """Return every tensor of the chunks with its Hugging Face weights.

        Raises:
            RunError: build() was not called.
        """
        bridge = self._built()
        return [weight for chunk in chunks for weight in _mapped(bridge, NamedForMBridge(chunk))]

    def export_weights(self, chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight of the whole model once, with its Hugging Face name, gathered over tensor and pipeline.

        Collective: all ranks iterate to the end, and all get all weights, in the same order. A tensor may be a view of
        the live parameter: copy it if it must outlive the next optimizer step. Tied output weights are exported as the
        embedding only.

        Raises:
            RunError: build() was not called.
        """
        exported = set()
        with torch.no_grad():
            for name, weight in self._gathered(chunks):
                if name not in exported:
                    exported.add(name)
                    yield name, weight.detach()

    def _gathered(self, chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        from mbridge.core.bridge import Bridge

        bridge = self._built()
        ranks = bridge.mpu
        if ranks.pp_size == ranks.tp_size == ranks.ep_size == ranks.etp_size == 1:
            for weight in self.mapped(chunks):
                yield from weight.export().items()
            return
        views = [NamedForMBridge(chunk) for chunk in chunks]
        if type(bridge).export_weights is Bridge.export_weights:
            if self._gatherer is None:
                self._gatherer = WeightGatherer(bridge)
            yield from self._gatherer.gather(views)
        else:  # a family that gathers its weights itself
            yield from bridge.export_weights(views)

    def _choose_layers(self) -> Callable[..., object]:
        """Return the spec's own layers, or those that ``transformer_impl`` requests.

        Raises:
            ConfigError: TransformerEngine is requested and cannot be used.
        """
        settings = self._run.settings
        requested = settings.get("transformer_impl", "local")
        if requested == "local" or (requested == "auto" and accelerator() == "cpu"):
            return self.layers or local_layers
        obstacle = ""
        if self.layers is not None or self.provider is not None:
            obstacle = "the model spec brings other layers"
        elif not has_transformer_engine():
            obstacle = "Megatron cannot import TransformerEngine"
        elif settings.get("only_train_params_name_list") or settings.get("freeze_params_name_list"):
            obstacle = "the names of frozen parameters are those of local layers"
        if obstacle and requested == "transformer_engine":
            raise ConfigError(f"transformer_impl = transformer_engine: {obstacle}; leave --transformer-impl out")
        return transformer_engine_layers if not obstacle else self.layers or local_layers

    def _refuse_unsupported(self, config: Mapping[str, JsonValue]) -> None:
        if reasons := list(self.unsupported(config)):
            raise ConfigError(f"the {config.get('model_type')} model {', and '.join(reasons)}")

    def _refuse_unfollowed(self, fields: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        """Check the fields of a TransformerConfig that no part of this run would follow, or the engine alone."""
        spec = f"model spec {type(self).__module__}:{type(self).__qualname__}"
        free = FOLLOWED | self.follows
        if unknown := sorted(fields.keys() - expected.keys() - self.follows):
            raise ConfigError(f"{spec} sets {', '.join(unknown)}, which the model's TransformerConfig does not have")
        unfollowed = [
            f"{name} = {value!r} instead of {expected[name]!r}"
            for name, value in fields.items()
            if name not in free and value != expected[name]
        ]
        if "sinkhorn" in (balancing := fields.get("moe_router_load_balancing_type") or ()):
            unfollowed.append(f"moe_router_load_balancing_type = {balancing!r} instead of 'none'")
        if unfollowed:
            raise ConfigError(
                f"{spec} sets {', '.join(unfollowed)}: its layers ignore that, or engines compute it otherwise. "
                "Leave it out; if layers and engine of the family do follow it, add the field to the spec's attribute "
                "follows"
            )

    def _built(self) -> Any:
        if self._bridge is None:
            raise RunError("this model spec has no weights before build() was called; call build() first")
        return self._bridge


def spec_of_checkpoint(
    folder: Path, config: Mapping[str, JsonValue], *, plugins: Sequence[str] = (), trust_remote_code: bool = False
) -> MBridgeSpec:
    """Activate the plugins that a checkpoint needs, and return the model spec by which a run would build its model.

    Arguments:
        folder: the folder with the config and the tokenizer.
        config: the object of its ``config.json``.
        plugins: plugins to name, in addition to the one with a model spec for the architecture.
        trust_remote_code: True: the checkpoint's own Python code may run.

    Raises:
        PluginError: no plugin has a model spec for the architecture, or a plugin failed.
        ConfigError: the config names no architecture, or the spec does not support it or does not map single weights.
    """
    match config.get("architectures"):
        case [str(architecture), *_]:
            registry = activate(plugins, architecture=architecture).registry
        case _:
            raise ConfigError(f"{folder / 'config.json'} names no architecture; give the folder of a language model")
    run = run_view(RunConfig(model=ModelConfig(trust_remote_code=trust_remote_code)), model_folder=folder)
    if problems := refusals(registry, architecture, config, run):
        raise ConfigError(f"{folder / 'config.json'} {', and '.join(problems)}")
    offer = registry.model_spec(architecture)
    assert offer is not None  # or the activation had failed
    plugin, component = offer
    name = component.name
    spec = construct(registry, Kind.MODEL_SPEC, name, {}, run)
    hooks = Hooks(registry, place=Place.RANK, options={}, where="building a model")
    hooks.call("slime_model_spec", spec=spec)
    if not isinstance(spec, MBridgeSpec):
        raise ConfigError(
            f"model spec {name!r} of {plugin} does not map parameters to Hugging Face "
            "weights, so its checkpoints cannot be converted; accepted: a subclass of "
            "slime_core.modeling.MBridgeSpec"
        )
    return spec


def _build_chunk(
    bridge: Any, stage: int, parallel: ParallelLayout, *, provider: Callable[..., torch.nn.Module] | None
) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    from slime_core.modeling.experts import replace_dispatchers

    place: dict[str, Any] = {"ignore_virtual": True}
    if parallel.virtual_pipeline > 1:
        place = {"ignore_virtual": False, "vp_stage": stage}
    # Upstream's own layers create their MLP in a way that transformer/mlp.py:95 deprecates.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MLP requires ffn_hidden_size", DeprecationWarning)
        build = bridge._model_provider([]) if provider is None else partial(provider, bridge.config)
        chunk: torch.nn.Module = build(
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            vp_stage=place.get("vp_stage"),
        )
    replace_dispatchers(chunk)
    for parameter in chunk.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunk.to(accelerator())


# --- Checks -----------------------------------------------------------------------------------------------------------


def _expected_fields(of: type[Any], dtype: torch.dtype, parallel: ParallelLayout) -> Mapping[str, Any]:
    """Return the fields of Megatron's TransformerConfig as a spec leaves them, unless they are in :data:`FOLLOWED`.

    Arguments:
        of: Megatron's class, or a subclass; the fields that a subclass adds are not returned.
    """
    base = next(base for base in of.__mro__ if base.__module__.startswith("megatron."))
    plain = base(num_layers=1, hidden_size=1, num_attention_heads=1, **PLAIN_LAYERS)
    return {field.name: getattr(plain, field.name) for field in fields(base)} | {
        "normalization": "RMSNorm",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": parallel.tensor,
        "sequence_parallel": parallel.sequence,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "variable_seq_lengths": True,
        "batch_p2p_comm": False,  # with it, interleaved pipelines over gloo exchange wrong activations
    }


def _refuse_router_losses(config: Any) -> None:
    # Megatron multiplies their gradients by the number of tokens, and expects a division that sum_gradients omits
    # (transformer/moe/router.py, "calculate_per_token_loss").
    balancing = config.moe_router_load_balancing_type not in (None, "none") and config.moe_aux_loss_coeff
    if config.num_moe_experts and (balancing or config.moe_z_loss_coeff):
        raise ConfigError(
            f"the model has a router loss (moe_aux_loss_coeff {config.moe_aux_loss_coeff}, moe_z_loss_coeff "
            f"{config.moe_z_loss_coeff}), which this learner would weight wrongly; only models without are built: give "
            'the overrides moe_router_load_balancing_type="none" and moe_z_loss_coeff=None'
        )


def _refuse_mismatch(bridge: Any, mapped: Iterable[MappedWeight], *, held: set[str], folder: str | Path) -> None:
    """Compare the names of all ranks with those in the folder, because mbridge silently ignores extra weights."""
    import torch.distributed as dist

    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, {name for weight in mapped for name in weight.names})
    expected = set().union(*of_all)
    if bridge.hf_config.tie_word_embeddings:
        held.discard("lm_head.weight")  # some checkpoints store the tied weight twice
    held = {name for name in held if not _is_left_out(name, bridge.hf_config)}
    if held != expected:
        raise CheckpointError(
            f"{folder} does not fit the {bridge.hf_config.model_type} model: it lacks {sorted(expected - held)[:5]}, "
            f"and the model has no place for {sorted(held - expected)[:5]}; check config.json against the weights"
        )


def _is_left_out(name: str, config: PretrainedConfig) -> bool:
    """Return whether a weight belongs to a multi-token prediction layer, after the others, or is a table of angles."""
    first, further = config.num_hidden_layers, getattr(config, "num_nextn_predict_layers", 0) or 0
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return name.endswith("rotary_emb.inv_freq") or (layer is not None and first <= int(layer[1]) < first + further)


def _mapped(bridge: Any, view: NamedForMBridge) -> Iterator[MappedWeight]:
    whole_names = bridge._weight_name_mapping_mcore_local_to_global(view)
    for local, tensor in view.tensors.items():
        name = whole_names[local]
        try:
            names = tuple(bridge._weight_name_mapping_mcore_to_hf(name))
            yield MappedWeight(tensor, names, bridge, local, name)
        except NotImplementedError as error:
            raise CheckpointError(
                f"the model has a parameter {name}, which maps to no weight of a {bridge.hf_config.model_type} "
                "model; a model or a layer spec of one's own keeps the parameter names of Megatron's GPTModel"
            ) from error


# --- Layers -----------------------------------------------------------------------------------------------------------


def local_layers(
    config: TransformerConfig, *, vp_stage: int | None = None, self_attention: type[object] | None = None
) -> TransformerBlockSubmodules:
    """Return Megatron's local layers for this pipeline stage, with our norm and attention over packed sequences.

    Arguments:
        config: Megatron's TransformerConfig.
        vp_stage: chunk of an interleaved pipeline; None if it is not interleaved.
        self_attention: class of the self-attention layers; by default
            :class:`~slime_core.modeling.layers.PackedSelfAttention`.

    Raises:
        ConfigError: the config has multi-latent attention, and no class is given for it.
    """
    if config.multi_latent_attention and self_attention is None:
        raise ConfigError(
            "multi-latent attention needs a layer class that reads packed rows; use the layers of the family's model "
            "spec, or pass a class as self_attention"
        )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoESubmodules

    from slime_core.modeling.experts import GroupedExperts
    from slime_core.modeling.layers import KeepingRouter, PackedAttention, PackedSelfAttention, RMSNorm
    from slime_core.modeling.mlp import is_swiglu, swiglu

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    block.layer_norm = RMSNorm
    config.use_te_activation_func = is_swiglu(config)  # despite its name, Megatron then accepts any activation module
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention
        attention.submodules.core_attention = PackedAttention
        for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if getattr(attention.submodules, norm, IdentityOp) is not IdentityOp:
                setattr(attention.submodules, norm, RMSNorm)
        if attention.module is SelfAttention or self_attention is not None:
            attention.module = self_attention or PackedSelfAttention
        mlps = [layer.submodules.mlp]
        mixture = layer.submodules.mlp.submodules
        if isinstance(mixture, MoESubmodules):
            mixture.router = KeepingRouter
            if mixture.experts.module is SequentialMLP:
                mixture.experts.module = GroupedExperts
            mlps = [mixture.experts, mixture.shared_experts]
        if config.use_te_activation_func:
            for mlp in mlps:
                mlp.submodules.activation_func = swiglu
    return block


def transformer_engine_layers(config: TransformerConfig, *, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return :func:`local_layers` with TransformerEngine's matrices and norms around our attention and experts.

    It multiplies a norm and the matrix after it in one module. So a layer has other parameter names than a local one,
    those that mbridge maps; checkpoints of Megatron have the same names for both.

    Arguments: as for :func:`local_layers`; multi-latent attention is not accepted.
    """
    from megatron.core.extensions import transformer_engine as engine
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe.moe_layer import MoESubmodules

    block = local_layers(config, vp_stage=vp_stage)
    block.layer_norm = engine.TENorm
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm = IdentityOp
        attention.linear_qkv = engine.TELayerNormColumnParallelLinear
        attention.linear_proj = engine.TERowParallelLinear
        for norm in ("q_layernorm", "k_layernorm"):
            if getattr(attention, norm) is not IdentityOp:
                setattr(attention, norm, engine.TENorm)
        if isinstance(parts.mlp.submodules, MoESubmodules):
            parts.pre_mlp_layernorm = engine.TENorm
        else:
            parts.pre_mlp_layernorm = IdentityOp
            parts.mlp.submodules.linear_fc1 = engine.TELayerNormColumnParallelLinear
            parts.mlp.submodules.linear_fc2 = engine.TERowParallelLinear
    return block


def has_transformer_engine() -> bool:
    """Return whether Megatron found TransformerEngine."""
    from megatron.core.extensions import transformer_engine as engine

    return bool(engine.HAVE_TE)
