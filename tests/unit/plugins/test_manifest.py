from __future__ import annotations

import pickle
import re
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
    with pytest.raises(PluginError, match=r"Manifest\.to_json"):
        Manifest.from_json('{"plugins": [{"plugin": "x"}]}')


@pytest.mark.parametrize("field", ["plugin", "distribution", "version", "entry_point", "digest"])
def test_an_entry_that_leaves_something_empty_is_refused(acme, field):
    text = Manifest((replace(activate(["acme"]).manifest.entries[1], **{field: ""}),)).to_json()
    with pytest.raises(PluginError, match=f" {field} .*''"):
        Manifest.from_json(text)


def test_another_process_attaches_exactly_the_same_set(acme):
    assert in_another_process(activate(["acme"]).manifest, path=acme) == "acme.code core acme"


def test_another_process_refuses_files_that_were_edited_in_place(acme):
    manifest = activate(["acme"]).manifest
    (acme / "acme/code.py").write_text("class Length: changed = True\n")
    assert "acme/code.py\n" in in_another_process(manifest, path=acme)


def test_a_single_file_travels_as_bytes_and_needs_no_file_there(tmp_path: Path, install):
    (tmp_path / "mine.py").write_text(LOCAL)
    active = activate([str(tmp_path / "mine.py")])
    (tmp_path / "mine.py").unlink()
    module = active.manifest.entries[1].entry_point
    assert in_another_process(active.manifest, path=tmp_path) == f"{module} core mine"


def test_another_content_is_refused_with_plugin_and_both_digests(acme):
    manifest = activate(["acme"]).manifest
    (acme / "acme/code.py").write_text("class Length: changed = True\n")
    old, new = (f"acme-tree 2.1 {one.entries[1].digest[:12]}" for one in (manifest, activate(["acme"]).manifest))
    assert refused(manifest)[:4] == [socket.gethostname(), "acme", old, new]
    assert refused(manifest)[4].endswith(" acme/code.py")


def refused(manifest: Manifest) -> list[str]:
    """The only row of the table of differences."""
    with pytest.raises(ManifestMismatch) as failure:
        attach(manifest)
    [row] = [line for line in str(failure.value).splitlines()[2:] if line.startswith("  ")]
    return re.split("  +", row.strip())


def test_of_many_files_that_differ_the_first_three_are_reported(acme):
    before = activate(["acme"]).manifest
    for name in "abcde":
        (acme / f"acme/{name}.txt").touch()
    [difference] = before.differences(activate(["acme"]).manifest)
    assert " acme/a.txt, acme/b.txt, acme/c.txt and 2 " in difference.what


def test_every_plugin_that_differs_is_in_the_table(acme, install):
    site = install("zeta", "1.0", plugins={"zeta": "zeta"}, files={"zeta.py": HOOK})
    manifest = activate(["acme", "zeta"]).manifest
    shutil.rmtree(site / "zeta-1.0.dist-info")
    (acme / "acme/plugin.py").unlink()
    [first, second] = mismatches(manifest)
    assert (first.plugin, first.what.split()[-1]) == ("acme", "acme/plugin.py")
    assert (second.plugin, second.what) == ("zeta", "missing")


@pytest.mark.parametrize("name", ["acme/__pycache__/x.py", "acme/x.pyc", "acme/.hidden", "acme/.cache/x.py"])
def test_caches_of_python_and_hidden_files_are_not_in_the_digest(acme, name):
    before = activate(["acme"]).manifest
    (acme / name).parent.mkdir(exist_ok=True)
    (acme / name).touch()
    assert activate(["acme"]).manifest == before


def test_a_missing_package_whose_metadata_stays_is_reported_as_such(acme):
    manifest = activate(["acme"]).manifest
    shutil.rmtree(acme / "acme")
    [difference] = mismatches(manifest)
    assert (difference.found, difference.what) == ("acme-tree 2.1 (no files)", "content")


def test_a_record_that_cannot_be_read_is_an_error_of_its_plugin(acme):
    (acme / "acme_tree-2.1.dist-info" / "RECORD").write_text("acme/plugin.py,sha256=x,1,extra\n")
    with pytest.raises(PluginError, match=r"'acme' \(acme-tree 2\.1, .* RECORD"):
        activate(["acme"])


