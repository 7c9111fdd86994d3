"""The flags of adapters."""

from __future__ import annotations

import pytest

from slime_core.cli.activation import resolve
from slime_core.errors import ConfigError
from slime_lora.options import LoraOptions


def options_of(line: str) -> LoraOptions:
    resolved, _ = resolve(["--plugin", "grpo", *line.split()])
    options = resolved.plugin_options["lora"]
    assert isinstance(options, LoraOptions)
    return options


def test_a_flag_brings_the_plugin_in() -> None:
    assert options_of("--lora-rank 8").rank == 8
    assert options_of("--plugin lora --lora-target-modules q_proj v_proj").target_modules == ("q_proj", "v_proj")


@pytest.mark.parametrize(("rs", "scale"), [(False, 2.0), (True, 8.0)])
def test_the_scale_follows_from_rank_and_alpha(rs: bool, scale: float) -> None:
    assert LoraOptions(rank=16, alpha=32.0, rs=rs).scale == scale


@pytest.mark.parametrize("line", ["--lora-rank 0", "--lora-alpha 0", "--lora-alpha nan"])
def test_values_out_of_range_are_refused(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of(line)
    assert {key.split(".")[0] for key in caught.value.keys} == {"lora"}


def test_layers_of_transformer_engine_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        options_of("--plugin lora --transformer-impl auto")
    assert caught.value.keys == {"transformer_impl"}
