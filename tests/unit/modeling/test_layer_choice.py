"""Whose layers a model is built of: Megatron's local ones, TransformerEngine's, or those of its spec."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime_core import RunView
from slime_core.errors import ConfigError
from slime_core.modeling import spec
from slime_core.modeling.spec import MBridgeSpec, local_layers, transformer_engine_layers


def own_layers(config: object, *, vp_stage: int | None = None) -> None:
    """The layers of a family."""


def choose(requested: str | None, *, layers: Any = None, provider: Any = None, **settings: Any) -> Any:
    found = MBridgeSpec(RunView(settings={**settings, **({"transformer_impl": requested} if requested else {})}))
    found.layers, found.provider = layers, provider
    return found._choose_layers()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def have(device: str, *, is_installed: bool) -> None:
        monkeypatch.setattr(spec, "accelerator", lambda: device)
        monkeypatch.setattr(spec, "has_transformer_engine", lambda: is_installed)

    return have


@pytest.mark.parametrize(
    ("requested", "device", "is_installed", "expected"),
    [
        ("auto", "cuda", True, transformer_engine_layers),
        ("auto", "cuda", False, local_layers),
        ("auto", "cpu", True, local_layers),
        ("local", "cuda", True, local_layers),
        (None, "cuda", True, local_layers),  # outside of a run
        ("transformer_engine", "cuda", True, transformer_engine_layers),
    ],
)
def test_transformer_engine_is_used_on_gpus_if_it_is_installed(machine, requested, device, is_installed, expected):
    machine(device, is_installed=is_installed)
    assert choose(requested) is expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"layers": own_layers}, own_layers),
        ({"provider": print}, local_layers),
        ({"freeze_params_name_list": ("norm",)}, local_layers),
        ({"only_train_params_name_list": ("mlp",)}, local_layers),
    ],
)
def test_what_needs_local_layers_gets_them_unless_others_are_requested(machine, more, expected):
    machine("cuda", is_installed=True)
    assert choose("auto", **more) is expected
    assert choose("local", **more) is expected
    with pytest.raises(ConfigError, match="transformer_impl"):
        choose("transformer_engine", **more)


def test_a_requested_transformer_engine_that_is_missing_is_refused(machine):
    machine("cuda", is_installed=False)
    with pytest.raises(ConfigError, match="transformer_impl"):
        choose("transformer_engine")


def test_layers_of_multi_latent_attention_need_a_class_for_it() -> None:
    config: Any = SimpleNamespace(multi_latent_attention=True)
    with pytest.raises(ConfigError, match="self_attention"):
        local_layers(config)
