from __future__ import annotations

import pickle
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slime_core import Kind
from slime_core.errors import ManifestMismatch, PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.discovery import Source
from slime_core.plugins.manifest import Manifest, PluginChange, attach, mismatches

PLUGIN = """
from slime_core import Component, hookimpl
@hookimpl
def slime_register_reward_models():
    yield Component("length", target="acme.code:Length")
"""
HOOK = "from slime_core import hookimpl\n@hookimpl\ndef slime_run_start(): ...\n"
LENGTH = "class Length:\n    def __init__(self, options, run): ...\n    async def score(self, samples): ...\n"
FILES = {"acme/__init__.py": "", "acme/plugin.py": PLUGIN, "acme/code.py": LENGTH}
LOCAL = PLUGIN.replace('"acme.code:Length"', 'f"{__name__}:Length"') + LENGTH
ATTACH = """
import sys
from slime_core import Kind
from slime_core.plugins.manifest import Manifest, attach
registry = attach(Manifest.from_json(sys.stdin.read()))
print(registry.load(Kind.REWARD_MODEL, "length").__module__, *[plugin.name for plugin in registry.plugins])
"""


def in_another_process(manifest: Manifest, *, path: Path) -> str:
    arguments = [sys.executable, "-c", ATTACH]
    done = subprocess.run(
        arguments, input=manifest.to_json(), env={"PYTHONPATH": str(path)}, text=True, capture_output=True
    )
    return done.stdout.strip() or done.stderr.strip()


@pytest.fixture
def acme(install) -> Path:
    return install("acme-tree", "2.1", plugins={"acme": "acme.plugin"}, files=FILES)


def test_a_manifest_survives_json_and_pickling(acme):
    manifest = replace(activate(["acme"]).manifest, changes=(PluginChange(4, ("acme: 1 -> 2 (version)",)),))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert pickle.loads(pickle.dumps(manifest)) == manifest
    assert [(entry.plugin, entry.distribution, entry.version, entry.source) for entry in manifest.entries[1:]] == [
        ("acme", "acme-tree", "2.1", Source.INSTALLED)
    ]


def test_a_text_that_is_no_manifest_is_refused():
    with pytest.raises(PluginError, match=r"not a plugin manifest .*; give the text that Manifest\.to_json wrote"):
        Manifest.from_json('{"plugins": [{"plugin": "x"}]}')


@pytest.mark.parametrize("key", ["plugin", "distribution", "version", "entry_point", "digest"])
def test_an_entry_that_leaves_something_empty_is_refused(acme, key):
    text = Manifest((replace(activate(["acme"]).manifest.entries[1], **{key: ""}),)).to_json()
    with pytest.raises(PluginError, match=f"not a plugin manifest .ValueError: an entry's {key} is ''"):
        Manifest.from_json(text)


def test_another_process_attaches_exactly_the_same_set(acme):
    assert in_another_process(activate(["acme"]).manifest, path=acme) == "acme.code core acme"


def test_another_process_refuses_files_that_were_edited_in_place(acme):
    manifest = activate(["acme"]).manifest
    (acme / "acme/code.py").write_text("class Length: changed = True\n")
    assert "content of acme/code.py\nInstall the same on every node" in in_another_process(manifest, path=acme)


def test_a_single_file_travels_as_bytes_and_needs_no_file_there(tmp_path: Path, install):
    (tmp_path / "mine.py").write_text(LOCAL)
    active = activate([str(tmp_path / "mine.py")])
    (tmp_path / "mine.py").unlink()
    module = active.manifest.entries[1].entry_point
    assert in_another_process(active.manifest, path=tmp_path) == f"{module} core mine"


def test_another_content_is_refused_with_plugin_and_both_digests(acme):
    manifest = activate(["acme"]).manifest
    (acme / "acme/code.py").write_text("class Length: changed = True\n")
    old, new = manifest.entries[1].digest, activate(["acme"]).manifest.entries[1].digest
    with pytest.raises(ManifestMismatch) as failure:
        attach(manifest)
    node = socket.gethostname()
    width = max(4, len(node))
    assert str(failure.value) == (
        "the plugins of this process are not the driver's:\n"
        f"  {'node':{width}}  plugin  driver                      found there                 differs in\n"
        f"  {node:{width}}  acme    acme-tree 2.1 {old[:12]}  acme-tree 2.1 {new[:12]}  content of acme/code.py\n"
        "Install the same on every node, or share one environment between the nodes."
    )


