"""The private parts of other libraries that the core touches are where the list says, in the installed versions."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from slime_core.config import internals
from slime_core.config.internals import INTERNALS, READ_FROM, missing_internals
from slime_cpu.serve import server_environment

LIBRARIES = ("torch", "megatron", "mbridge", "sglang", "ray")

IMPORTED = """
import importlib, inspect, json, sys
if "megatron" in sys.argv[1:]:
    from slime_core.modeling import prepare_megatron
    prepare_megatron()
from slime_core.config.internals import INTERNALS
for name, parts in INTERNALS.items():
    if name.partition(".")[0] not in sys.argv[1:]:
        continue
    module = importlib.import_module(name)
    for part in parts:
        first, _, rest = part.partition(".")
        held = getattr(module, first, None)
        if held is None and first not in inspect.getsource(module):
            print(name, part)
        elif rest and not hasattr(held, rest) and rest not in inspect.getsource(held):
            print(name, part)
"""


@pytest.mark.parametrize("packages", [("torch", "megatron", "mbridge"), ("ray",), ("sglang",)])
def test_each_part_can_be_imported(packages):
    environment = os.environ | (server_environment() if "sglang" in packages else {})
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED, *packages]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-2000:]


def test_a_run_looks_for_them_without_importing_anything():
    source = (
        "import sys; from slime_core.config.internals import missing_internals; print(list(missing_internals())); "
        "print(sorted({'torch', 'ray', 'megatron', 'sglang'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_the_versions_that_were_read_are_those_of_the_tests():
    assert {name: metadata.version(name).partition("+")[0] for name in READ_FROM} == dict(READ_FROM)


def test_a_part_that_another_version_lacks_is_named_with_both_versions(monkeypatch):
    parts = {"megatron.core.jit": ("disable_jit_fuser", "warp_drive"), "megatron.core.gone": ("anything",)}
    monkeypatch.setattr(internals, "INTERNALS", {**parts, "never_installed.a": ("b",)})
    first, second = missing_internals()
    assert [text.count(metadata.version("megatron-core")) for text in (first, second)] == [2, 2]
    assert {"warp_drive", "megatron.core.jit,"} <= set(first.split())
    assert {"anything", "megatron.core.gone,"} <= set(second.split())


def test_the_list_is_complete_for_imports_of_private_modules():
    """Names that start with an underscore and are imported from a library stand in the list."""
    root = Path(internals.__file__).parents[1]
    listed = {name.split(".")[0] for names in INTERNALS.values() for name in names} | INTERNALS.keys()
    found = [one for path in root.rglob("*.py") for one in private_imports(ast.parse(path.read_text()))]
    assert len(found) >= 5
    assert [one for one in found if not {*one, ".".join(one)} & listed] == []


def private_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        library = node.module if isinstance(node, ast.ImportFrom) and node.module else ""
        if library.split(".")[0] in LIBRARIES:
            assert isinstance(node, ast.ImportFrom)
            for alias in node.names:
                if any(part.startswith("_") for part in (*library.split("."), alias.name)):
                    yield library, alias.name
