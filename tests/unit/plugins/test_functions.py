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
    with pytest.raises(PluginError, match=r"other, reward\. .*mine"):
        load_function(source)


@pytest.mark.parametrize("path", ["os.path.join", "os.path:join"])
def test_a_function_of_a_module_is_found_by_dots_and_by_a_colon(path: str) -> None:
    import os

    assert load_function(find_function(path, setting="custom_rm_path")) is os.path.join


def test_a_class_or_a_nested_name_is_no_surprise(file: Path) -> None:
    source = find_function("mine.py:missing", setting="custom_rm_path")
    with pytest.raises(PluginError, match=r"'missing' .*AttributeError"):
        load_function(source)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.py:f", "gone.py:f: "),
        ("__main__.foo", "'__main__'"),
        ("x" * 300 + ".py:f", "File name too long"),
        ("nowhere_at_all.f", "'nowhere_at_all'"),
        ("f", r"package\.module\.function"),
        ("a b.c", r"package\.module\.function"),
    ],
)
def test_a_path_that_leads_nowhere_says_what_is_accepted(path: str, message: str) -> None:
    with pytest.raises(PluginError, match=f"--custom-rm-path .*{message}"):
        find_function(path, setting="custom_rm_path")
