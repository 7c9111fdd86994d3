"""Megatron's own flags take effect in the real model; fields that must not be set are refused; rates of every step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_core import RunView
from slime_core.config.learning import OptimizerConfig
from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import ConfigError
from slime_core.modeling.spec import FOLLOWED, MBridgeSpec
from tests.engines import families
from tests.engines.families import config_of, packed_logits

MODEL = ARITHMETIC / "model"

# Megatron warns about its own calls, and that flash attention needs no recomputation; ours is torch's.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
    pytest.mark.filterwarnings("ignore:If you are using transformer_engine:UserWarning"),
]

LENGTHS = (9, 5, 12)


def build(megatron: Any, line: str, *, dtype: torch.dtype = torch.float32) -> Any:
    spec = MBridgeSpec(RunView())
    overrides = load(line.split(), check_rules=False).config.megatron.transformer
    model_config = json.loads((MODEL / "config.json").read_text())
    (chunk,) = spec.build(model_config, dtype=dtype, parallel=megatron, overrides=overrides)
    spec.load_weights([chunk], MODEL)
    return chunk


def step(chunk: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Elements of activations that a forward pass keeps, and the gradients of the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = packed_logits(chunk, (torch.arange(sum(LENGTHS)) % 16).split(LENGTHS))
    logits.log_softmax(-1)[..., 3].sum().backward()
    trained = {name: parameter.grad for name, parameter in chunk.named_parameters() if parameter.grad is not None}
    return sum(kept.values()), trained


def require_close(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


@pytest.mark.parametrize(
    "line",
    [
        "--recompute-activations",
        "--recompute-granularity selective --recompute-modules mlp",
        "--recompute-granularity selective --recompute-modules core_attn mlp",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ],
)
def test_recomputing_keeps_fewer_activations_and_gives_the_same_gradients(megatron, line) -> None:
    plain, expected = step(build(megatron, ""))
    kept, gradients = step(build(megatron, line))
    assert kept < plain
    require_close(gradients, expected)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write("qwen3_moe", tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize(
    "recomputed",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
    ],
    ids=["full", "selective"],
)
def test_recomputed_layers_after_a_frozen_embedding_have_their_gradients(megatron, mixture, recomputed) -> None:
    from slime_core.learner.freezing import freeze

    def gradients(**overrides: Any) -> dict[str, torch.Tensor]:
        _, (chunk,) = families.build("qwen3_moe", mixture, megatron, **overrides)
        freeze([chunk], only=[r"\.mlp\."])
        chunk.train()
        return step(chunk)[1]

    expected = gradients()
    assert len(expected) == 3 * (1 + 2 * 8)  # in each layer a router, and two matrices of each expert
    require_close(gradients(**recomputed), expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", [(1e-3, 1.0, 14), (1e-3, 0.0, 13)]),
        ("--apply-wd-to-qk-layernorm", [(1e-3, 1.0, 20), (1e-3, 0.0, 7)]),
        ("--decoupled-lr 1e-5", [(1e-3, 1.0, 12), (1e-5, 1.0, 2), (1e-3, 0.0, 13)]),
    ],
)
def test_the_optimizer_has_the_requested_groups(megatron, line, expected) -> None:
    """Largest learning rate, factor of the weight decay and number of the parameters in each group."""
    from slime_core.learner.optimizer import build_optimizer, wrap

    config = load(["--lr", "1e-3", *line.split()], check_rules=False).config
    model = wrap([build(megatron, "")], bf16=False)
    optimizer = build_optimizer(model, config.optimizer, bf16=False, overrides=config.megatron.optimizer)
    groups = optimizer.param_groups
    assert [(group["max_lr"], group["wd_mult"], len(group["params"])) for group in groups] == expected


def test_gradients_of_bfloat16_are_accumulated_in_float32_on_request(megatron) -> None:
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = True
    try:
        build(megatron, "--disable-bf16-reduced-precision-matmul", dtype=torch.bfloat16)
        assert not products.allow_bf16_reduced_precision_reduction
    finally:
        products.allow_bf16_reduced_precision_reduction = True


# --- Fields that learner and engine do not both follow ---------------------------------------------------------------

DENSE = config_of("qwen3", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1).to_dict()

OTHER: dict[str, Any] = {
    **dict.fromkeys(("qk_clip", "qk_l2_norm", "attention_output_gate", "apply_query_key_layer_scaling"), True),
    **dict.fromkeys(("fp32_residual_connection", "apply_residual_connection_post_layernorm", "fp16"), True),
    **dict.fromkeys(("layernorm_zero_centered_gamma", "batch_p2p_comm", "deterministic_mode", "cpu_offloading"), True),
    **dict.fromkeys(("moe_pad_expert_input_to_capacity", "moe_router_force_load_balancing"), True),
    **dict.fromkeys(("moe_grouped_gemm", "moe_permute_fusion"), True),
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "moe_input_jitter_eps"), 0.1),
    **dict.fromkeys(("mtp_num_layers", "moe_router_topk_limited_devices"), 1),
    **{"softmax_type": "learnable", "normalization": "LayerNorm", "fp8": "e4m3", "moe_token_drop_policy": "position"},
    **{"moe_router_load_balancing_type": "sinkhorn", "params_dtype": torch.bfloat16, "window_size": [8, 0]},
    **{"softmax_scale": 0.5, "mtp_loss_scaling_factor": 0.3, "activation_func_clamp_value": 7.0},
    **{"glu_linear_offset": 1.0, "moe_expert_capacity_factor": 1.0, "attention_softmax_in_fp32": False},
    **{"no_rope_freq": 4, "tensor_model_parallel_size": 2, "moe_latent_size": 16},
}


def build_with(megatron: Any, spec: MBridgeSpec | None = None, **overrides: Any) -> Any:
    spec = MBridgeSpec(RunView()) if spec is None else spec
    return spec.build(DENSE, dtype=torch.float32, parallel=megatron, overrides=overrides)


@pytest.mark.parametrize("field", OTHER)
def test_what_learner_and_engine_do_not_both_follow_is_refused_by_name(megatron, field) -> None:
    with pytest.raises(ConfigError, match=rf"MBridgeSpec sets {field} = "):
        build_with(megatron, **{field: OTHER[field]})


def test_every_wrong_field_and_one_that_megatron_does_not_have_are_named(megatron) -> None:
    with pytest.raises(ConfigError, match=r"softmax_type = 'learnable'.*qk_clip = True"):
        build_with(megatron, softmax_type="learnable", qk_clip=True, layernorm_epsilon=1e-6)
    with pytest.raises(ConfigError, match="soft_max_type"):
        build_with(megatron, soft_max_type="vanilla")


def test_the_value_that_a_field_has_anyway_may_be_given(megatron) -> None:
    build_with(megatron, softmax_type="vanilla", qk_clip=False, mtp_num_layers=None, moe_expert_capacity_factor=None)


class Bridged(MBridgeSpec):
    """A family whose bridge, and not an override, sets the field."""

    def bridge(self, model_type: str) -> type[object]:
        registered: Any = super().bridge(model_type)

        class Other(registered):  # type: ignore[misc]
            def _build_config(self) -> Any:
                return self._build_base_config(qk_layernorm=True, qk_clip=True)

        return Other


def test_what_the_bridge_of_a_family_sets_is_refused_too(megatron) -> None:
    with pytest.raises(ConfigError, match=r"Bridged .*qk_clip = True .*False"):
        build_with(megatron, Bridged(RunView()))


def test_a_family_declares_what_its_layers_and_its_engine_follow(megatron) -> None:
    class Scaled(MBridgeSpec):
        follows = frozenset({"softmax_scale"})

    (chunk,) = build_with(megatron, Scaled(RunView()), softmax_scale=0.5)
    assert chunk.decoder.layers[0].self_attention.core_attention._scale == 0.5
    with pytest.raises(ConfigError, match="Scaled sets softmax_type = "):
        build_with(megatron, Scaled(RunView()), softmax_scale=0.5, softmax_type="learnable")


def test_the_fields_that_may_be_set_are_megatrons_and_those_of_its_flags_are_among_them(megatron) -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from slime_core.config.engines import MEGATRON_FLAGS

    assert {one.name for one in dataclasses.fields(MLATransformerConfig)} >= FOLLOWED
    flags = {flag.field or name for name, flag in MEGATRON_FLAGS.items() if flag.home == "transformer"}
    assert flags <= FOLLOWED


# --- The learning rate of every step, against tables made by hand ----------------------------------------------------


def rates(*, num_steps: int, **settings: Any) -> list[float]:
    """At which the optimizer steps 1, 2, ... run."""
    from slime_core.learner.optimizer import build_schedule

    optimizer: Any = SimpleNamespace(param_groups=[{}])
    schedule = build_schedule(optimizer, OptimizerConfig(lr=1.0, **settings), num_steps=num_steps)
    by_step = []
    for _ in range(num_steps):
        by_step.append(optimizer.param_groups[0]["lr"])
        schedule.step(increment=1)
    return by_step


WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 0.2 + 0.8 k / 4, then 1.
        ({"lr_warmup_init": 0.2, "lr_warmup_iters": 4}, [0.4, 0.6, 0.8, 1, 1, 1]),
        # 0.1 + 0.9 (1 - k / 4); min_lr after the decay.
        ({"lr_decay_style": "linear", "lr_decay_iters": 4, "min_lr": 0.1}, [0.775, 0.55, 0.325, 0.1, 0.1]),
        # (1 + cos(pi k / 4)) / 2.
        ({"lr_decay_style": "cosine", "lr_decay_iters": 4}, [0.853553, 0.5, 0.146447, 0, 0]),
        # sqrt(4 / k) after a warm-up of 4 steps.
        (
            {"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 4, "lr_decay_iters": 100},
            [0.25, 0.5, 0.75, 1, 0.894427, 0.816497, 0.755929, 0.707107],
        ),
        ({"lr_decay_style": "inverse-square-root", "min_lr": 0.55}, [1, 0.707107, 0.577350, 0.55, 0.55]),
        # 1 until four steps before the end.
        (WSD | {"lr_wsd_decay_style": "linear"}, [1, 1, 1, 1, 0.75, 0.5, 0.25, 0]),
        (WSD | {"lr_wsd_decay_style": "cosine"}, [1, 1, 1, 1, 0.853553, 0.5, 0.146447, 0]),
        # 2 x 0.5 ^ (k / 4) - 1.
        (WSD, [1, 1, 1, 1, 0.681793, 0.414214, 0.189207, 0]),
        # 1 - sqrt(k / 4), from 1 to 0.2.
        (
            WSD | {"lr_wsd_decay_style": "minus_sqrt", "min_lr": 0.2, "lr_warmup_iters": 2},
            [0.5, 1, 1, 1, 0.6, 0.434315, 0.307180, 0.2],
        ),
    ],
)
def test_every_step_runs_at_the_rate_of_the_table(megatron, settings, expected) -> None:
    assert rates(num_steps=len(expected), **settings) == pytest.approx(expected, abs=1e-6)
