from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime_core.errors import PluginError
from slime_core.plugins.discovery import (
    ARCHITECTURE_GROUP,
    CORE,
    PluginIdentity,
    Source,
    claimed_names,
    entry_point_of,
    installed,
    local_file,
    required_by,
    resolve,
    scan,
)


def test_an_installed_plugin_is_listed_with_distribution_version_and_entry_point(install):
    install("acme-tree", "2.1", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": ""})
    assert PluginIdentity("tree", "acme-tree", "2.1", "acme_tree.plugin") in installed()


def test_listing_imports_no_plugin(install):
    install("acme-tree", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": "raise SystemExit(3)"})
    assert "tree" in [plugin.name for plugin in installed()]
    assert "acme_tree" not in sys.modules


def test_core_is_listed_once():
    assert [plugin for plugin in installed() if plugin.name == "core"] == [CORE]


def test_the_entry_point_of_core_says_where_its_hooks_are(install):
    assert entry_point_of("slime-rl", "slime", "core") == CORE.entry_point
    install("slime-rl", "9.9", plugins={"core": "elsewhere.plugin"}, files={"elsewhere/plugin.py": ""})
    assert entry_point_of("slime-rl", "slime", "core") == "elsewhere.plugin"


def test_a_core_without_metadata_is_an_error_that_says_to_install_it():
    with pytest.raises(PluginError, match=r"^slime-none is not installed here: .* 'core' in group 'slime'\.\nInstall"):
        entry_point_of("slime-none", "slime", "core")


def test_an_identity_prints_everything_a_reader_needs_to_find_it():
    identity = PluginIdentity("grpo", "slime-grpo", "0.1.0", "slime_grpo.plugin")
    assert str(identity) == "plugin 'grpo' (slime-grpo 0.1.0, entry point slime_grpo.plugin)"


def test_two_distributions_that_claim_one_name_are_both_named_with_versions(install):
    install("acme-tree", "2.1", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": ""})
    install("zeta-tree", "0.3", plugins={"tree": "zeta_tree.plugin"}, files={"zeta_tree/plugin.py": ""})
    with pytest.raises(PluginError) as failure:
        resolve("tree")
    assert str(failure.value) == (
        "--plugin tree: plugin 'tree' (acme-tree 2.1, entry point acme_tree.plugin) and plugin 'tree' (zeta-tree 0.3, "
        "entry point zeta_tree.plugin) claim one name.\n"
        "Name the one that is meant: --plugin acme-tree:tree or --plugin zeta-tree:tree."
    )


def test_a_distribution_before_the_name_says_which_one_is_meant(install):
    install("acme-tree", "2.1", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": ""})
    install("zeta-tree", "0.3", plugins={"tree": "zeta_tree.plugin"}, files={"zeta_tree/plugin.py": ""})
    assert resolve("zeta-tree:tree").plugin == PluginIdentity("tree", "zeta-tree", "0.3", "zeta_tree.plugin")
    assert resolve("Acme_Tree:tree").plugin.distribution == "acme-tree"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("acme-tree:bush", " (did you mean 'acme-tree:tree'?). Installed plugins: acme-tree:tree."),
        ("missing:tree", ". 'missing' is no distribution with a plugin."),
        (":grpo", ". '' is no distribution with a plugin."),
        ("mine.py:obj", ". 'mine.py' is no distribution with a plugin."),
    ],
)
def test_a_distribution_that_does_not_offer_the_name_is_answered_with_what_it_offers(install, name, found):
    install("acme-tree", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": ""})
    with pytest.raises(PluginError) as failure:
        resolve(name)
    assert str(failure.value) == (
        f"--plugin {name}: no installed plugin is called that{found}\n"
        "Install the distribution that has it, or give a file (./mine.py) or a dotted module (my_lab.plugin). "
        "--no-plugin leaves out one that a file or a run names."
    )


def test_a_plugin_of_ours_that_is_not_installed_is_answered_with_its_distribution(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(PluginError, match=r"--plugin grpo: no installed plugin .*\nInstall slime-grpo, or give a file"):
        resolve("grpo")


def test_a_copy_after_one_without_entry_points_is_ignored(install):
    install("acme-tree", "1.0", plugins={"tree": "old.plugin"}, files={"old/plugin.py": ""}, where="second")
    install("acme-tree", "2.0", files={"new/code.py": ""}, where="ahead")
    assert "tree" not in [plugin.name for plugin in installed()]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("METADATA", b"Metadata-Version: 2.1\n", "ValueError: its METADATA has no Name"),
        ("METADATA", b"Name: broken\n", "ValueError: its METADATA has no Version"),
        ("METADATA", b"\xff\xfe", "UnicodeDecodeError: "),
        ("METADATA", b"Name: other\nVersion: 1.0\n", "PackageNotFoundError: No package metadata was found for other"),
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
    names = [plugin.name for plugin in installed()]
    assert "bush" in names
    assert "tree" not in names
    with pytest.raises(PluginError) as failure:
        resolve("tree")
    assert f"Could not read: a distribution in {site} (" in str(failure.value)
    assert problem in str(failure.value)


def test_requirements_of_a_plugin_come_from_its_own_distribution(install):
    install("acme", plugins={"tree": "acme.plugin"}, requires={"grpo": "tree", "ppo": "other"}, files={"acme.py": ""})
    install("stranger", requires={"evil": "tree"}, files={"stranger.py": ""})
    tree = next(plugin for plugin in installed() if plugin.name == "tree")
    assert required_by(tree, scan()) == ["grpo"]


def test_a_stale_second_copy_of_one_distribution_is_not_a_collision(install):
    install("acme-tree", "1.0", plugins={"tree": "old.plugin"}, files={"old/plugin.py": ""}, where="second")
    install("acme-tree", "2.0", plugins={"tree": "new.plugin"}, files={"new/plugin.py": ""}, where="ahead")
    assert resolve("tree").plugin == PluginIdentity("tree", "acme-tree", "2.0", "new.plugin")


def test_an_unknown_name_is_answered_with_the_nearest_and_the_ways_out(install):
    install("acme-tree", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": ""})
    with pytest.raises(PluginError, match=r"no installed plugin is called that \(did you mean 'tree'\?\)") as failure:
        resolve("treee")
    assert "give a file (./mine.py) or a dotted module (my_lab.plugin)" in str(failure.value)


def test_a_file_that_is_not_there_is_an_error_before_anything_runs():
    with pytest.raises(PluginError, match=r"--plugin nowhere\.py: cannot be read in .* \(No such file or directory\)"):
        resolve("./nowhere.py")


def test_a_file_that_cannot_be_read_is_an_error_before_anything_runs():
    name = "x" * 300 + ".py"
    with pytest.raises(PluginError) as failure:
        resolve(name)
    assert str(failure.value) == (
        f"--plugin {name}: cannot be read in {Path.cwd()} (File name too long); give a Python file that can."
    )


@pytest.mark.parametrize("name", ["./mine.py:obj", "./mine"])
def test_a_file_that_is_half_written_is_answered_with_the_form(name: str):
    with pytest.raises(PluginError, match=r"no installed plugin is called that[\s\S]*or give a file \(\./mine\.py\)"):
        resolve(name)


def test_a_file_is_called_by_its_stem_and_its_module_by_its_hash(tmp_path: Path):
    (tmp_path / "mine.py").write_bytes(b"x = 1\n")
    source = resolve(str(tmp_path / "mine.py"))
    assert source.source is Source.FILE
    assert source.plugin.name == "mine"
    assert source.plugin.entry_point == local_file(b"x = 1\n", path="elsewhere.py").plugin.entry_point
    assert source.plugin.entry_point != local_file(b"x = 2\n", path="mine.py").plugin.entry_point


def test_a_dotted_name_that_no_distribution_declares_is_a_module():
    source = resolve("my_lab.plugin")
    assert (source.source, source.plugin.name, source.plugin.entry_point) == (
        Source.MODULE,
        "my_lab_plugin",
        "my_lab.plugin",
    )


def test_an_architecture_is_that_of_the_plugin_whose_own_distribution_claims_it(install):
    claims = {"AcmeForCausalLM": "acme"}
    install("acme-models", "4", plugins={"acme": "acme"}, claims=claims, files={"acme.py": ""})
    install("other", claims=claims, files={"other.py": ""})
    claimed = claimed_names(ARCHITECTURE_GROUP, scan())
    assert [plugin.distribution for plugin in claimed["AcmeForCausalLM"]] == ["acme-models"]
    assert "NobodyForCausalLM" not in claimed
