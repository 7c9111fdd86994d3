from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.errors import PluginError
from slime_core.plugins.discovery import CORE, Plugin, Source, installed, is_path, local_file, resolve, short_name
from slime_core.plugins.registry import load_plugins
from tests.plugin_files import Site


def of_name(name: str) -> list[Plugin]:
    return [plugin for plugin in installed()[0] if plugin.name == name]


def test_core_comes_first_and_once() -> None:
    assert installed()[0][0] == CORE
    assert of_name("core") == [CORE]


def test_an_entry_point_of_the_group_slime_is_a_plugin_and_is_not_imported(site: Site) -> None:
    site.install("acme", "raise SystemExit(3)")
    assert of_name("acme") == [Plugin("acme", "acme-dist", "2.1", "acme_p.plugin")]
    assert str(of_name("acme")[0]) == "plugin 'acme' (acme-dist 2.1)"


def test_entry_points_of_other_groups_are_no_plugins(site: Site, tmp_path: Path) -> None:
    folder = site.install("acme", points={})
    (folder / "acme_dist-2.1.dist-info/entry_points.txt").write_text("[slime.flags]\nx = acme\n[pytest11]\ny = acme\n")
    assert of_name("x") + of_name("y") == []


def test_the_copy_that_python_imports_counts(site: Site) -> None:
    site.install("acme", version="1.0", where="second")
    site.install("acme", version="2.0", where="first")
    assert [plugin.version for plugin in of_name("acme")] == ["2.0"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("METADATA", b"Name: broken-dist\n"),
        ("METADATA", b"Version: 1.0\n"),
        ("METADATA", b"\xff\xfe"),
        ("entry_points.txt", b"[slime]\nno equals sign\n"),
        ("entry_points.txt", b"[slime]\ntree = \xff\n"),
    ],
    ids=["no version", "no name", "METADATA is no text", "no entry point", "entry_points.txt is no text"],
)
def test_metadata_that_cannot_be_read_hides_its_plugins_only(site: Site, file: str, content: bytes) -> None:
    site.install("acme", "@hookimpl\ndef slime_run_start(): ...")
    folder = site.install("broken")
    (folder / "broken_dist-2.1.dist-info" / file).write_bytes(content)
    plugins, unreadable = installed()
    assert {"acme", "broken"} & {plugin.name for plugin in plugins} == {"acme"}
    assert [text.startswith(str(folder)) for text in unreadable] == [True]
    registry = load_plugins(["acme"], options=False)
    assert [place.startswith(str(folder)) for place in registry.broken] == [True]
    with pytest.raises(PluginError, match="broken"):
        load_plugins(["broken"], options=False)


@pytest.mark.parametrize(
    ("word", "named", "name"),
    [
        ("./mine.py", True, "mine"),
        ("/a/b.c/mine.py", True, "mine"),
        ("my_lab.plugin", True, "my_lab_plugin"),
        ("grpo", False, "grpo"),
        ("a-b", False, "a-b"),
    ],
)
def test_words_of_the_flag_name_files_modules_or_installed_plugins(word: str, named: bool, name: str) -> None:
    assert (is_path(word), short_name(word)) == (named, name)


def test_a_dotted_name_is_a_module() -> None:
    assert resolve("my_lab.plugin") == Plugin(
        "my_lab_plugin", "module my_lab.plugin", "(local)", "my_lab.plugin", Source.MODULE
    )


def test_the_module_of_a_file_has_the_name_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(b"x = 1\n")
    plugin = resolve(str(tmp_path / "mine.py"))
    assert (plugin.name, plugin.source, plugin.content) == ("mine", Source.FILE, b"x = 1\n")
    assert plugin.module == local_file(b"x = 1\n", path="elsewhere.py").module
    assert plugin.module != local_file(b"x = 2\n", path="mine.py").module


@pytest.mark.parametrize("name", ["nowhere.py", "x" * 300 + ".py"])
def test_a_file_that_cannot_be_read_is_an_error(name: str) -> None:
    with pytest.raises(PluginError, match=name):
        resolve(f"./{name}")


@pytest.mark.parametrize(("word", "near"), [("gpro", "grpo"), ("offpolcy", "offpolicy"), ("a/b", "grpo")])
def test_an_unknown_name_is_refused_with_the_installed_ones(word: str, near: str) -> None:
    for words in ({"names": [word]}, {"without": [word]}):
        with pytest.raises(PluginError, match=rf"plugin {word}: (.|\n)*{near}"):
            load_plugins(**words, options=False)
