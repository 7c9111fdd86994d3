"""Functions by path: each form, and the message for a path that leads nowhere."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from slime_core.errors import PluginError
from slime_core.plugins.loading import find_function, load_function

TWO = "def reward(args, sample): return 1.0\n\ndef other(args): return 2.0\n\n_hidden = print\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TWO)
    return Path("mine.py")


def test_a_function_of_a_file_is_loaded_from_the_bytes_that_were_read(file: Path) -> None:
    source = pickle.loads(pickle.dumps(find_function("mine.py:reward", setting="custom_rm_path")))
    file.unlink()
    assert load_function(source)(None, None) == 1.0
    assert str(source) == "--custom-rm-path mine.py:reward"


def test_a_file_without_a_name_holds_exactly_one_function_that_fits(file: Path) -> None:
    source = find_function("mine.py", setting="custom_rm_path")
    assert load_function(source, fits=lambda found: found.__name__ == "other")(None) == 2.0
    with pytest.raises(PluginError, match=r"exactly one function there has to fit; found other, reward\. Write mine"):
        load_function(source)


@pytest.mark.parametrize("path", ["os.path.join", "os.path:join"])
def test_a_function_of_a_module_is_found_by_dots_and_by_a_colon(path: str) -> None:
    import os

    assert load_function(find_function(path, setting="custom_rm_path")) is os.path.join


def test_a_class_or_a_nested_name_is_no_surprise(file: Path) -> None:
    source = find_function("mine.py:missing", setting="custom_rm_path")
    with pytest.raises(PluginError, match="looking up 'missing' failed with AttributeError"):
        load_function(source)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.py:f", "--custom-rm-path gone.py:f: cannot be read in"),
        ("__main__.foo", "--custom-rm-path __main__.foo: there is no package '__main__' here"),
        ("x" * 300 + ".py:f", r"x\.py:f: cannot be read in .* \(File name too long\)"),
        ("nowhere_at_all.f", "--custom-rm-path nowhere_at_all.f: there is no package 'nowhere_at_all' here"),
        ("f", "--custom-rm-path f: this is not a path of a function; accepted: package.module.function"),
        ("a b.c", "this is not a path of a function"),
    ],
)
def test_a_path_that_leads_nowhere_says_what_is_accepted(path: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        find_function(path, setting="custom_rm_path")