def test_of_many_files_that_differ_the_first_three_are_reported(acme):
    before = activate(["acme"]).manifest
    for name in "abcde":
        (acme / f"acme/{name}.txt").touch()
    [difference] = before.differences(activate(["acme"]).manifest)
    assert difference.what == "content of acme/a.txt, acme/b.txt, acme/c.txt and 2 more"


def test_every_plugin_that_differs_is_in_the_table(acme, install):
    site = install("zeta", "1.0", plugins={"zeta": "zeta"}, files={"zeta.py": HOOK})
    manifest = activate(["acme", "zeta"]).manifest
    shutil.rmtree(site / "zeta-1.0.dist-info")
    (acme / "acme/plugin.py").unlink()
    assert [(one.plugin, one.what) for one in mismatches(manifest)] == [
        ("acme", "content of acme/plugin.py"),
        ("zeta", "missing"),
    ]


@pytest.mark.parametrize("name", ["acme/__pycache__/x.py", "acme/x.pyc", "acme/.hidden", "acme/.cache/x.py"])
def test_caches_of_python_and_hidden_files_are_not_in_the_digest(acme, name):
    before = activate(["acme"]).manifest
    (acme / name).parent.mkdir(exist_ok=True)
    (acme / name).touch()
    assert activate(["acme"]).manifest == before


def test_a_template_next_to_the_code_is_part_of_the_digest(acme):
    before = activate(["acme"]).manifest
    (acme / "acme/prompt.txt").write_text("Think first.")
    assert activate(["acme"]).manifest.entries[1].digest != before.entries[1].digest


def test_a_missing_package_whose_metadata_stays_is_reported_as_such(acme):
    manifest = activate(["acme"]).manifest
    shutil.rmtree(acme / "acme")
    [difference] = mismatches(manifest)
    assert (difference.found, difference.what) == ("acme-tree 2.1 (no files)", "content")


def test_a_record_that_cannot_be_read_is_an_error_of_its_plugin(acme):
    (acme / "acme_tree-2.1.dist-info" / "RECORD").write_text("acme/plugin.py,sha256=x,1,extra\n")
    with pytest.raises(PluginError, match=r"plugin 'acme' \(acme-tree 2\.1, .* reading its RECORD(.|\n)*Reinstall it"):
        activate(["acme"])


def test_a_file_that_the_record_does_not_know_changes_the_digest(acme):
    before = activate(["acme"]).manifest
    (acme / "acme/extra.py").write_text("x = 1\n")
    assert activate(["acme"]).manifest.entries[1].digest != before.entries[1].digest


def test_a_second_package_of_the_distribution_is_part_of_the_digest(install):
    site = install("acme-tree", plugins={"acme": "acme.plugin"}, files={**FILES, "acme_kernels/fast.py": "x = 1\n"})
    before = activate(["acme"]).manifest
    (site / "acme_kernels/fast.py").write_text("x = 2\n")
    assert activate(["acme"]).manifest.entries[1].digest != before.entries[1].digest


def test_a_deleted_file_changes_the_digest(acme):
    before = activate(["acme"]).manifest
    (acme / "acme/code.py").unlink()
    assert activate(["acme"]).manifest.entries[1].digest != before.entries[1].digest


def test_an_editable_install_has_the_digest_of_the_installed_files_and_says_what_it_is(acme):
    before = activate(["acme"]).manifest.entries[1]
    info = acme / "acme_tree-2.1.dist-info"
    (info / "RECORD").write_text("_editable_impl_acme.pth,,\nacme_tree-2.1.dist-info/METADATA,,\n../../bin/acme,,\n")
    (info / "METADATA.orig").touch()
    (info / "direct_url.json").write_text('{"url": "file:///source", "dir_info": {"editable": true}}')
    assert activate(["acme"]).manifest.entries[1] == replace(before, editable=True)


