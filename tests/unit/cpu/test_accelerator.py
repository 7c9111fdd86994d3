"""The device a process computes on."""

from __future__ import annotations

import pytest
import torch

from slime_core.cpu import accelerator
from slime_core.errors import ConfigError


@pytest.mark.parametrize(("seen", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_gpu_exactly_where_torch_sees_one(monkeypatch, seen, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    assert accelerator("auto") == device


def test_the_cpu_can_be_requested_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert accelerator("cpu") == "cpu"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees no GPU"):
        accelerator("cuda")