def test_a_second_package_of_the_distribution_is_part_of_the_digest(install):
    site = install("acme-tree", plugins={"acme": "acme.plugin"}, files={**FILES, "acme_kernels/fast.py": "x = 1\n"})
    before = activate(["acme"]).manifest
    (site / "acme_kernels/fast.py").write_text("x = 2\n")
    assert activate(["acme"]).manifest.entries[1].digest != before.entries[1].digest


def test_an_editable_install_has_the_digest_of_the_installed_files_and_says_what_it_is(acme):
    before = activate(["acme"]).manifest.entries[1]
    info = acme / "acme_tree-2.1.dist-info"
    (info / "RECORD").write_text("_editable_impl_acme.pth,,\nacme_tree-2.1.dist-info/METADATA,,\n../../bin/acme,,\n")
    (info / "METADATA.orig").touch()
    (info / "direct_url.json").write_text('{"url": "file:///source", "dir_info": {"editable": true}}')
    assert activate(["acme"]).manifest.entries[1] == replace(before, editable=True)


def test_another_version_is_refused_with_plugin_and_both_versions(acme):
    core, entry = activate(["acme"]).manifest.entries
    content = entry.digest[:12]
    row = ["acme", f"acme-tree 2.0 {content}", f"acme-tree 2.1 {content}", "version"]
    assert refused(Manifest((core, replace(entry, version="2.0"))))[1:] == row


def test_another_version_of_the_core_is_refused():
    core = replace(activate([]).manifest.entries[0], version="0.0.9")
    row = refused(Manifest((core,)))
    assert [text[:14] for text in row[1:]] == ["core", "slime-rl 0.0.9", "slime-rl 0.1.0", "version"]


def test_a_distribution_that_is_not_installed_here_is_named(acme):
    entry = replace(activate(["acme"]).manifest.entries[1], distribution="nowhere-tree")
    assert refused(Manifest((entry,)))[1:] == ["acme", f"nowhere-tree 2.1 {entry.digest[:12]}", "-", "missing"]


def test_bytes_that_do_not_match_their_digest_are_refused(tmp_path: Path, install):
    (tmp_path / "mine.py").write_text(LOCAL)
    manifest = activate([str(tmp_path / "mine.py")]).manifest
    forged = replace(manifest.entries[1], content="eCA9IDEK")
    row = refused(Manifest((manifest.entries[0], forged)))
    assert (row[1], row[-1].split()[-1]) == ("mine", "mine.py")


def test_a_module_on_the_path_is_compared_by_the_content_of_its_package(install):
    site = install("unrelated", files={"lab/__init__.py": "", "lab/plugin.py": PLUGIN, "lab/inner/deep.py": "x = 1\n"})
    manifest = activate(["lab.plugin"]).manifest
    assert {"exact_match", "length", "random"} <= set(attach(manifest).names(Kind.REWARD_MODEL))
    (site / "lab/inner/deep.py").write_text("x = 2\n")
    row = refused(manifest)
    assert (row[1], row[-1].split()[-1]) == ("lab_plugin", "lab/inner/deep.py")


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
    with pytest.raises(PluginError, match=r"'acme' \(acme-tree 2\.1, .*OSError: \[Errno 5\]"):
        activate(["acme"])


@pytest.mark.parametrize("name", ["my_lab.plugin", "os.nowhere"])
def test_a_module_that_is_not_there_has_nothing_to_reinstall(name):
    with pytest.raises(PluginError, match=rf"'{name.replace('.', '_')}' \(module {name} ") as failure:
        activate([name])
    assert "Reinstall" not in str(failure.value)


@pytest.mark.parametrize(
    "edit",
    [
        lambda site: (site / "acme/prompt.txt").write_text("Think first."),
        lambda site: (site / "acme/extra.py").write_text("x = 1\n"),
        lambda site: (site / "acme/code.py").unlink(),
    ],
    ids=["a template next to the code", "a file that the record does not know", "a deleted file"],
)
def test_the_digest_is_that_of_the_files_of_the_package(acme, edit):
    before = activate(["acme"]).manifest
    edit(acme)
    assert activate(["acme"]).manifest.entries[1].digest != before.entries[1].digest
