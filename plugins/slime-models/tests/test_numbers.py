"""Every preset against figures that others published, against slime's model scripts and against transformers."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_compat.launch_flags import expected
from slime_models.arguments import arguments
from slime_models.count import count
from slime_models.families import ALL, Preset, presets
from slime_models.recognise import recognise
from slime_models.shape import Shape, config_of, differences, read

PRESETS = list(presets().values())
SCRIPTS: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "slime_arguments.toml").read_text(encoding="utf-8")
)


@pytest.fixture(params=PRESETS, ids=lambda preset: preset.name)
def preset(request: pytest.FixtureRequest) -> Preset:
    param: Preset = request.param
    return param


def agrees(computed: float, printed: float | None, digits: int) -> bool:
    """Whether a card that prints ``printed`` means ``computed`` billions; cards round, and some cut digits off."""
    cut = math.floor(computed * 10**digits + 1e-6) / 10**digits
    return printed is None or printed in (round(computed, digits), cut)


def test_parameters_are_those_that_the_publisher_names(preset) -> None:
    counted, published = count(preset.shape), preset.published
    total, active = counted.published(published.counts)
    assert agrees(total / 1e9, published.total, published.digits)
    assert agrees(active / 1e9, published.active, published.digits)
    assert published.stored in (None, counted.stored + published.other)


def test_most_presets_have_an_exact_count() -> None:
    assert sum(preset.published.stored is not None for preset in PRESETS) >= 27


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_the_model_of_transformers_has_as_many_parameters(family) -> None:
    """Of the smallest preset, without memory for its weights."""
    import torch
    import transformers

    preset = min(family.presets, key=lambda one: count(one.shape).total)
    config = {**config_of(preset.shape), "model_type": family.model_type.replace("kimi_k2", "deepseek_v3")}
    kind = getattr(transformers, family.architecture)
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(config))
    counted = count(preset.shape)
    assert sum(weight.numel() for weight in model.parameters()) == counted.total
    biases = [buffer.numel() for name, buffer in model.named_buffers() if "correction_bias" in name]
    assert sum(biases) == counted.biases


def test_a_shape_survives_its_config_and_is_recognised(preset) -> None:
    assert read(config_of(preset.shape)) == preset.shape
    assert preset.name in [match.name for match in recognise(config_of(preset.shape)).presets]


def test_transformers_reads_the_same_shape(preset) -> None:
    """Through its own class, which has defaults of its own and writes rotary positions in another form."""
    import transformers

    config = config_of(preset.shape)
    kind = str(config["model_type"]).replace("kimi_k2", "deepseek_v3")  # transformers has no class for Kimi's fields
    found = transformers.CONFIG_MAPPING[kind].from_dict({**config, "model_type": kind}).to_dict()
    assert list(differences(preset.shape, read({**found, "model_type": config["model_type"]}))) == []


def test_the_core_finds_every_argument_in_the_config(preset) -> None:
    """What ``--format args`` prints is what ``slime run`` accepts with this checkpoint."""
    config = config_of(preset.shape)
    values = {name.replace("-", "_"): True if value is None else value for name, value in arguments(preset.shape)}
    floats = {name: float(value) if name == "rotary_base" else value for name, value in values.items()}
    assert {name: expected(name, value, config) for name, value in floats.items()} == values


# --- slime's scripts --------------------------------------------------------------------------------------------------

OTHER_NAMES = {
    "llama3.1-8B-Instruct": "llama3.1-8B",
    "llama3.2-3B-Instruct": "llama3.2-3B",
    "moonlight": "moonlight-16B-A3B",
}

DISAGREEMENTS: Mapping[tuple[str, str], str] = {
    ("qwen2.5-1.5B", "rotary-base"): "preset: 1e6 in the config of every Qwen2.5; the script's 10000 is Megatron's own",
    ("qwen2.5-32B", "norm-epsilon"): "both: 1e-6 is the instruct model's, the preset's; 1e-5 the base model's",
    ("glm4-32B", "num-layers"): "preset: 61 layers make the published 32.57B; 64 with 8 groups would make 34.7B",
    ("glm4-32B", "num-query-groups"): "preset: 2 (llama.cpp prints n_head_kv = 2); see num-layers",
    ("glm4.7-30B-A3B", "add-qkv-bias"): "preset: attention_bias is false, and latent attention has no such bias",
}
"""Where a script of slime and a preset differ: which one is right, and why."""


def script_differences(shape: Shape, script: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of the script that say something else than the preset; what the script leaves out says nothing."""
    ours = {name: True if value is None else value for name, value in arguments(shape)}
    ours |= {"num-query-groups": shape.num_key_value_heads, "kv-channels": shape.head_dim, "moe-router-num-groups": 1}
    ours |= {"rotary-percent": shape.positions.partial_rotary_factor, "moe-router-group-topk": 1}
    ours |= {"rotary-scaling-factor": shape.positions.factor, "mscale": 1.0, "mscale-all-dim": 1.0}
    ours |= {"max-position-embeddings": shape.max_position_embeddings, "use-rope-scaling": True}
    ours |= {"post-self-attn-layernorm": shape.sandwich_norm, "rotary-interleaved": shape.model_type == "glm4"}
    if shape.experts is not None and shape.experts.n_group > 1:
        ours |= {"moe-router-num-groups": shape.experts.n_group, "moe-router-group-topk": shape.experts.topk_group}
    of_latent = ("kv-channels", "num-query-groups") if shape.latent else ()
    for name, value in script.items():
        if name not in of_latent and ours.get(name) != value:
            yield name


def test_the_presets_are_slimes_scripts_except_for_the_listed_disagreements() -> None:
    by_name = presets()
    disagreements = {
        (name, argument)
        for name, script in SCRIPTS.items()
        for argument in script_differences(by_name[OTHER_NAMES.get(name, name)].shape, script)
    }
    assert disagreements == set(DISAGREEMENTS)
