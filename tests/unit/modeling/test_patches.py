"""The device type of a process, and Megatron without TransformerEngine where there is a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from slime_core.errors import ConfigError
from slime_core.modeling import prepare_megatron
from slime_core.modeling.patches import _Finder, accelerator


@pytest.mark.parametrize(
    ("seen", "requested", "device"), [(True, "auto", "cuda"), (False, "auto", "cpu"), (True, "cpu", "cpu")]
)
def test_auto_takes_a_gpu_exactly_if_torch_sees_one(
    monkeypatch: pytest.MonkeyPatch, seen: bool, requested: str, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    assert accelerator(requested) == device  # type: ignore[arg-type]


def test_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="GPU"):
        accelerator("cuda")


def test_no_line_is_rewritten_if_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, _Finder)])
    for name in [name for name in sys.modules if name.startswith(("megatron", "mbridge"))]:
        monkeypatch.delitem(sys.modules, name)
    prepare_megatron()
    package = tmp_path / "mbridge"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\ncuda = torch.cuda\nliteral = 'cuda'\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("mbridge")
    assert (module.cuda, module.literal) == (torch.cuda, "cuda")
    sys.modules.pop("mbridge")
