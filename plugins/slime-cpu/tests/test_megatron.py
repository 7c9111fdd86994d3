"""The import hook rewrites what its docstring lists, in the modules that it lists, and nothing else."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_core.errors import RunError
from slime_core.modeling.patches import _Finder
from slime_cpu.megatron import _patch_param_and_grad_buffer, install

Import = Callable[[str], Any]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process without a GPU in which the hook is not installed and Megatron not imported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, _Finder)])
    for name in [n for n in sys.modules if n.startswith(("megatron", "mbridge"))]:
        monkeypatch.delitem(sys.modules, name)
    return monkeypatch


@pytest.fixture
def imported(clean: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Import]:
    """Imports source as a module of a package named mbridge, with the hook installed."""
    install()
    package = tmp_path / "mbridge"
    package.mkdir()
    (package / "__init__.py").touch()
    clean.syspath_prepend(tmp_path)

    def load(source: str) -> Any:
        (package / "probe.py").write_text(source)
        return importlib.import_module("mbridge.probe")

    yield load
    for name in ("mbridge", "mbridge.probe"):
        sys.modules.pop(name, None)


def test_rewritten_byte_code_is_kept_next_to_that_of_processes_without_the_hook(imported, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert imported("device = 'cuda'\n").device == "cpu"
    (kept,) = (tmp_path / "mbridge" / "__pycache__").glob("probe*.pyc")
    assert kept.name.startswith(f"probe.{sys.implementation.cache_tag}.slime-")
    monkeypatch.delitem(sys.modules, "mbridge.probe")
    with monkeypatch.context() as patch:
        patch.setattr(ast, "parse", lambda *_: pytest.fail("compiled again"))
        again = importlib.import_module("mbridge.probe")
    assert (again.device, again.__cached__) == ("cpu", str(kept.with_name(f"probe.{sys.implementation.cache_tag}.pyc")))
    monkeypatch.delitem(sys.modules, "mbridge.probe")
    assert imported("device = 'cuda', 1\n").device == ("cpu", 1)
    monkeypatch.delitem(sys.modules, "mbridge.probe")
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, _Finder)])
    assert importlib.import_module("mbridge.probe").device == ("cuda", 1)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = torch.cuda.current_device()", torch.device("cpu")),
        ("a = torch.zeros(2, device='cuda').device.type", "cpu"),
        ("a = torch.ones(1).cuda(torch.cuda.current_device(), non_blocking=True).device.type", "cpu"),
        ("a = torch.ones(1).pin_memory().device.type", "cpu"),
        ("a = torch.empty(3, pin_memory=True).is_pinned()", False),
        ("a = torch.ones(1).type() == 'torch.cuda.FloatTensor'", True),
        (
            "s = torch.cuda.get_rng_state()\nb = torch.rand(3)\n"
            "torch.cuda.set_rng_state(s)\na = torch.equal(b, torch.rand(3))",
            True,
        ),
        (
            "stream = torch.cuda.Stream()\n"
            "with torch.cuda.stream(stream):\n    event = torch.cuda.Event(enable_timing=True)\n"
            "event.record(); torch.cuda.current_stream().wait_stream(stream); torch.cuda.synchronize()\n"
            "a = event.elapsed_time(event)",
            0.0,
        ),
    ],
    ids=["current device", "literal", "move", "pinned copy", "pinned", "type name", "random state", "streams"],
)
def test_what_asks_for_a_gpu_gets_the_cpu(imported, source, expected):
    assert imported(f"import torch\n{source}\n").a == expected


def test_a_cuda_name_without_a_meaning_fails_where_it_is_used(imported):
    with pytest.raises(AttributeError, match="cudart"):
        imported("import torch\ntorch.cuda.cudart()\n")


def test_line_numbers_stay(imported):
    probe = imported("import torch\n\n\ndef fail():\n    torch.cuda.synchronize()\n    raise ValueError('here')\n")
    with pytest.raises(ValueError, match="here") as caught:
        probe.fail()
    assert caught.traceback[-1].lineno == 5  # counted from 0


@pytest.mark.parametrize("name", ["bystander", "mbridge_tools"])
def test_other_modules_see_the_real_torch(imported, tmp_path, name):
    (tmp_path / f"{name}.py").write_text("import torch\nreal = torch.cuda\nliteral = 'cuda'\n")
    module = importlib.import_module(name)
    assert (module.real is torch.cuda, module.literal) == (True, "cuda")


def test_installing_twice_is_installing_once(clean):
    install()
    before = list(sys.meta_path)
    install()
    assert sys.meta_path == before


def test_installing_after_megatron_is_refused(clean):
    clean.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(RunError, match=r"too late: megatron\.core"):
        install()


@pytest.mark.parametrize(
    ("ranks", "apart", "async_op", "calls"),
    [(1, False, False, 0), (1, True, False, 2), (1, False, True, 2), (2, False, False, 2)],
)
def test_one_rank_alone_exchanges_nothing_within_a_buffer(ranks, apart, async_op, calls):
    found: list[torch.Tensor] = []

    def exchange(output: torch.Tensor, part: torch.Tensor, **_: Any) -> None:
        found.append(output)

    module: Any = types.SimpleNamespace(dist_all_gather_func=exchange, dist_reduce_scatter_func=exchange)
    _patch_param_and_grad_buffer(module)
    buffer, group = torch.ones(4), types.SimpleNamespace(size=lambda: ranks)
    part = buffer.clone() if apart else buffer[:4]
    module.dist_all_gather_func(buffer, part, group=group, async_op=async_op)
    module.dist_reduce_scatter_func(part, buffer, op=None, group=group, async_op=async_op)
    assert len(found) == calls
