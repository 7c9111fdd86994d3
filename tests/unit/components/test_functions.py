"""Functions that options name by path, and the modules next to their file."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_core.components.functions import find_function, load_function, own_definitions
from slime_core.errors import PluginError
from tests.plugin_files import Site

TWO = "from os.path import join\ndef reward(args, sample): return 1.0\ndef other(args): return 2.0\n_hidden = print\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Site) -> Path:
    """The current folder, with ``mine.py``."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TWO)
    return tmp_path


def function(path: str) -> Any:
    return load_function(find_function(path, setting="custom_rm_path"))


def test_a_function_of_a_file_is_loaded_from_the_bytes_that_were_read(folder: Path) -> None:
    source = pickle.loads(pickle.dumps(find_function("mine.py:reward", setting="custom_rm_path")))
    Path("mine.py").unlink()
    loaded: Any = load_function(source)
    assert loaded(None, None) == 1.0
    assert str(source) == "--custom-rm-path mine.py:reward"
    assert source.content == TWO.encode()


def test_a_file_without_a_name_has_exactly_one_function_that_fits(folder: Path) -> None:
    source = find_function("mine.py", setting="custom_rm_path")
    loaded: Any = load_function(source, fits=lambda value: getattr(value, "__name__", "") == "other")
    assert loaded(None) == 2.0
    assert set(own_definitions(source)) == {"reward", "other"}
    with pytest.raises(PluginError, match="other, reward"):
        load_function(source)


@pytest.mark.parametrize("path", ["os.path.join", "os.path:join"])
def test_a_function_of_a_module_is_named_with_a_dot_or_a_colon(path: str) -> None:
    assert function(path) is os.path.join
    assert find_function(path, setting="x").content is None


@pytest.mark.parametrize(
    "path", ["gone.py:f", "__main__.foo", "x" * 300 + ".py:f", "nowhere_at_all.f", "f", "a b.c", "a.b:c d"]
)
def test_a_path_that_leads_nowhere_is_refused_before_anything_is_imported(path: str) -> None:
    with pytest.raises(PluginError, match="--custom-rm-path"):
        find_function(path, setting="custom_rm_path")


def test_a_name_that_the_module_lacks_is_an_error(folder: Path) -> None:
    with pytest.raises(PluginError, match=r"'missing' .*AttributeError"):
        function("mine.py:missing")


# --- Neighbours -------------------------------------------------------------------------------------------------------

FILES = {
    "mine.py": "from helper import base\nimport tools.deep\n"
    "def reward():\n    from tools import rate\n    return base() + tools.deep.VALUE + rate.VALUE\n",
    "helper.py": "import second\ndef base(): return second.VALUE\n",
    "second.py": "VALUE = 1\n",
    "tools/__init__.py": "",
    "tools/deep.py": "from . import rate\nfrom .rate import VALUE as RATE\nVALUE = 10 * RATE\n",
    "tools/rate.py": "VALUE = 100\n",
    "unused.py": "raise SystemExit(3)\n",
    "json.py": "raise SystemExit(3)\n",
}


@pytest.fixture
def neighbours(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_modules_next_to_the_file_travel_with_it(neighbours: Path) -> None:
    source = find_function("mine.py:reward", setting="custom_rm_path")
    assert set(source.neighbours) == {"helper", "second", "tools", "tools.deep", "tools.rate"}
    for name in FILES:
        (neighbours / name).unlink()
    loaded: Any = load_function(pickle.loads(pickle.dumps(source)))
    assert loaded() == 1 + 1000 + 100
    assert {"helper", "second", "tools"} & sys.modules.keys() == set()


def test_a_neighbour_precedes_an_installed_package_and_not_the_standard_library(folder: Path) -> None:
    Path("pluggy.py").write_text("VALUE = 7\n")
    Path("json.py").write_text("raise SystemExit(3)\n")
    Path("mine.py").write_text("import json, pluggy\ndef reward(): return pluggy.VALUE, json.dumps(1)\n")
    assert function("mine.py:reward")() == (7, "1")
    assert not hasattr(sys.modules["pluggy"], "VALUE")


def test_other_files_of_the_folder_cannot_be_imported(folder: Path) -> None:
    Path("outside.py").write_text("VALUE = 7\n")
    Path("mine.py").write_text("import importlib\ndef reward(): return importlib.import_module('outside')\n")
    with pytest.raises(ModuleNotFoundError):
        function("mine.py:reward")()


@pytest.mark.parametrize("text", ["raise KeyError('x')\n", "def f(:\n", "import no_such_thing\n"])
def test_a_neighbour_that_fails_is_an_error_of_the_option(folder: Path, text: str) -> None:
    Path("helper.py").write_text(text)
    Path("mine.py").write_text("import helper\ndef reward(): ...\n")
    with pytest.raises(PluginError, match="custom_rm_path"):
        function("mine.py:reward")
    Path("helper.py").write_text("x = 1\n")
    assert callable(function("mine.py:reward"))