def test_another_version_is_refused_with_plugin_and_both_versions(acme):
    manifest = activate(["acme"]).manifest
    entry = manifest.entries[1]
    with pytest.raises(ManifestMismatch) as failure:
        attach(Manifest((manifest.entries[0], replace(entry, version="2.0"))))
    content = entry.digest[:12]
    assert f"acme    acme-tree 2.0 {content}  acme-tree 2.1 {content}  version\n" in str(failure.value)
    assert str(failure.value).endswith("Install the same on every node, or share one environment between the nodes.")


def test_another_version_of_the_core_is_refused():
    core = replace(activate([]).manifest.entries[0], version="0.0.9")
    with pytest.raises(ManifestMismatch, match=r"core    slime-rl 0\.0\.9 \w{12}  slime-rl 0\.1\.0 \w{12}  version"):
        attach(Manifest((core,)))


def test_a_distribution_that_is_not_installed_here_is_named(acme):
    entry = replace(activate(["acme"]).manifest.entries[1], distribution="nowhere-tree")
    with pytest.raises(ManifestMismatch, match=r"acme    nowhere-tree 2\.1 \w{12}  -            missing"):
        attach(Manifest((entry,)))


def test_bytes_that_do_not_match_their_digest_are_refused(tmp_path: Path, install):
    (tmp_path / "mine.py").write_text(LOCAL)
    manifest = activate([str(tmp_path / "mine.py")]).manifest
    forged = replace(manifest.entries[1], content="eCA9IDEK")
    with pytest.raises(ManifestMismatch, match=r"mine    mine\.py \w{12}  mine\.py \w{12}  content of mine\.py"):
        attach(Manifest((manifest.entries[0], forged)))


def test_a_module_on_the_path_is_compared_by_the_content_of_its_package(install):
    site = install("unrelated", files={"lab/__init__.py": "", "lab/plugin.py": PLUGIN, "lab/inner/deep.py": "x = 1\n"})
    manifest = activate(["lab.plugin"]).manifest
    assert {"exact_match", "length", "random"} <= set(attach(manifest).names(Kind.REWARD_MODEL))
    (site / "lab/inner/deep.py").write_text("x = 2\n")
    row = r"lab_plugin  module lab\.plugin \w{12}  module lab\.plugin \w{12}  content of lab/inner/deep\.py"
    with pytest.raises(ManifestMismatch, match=row):
        attach(manifest)


def test_a_namespace_package_shared_with_others_is_not_part_of_the_digest(install):
    install("ours", "1", plugins={"ours": "shared.ours.plugin"}, files={
        "shared/ours/__init__.py": "",
        "shared/ours/plugin.py": PLUGIN,
    })  # fmt: skip
    before = activate(["ours"]).manifest
    install("theirs", "1", files={"shared/theirs/__init__.py": "x = 1\n"})
    assert activate(["ours"]).manifest == before


def test_a_file_of_a_plugin_that_cannot_be_read_is_an_error_with_the_plugin_s_name(acme):
    (acme / "acme/memory").symlink_to("/proc/self/mem")  # a file that root cannot read from its start either
    with pytest.raises(PluginError) as failure:
        activate(["acme"])
    assert str(failure.value) == (
        "plugin 'acme' (acme-tree 2.1, entry point acme.plugin): reading its files failed with OSError: [Errno 5] "
        "Input/output error\nMake every file of its package readable."
    )


@pytest.mark.parametrize("name", ["my_lab.plugin", "os.nowhere"])
def test_a_module_that_is_not_there_has_nothing_to_reinstall(name):
    with pytest.raises(PluginError) as failure:
        activate([name])
    assert str(failure.value).startswith(
        f"plugin '{name.replace('.', '_')}' (module {name} (local), entry point {name})"
    )
    assert str(failure.value).splitlines()[-1] in (
        "Correct the name, or the Python path that should lead to it.",
        "Correct os.nowhere, or the Python path that should lead to it.",
    )
