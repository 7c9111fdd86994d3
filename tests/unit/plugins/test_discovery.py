from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime_core.errors import PluginError
from slime_core.plugins.discovery import (
    CORE,
    PluginIdentity,
    Source,
    entry_point_of,
    installed,
    local_file,
    required_by,
    resolve,
    scan,
)


@pytest.fixture
def trees(install) -> None:
    install("acme-tree", "2.1", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": ""})
    install("zeta-tree", "0.3", plugins={"tree": "zeta_tree.plugin"}, files={"zeta_tree/plugin.py": ""})


def test_a_core_without_metadata_is_an_error_that_says_what_is_not_installed():
    with pytest.raises(PluginError, match=r"^slime-none .* 'core' .* 'slime'"):
        entry_point_of("slime-none", "slime", "core")


def test_core_is_listed_once():
    assert [plugin for plugin in installed() if plugin.name == "core"] == [CORE]


def test_the_entry_point_of_core_says_where_its_hooks_are(install):
    assert entry_point_of("slime-rl", "slime", "core") == CORE.entry_point
    install("slime-rl", "9.9", plugins={"core": "elsewhere.plugin"}, files={"elsewhere/plugin.py": ""})
    assert entry_point_of("slime-rl", "slime", "core") == "elsewhere.plugin"


def test_two_distributions_that_claim_one_name_are_both_named_with_versions(trees):
    with pytest.raises(PluginError, match=r"acme-tree 2\.1.*zeta-tree 0\.3(.|\n)*acme-tree:tree .*zeta-tree:tree"):
        resolve("tree")


def test_a_distribution_before_the_name_says_which_one_is_meant(trees):
    assert resolve("zeta-tree:tree").plugin == PluginIdentity("tree", "zeta-tree", "0.3", "zeta_tree.plugin")
    assert resolve("Acme_Tree:tree").plugin.distribution == "acme-tree"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("acme-tree:bush", "'acme-tree:tree'"),
        ("missing:tree", "'missing'"),
        (":grpo", "''"),
        ("mine.py:obj", "'mine.py'"),
        ("treee", "'tree'"),
        ("./mine.py:obj", r"file \(\./mine\.py\)"),
        ("./mine", r"file \(\./mine\.py\)"),
    ],
)
def test_a_name_that_nothing_offers_is_answered_with_what_is_near_or_missing(install, name, found):
    install("acme-tree", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": ""})
    with pytest.raises(PluginError, match=rf"--plugin {name}: (.|\n)*{found}"):
        resolve(name)


def test_a_plugin_of_ours_that_is_not_installed_is_answered_with_its_distribution(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(PluginError, match=r"--plugin grpo: (.|\n)* slime-grpo"):
        resolve("grpo")


def test_a_copy_after_one_without_entry_points_is_ignored(install):
    install("acme-tree", "1.0", plugins={"tree": "old.plugin"}, files={"old/plugin.py": ""}, where="second")
    install("acme-tree", "2.0", files={"new/code.py": ""}, where="ahead")
    assert "tree" not in [plugin.name for plugin in installed()]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("METADATA", b"Metadata-Version: 2.1\n", "METADATA has no Name"),
        ("METADATA", b"Name: broken\n", "METADATA has no Version"),
        ("METADATA", b"\xff\xfe", "UnicodeDecodeError: "),
        ("METADATA", b"Name: other\nVersion: 1.0\n", "PackageNotFoundError: .* other"),
        ("entry_points.txt", b"[slime]\nno equals sign\n", "Error: "),
        ("entry_points.txt", b"[slime]\ntree = \xff\n", "UnicodeDecodeError: "),
    ],
)
def test_broken_metadata_hides_its_own_plugins_only_and_is_reported_where_one_is_missed(
    install, file, content, problem
):
    install("acme", plugins={"bush": "acme.plugin"}, files={"acme/plugin.py": ""})
    site = install("broken", plugins={"tree": "broken.plugin"}, files={"broken/plugin.py": ""})
    (site / "broken-1.0.dist-info" / file).write_bytes(content)
    assert {"bush", "tree"} & {plugin.name for plugin in installed()} == {"bush"}
    with pytest.raises(PluginError, match=rf"(?s){site} \(.*{problem}"):
        resolve("tree")


def test_requirements_of_a_plugin_come_from_its_own_distribution(install):
    install("acme", plugins={"tree": "acme.plugin"}, requires={"grpo": "tree", "ppo": "other"}, files={"acme.py": ""})
    install("stranger", requires={"evil": "tree"}, files={"stranger.py": ""})
    tree = next(plugin for plugin in installed() if plugin.name == "tree")
    assert required_by(tree, scan()) == ["grpo"]


def test_a_stale_second_copy_of_one_distribution_is_not_a_collision(install):
    install("acme-tree", "1.0", plugins={"tree": "old.plugin"}, files={"old/plugin.py": ""}, where="second")
    install("acme-tree", "2.0", plugins={"tree": "new.plugin"}, files={"new/plugin.py": ""}, where="ahead")
    assert resolve("tree").plugin == PluginIdentity("tree", "acme-tree", "2.0", "new.plugin")


@pytest.mark.parametrize("name", ["nowhere.py", "x" * 300 + ".py"])
def test_a_file_that_cannot_be_read_is_an_error_before_anything_runs(name):
    with pytest.raises(PluginError, match=rf"--plugin {name}: .* {Path.cwd()}"):
        resolve(f"./{name}")


def test_a_file_is_called_by_its_stem_and_its_module_by_its_hash(tmp_path: Path):
    (tmp_path / "mine.py").write_bytes(b"x = 1\n")
    source = resolve(str(tmp_path / "mine.py"))
    assert source.source is Source.FILE
    assert source.plugin.name == "mine"
    assert source.plugin.entry_point == local_file(b"x = 1\n", path="elsewhere.py").plugin.entry_point
    assert source.plugin.entry_point != local_file(b"x = 2\n", path="mine.py").plugin.entry_point


def test_a_dotted_name_that_no_distribution_declares_is_a_module():
    found = resolve("my_lab.plugin")
    assert (found.source, found.plugin.name, found.plugin.entry_point) == (
        Source.MODULE,
        "my_lab_plugin",
        "my_lab.plugin",
    )
