"""The version of FlashAttention that a process uses; stand-ins for both kernels compute on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import _fa4

from slime_core.errors import ConfigError
from slime_core.modeling import kernels
from slime_core.modeling.kernels import Heads, choose_attention
from slime_core.modeling.rows import Sequences, attend_padded

HEADS = Heads(4, 2, 24, 16)


class Device(str):
    """A name of a device whose tensors are on the CPU."""

    type = "cuda"


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch would have active; both versions are exact."""
    versions: list[str] = []
    install(monkeypatch, versions, lambda output: output)
    return versions


def install(monkeypatch: pytest.MonkeyPatch, versions: list[str], fa4: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def attend(query, key, value, spans, *, scale):
        # The row as choose_attention builds it, by the kernel for a CPU.
        ends, continues = torch.tensor([0, 70, 71, 135, 400], dtype=torch.int32), torch.tensor([-1, 0, 0, -1])
        packing = Sequences.of(ends, num_tokens=400, continues=continues).packing
        assert spans.longest == (265, 265)
        output = attend_padded(query, key, value, packing, scale=scale)
        return fa4(output) if versions else output

    monkeypatch.setattr(kernels, "attend_spans", attend)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", versions.append)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: versions[-1] if versions else None)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", versions.clear)


def choose(requested: str, heads: Heads = HEADS, *, dtype: torch.dtype = torch.bfloat16, device: object = None) -> str:
    place = torch.device("cpu") if device == "cpu" else fake_gpu()
    return choose_attention(requested, heads, device=place, dtype=dtype).used  # type: ignore[arg-type]


def fake_gpu() -> object:
    return Device("cpu")


@pytest.mark.parametrize(("requested", "used"), [("auto", "fa4"), ("fa4", "fa4"), ("fa2", "fa2")])
def test_version_4_is_used_unless_version_2_is_requested(active, requested, used):
    assert choose(requested) == used
    assert active == (["FA4"] if used == "fa4" else [])


@pytest.mark.parametrize(
    ("change", "used"),
    [
        (lambda output: output * (1 + 2**-8), "fa4"),  # rounding to bfloat16
        (lambda output: output * 1.1, "fa2"),
        (lambda output: output * torch.nan, "fa2"),
        (lambda output: output.roll(1, 0), "fa2"),
    ],
)
def test_version_4_is_not_used_if_it_computes_something_else(monkeypatch, change, used):
    versions: list[str] = []
    install(monkeypatch, versions, change)
    assert choose("auto") == used
    if used == "fa2":
        with pytest.raises(ConfigError, match="flash_attention"):
            choose("fa4")
        assert versions == []


@pytest.mark.parametrize("error", [ImportError("No module named 'flash_attn'"), AssertionError(), AttributeError("x")])
def test_a_version_4_that_cannot_be_called_is_not_used_and_the_reason_is_named(monkeypatch, active, error):
    def fail(_: str) -> None:
        raise error

    monkeypatch.setattr(attention, "activate_flash_attention_impl", fail)
    choice = choose_attention("auto", HEADS, device=fake_gpu(), dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert choice.used == "fa2"
    assert type(error).__name__ in f"{choice}"
    with pytest.raises(ConfigError, match="flash_attention"):
        choose("fa4")


@pytest.mark.parametrize("is_installed", [True, False])
def test_torch_itself_finds_version_4_in_the_package_that_sglang_installs(monkeypatch, tmp_path, is_installed):
    with monkeypatch.context() as patch:
        install(patch, [], lambda output: output)
        attend = kernels.attend_spans
    monkeypatch.setattr(kernels, "attend_spans", attend)
    if is_installed:
        module = tmp_path / "flash_attn" / "cute" / "interface.py"
        module.parent.mkdir(parents=True)
        module.write_text("_flash_attn_fwd = _flash_attn_bwd = None\n")
        monkeypatch.syspath_prepend(tmp_path)
    try:
        assert choose("auto") == ("fa4" if is_installed else "fa2")
        assert attention.current_flash_attention_impl() == ("FA4" if is_installed else None)
    finally:
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
        _fa4._fa4_import_module.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("heads", "dtype", "device"),
    [
        (HEADS, torch.float32, "cuda"),
        (HEADS, torch.bfloat16, "cpu"),
        (Heads(1, 1, 264, 264), torch.bfloat16, "cuda"),
    ],
)
def test_where_no_flash_attention_computes_none_can_be_requested(active, heads, dtype, device):
    assert choose("auto", heads, dtype=dtype, device=device) == "sdpa"
    assert active == []
    with pytest.raises(ConfigError, match="flash_attention"):
        choose("fa4", heads, dtype=dtype, device=device)


def test_the_heads_of_a_rank():
    grouped = {"tensor_model_parallel_size": 2, "num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 32}
    latent = {"multi_latent_attention": True, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 96}
    for config, heads in (
        (grouped, Heads(4, 2, 32, 32)),
        (grouped | {"tensor_model_parallel_size": 8}, Heads(1, 1, 32, 32)),
        (grouped | latent, Heads(4, 4, 192, 96)),
    ):
        assert Heads.of(SimpleNamespace(**{"multi_latent_attention": False, **config})) == heads  # type: ignore[arg-type]
