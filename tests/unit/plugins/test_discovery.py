from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime_core.errors import PluginError
from slime_core.plugins.discovery import CORE, PluginIdentity, Source, claimants, installed, local_file, resolve


def test_an_installed_plugin_is_listed_with_distribution_version_and_entry_point(install):
    install("acme-tree", "2.1", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": ""})
    assert PluginIdentity("tree", "acme-tree", "2.1", "acme_tree.plugin") in installed()


def test_listing_imports_no_plugin(install):
    install("acme-tree", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": "raise SystemExit(3)"})
    assert "tree" in [plugin.name for plugin in installed()]
    assert "acme_tree" not in sys.modules


def test_core_is_listed_once_whether_or_not_it_is_installed():
    assert [plugin for plugin in installed() if plugin.name == "core"] == [CORE]


def test_an_identity_prints_everything_a_reader_needs_to_find_it():
    identity = PluginIdentity("grpo", "slime-grpo", "0.1.0", "slime_grpo.plugin")
    assert str(identity) == "plugin 'grpo' (slime-grpo 0.1.0, entry point slime_grpo.plugin)"


def test_two_distributions_that_claim_one_name_are_both_named_with_versions(install):
    install("acme-tree", "2.1", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": ""})
    install("zeta-tree", "0.3", plugins={"tree": "zeta_tree.plugin"}, files={"zeta_tree/plugin.py": ""})
    with pytest.raises(PluginError) as failure:
        resolve("tree")
    assert str(failure.value) == (
        "--plugin tree: two distributions claim this name: acme-tree 2.1 (acme_tree.plugin) and zeta-tree 0.3 "
        "(zeta_tree.plugin).\nUninstall one; slime prefers neither."
    )


def test_a_stale_second_copy_of_one_distribution_is_not_a_collision(install):
    install("acme-tree", "1.0", plugins={"tree": "old.plugin"}, files={"old/plugin.py": ""}, where="behind")
    install("acme-tree", "2.0", plugins={"tree": "new.plugin"}, files={"new/plugin.py": ""}, where="ahead")
    assert resolve("tree").plugin == PluginIdentity("tree", "acme-tree", "2.0", "new.plugin")


def test_an_unknown_name_is_answered_with_the_nearest_and_the_ways_out(install):
    install("acme-tree", plugins={"tree": "acme_tree.plugin"}, files={"acme_tree/plugin.py": ""})
    with pytest.raises(PluginError, match=r"no installed plugin is called that \(did you mean 'tree'\?\)") as failure:
        resolve("treee")
    assert "give a file (./mine.py) or a dotted module (my_lab.plugin)" in str(failure.value)


def test_a_file_that_is_not_there_is_an_error_before_anything_runs():
    with pytest.raises(PluginError, match=r"--plugin nowhere\.py: there is no such file in "):
        resolve("./nowhere.py")


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


def test_claims_of_an_architecture_carry_plugin_distribution_and_version(install):
    install("acme-models", "4", claims={"AcmeForCausalLM": "acme"}, files={"acme.py": ""})
    assert [str(claim) for claim in claimants("AcmeForCausalLM")] == ["plugin 'acme' (acme-models 4)"]
    assert claimants("NobodyForCausalLM") == []
