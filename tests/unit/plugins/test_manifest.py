from __future__ import annotations

import json
import pickle
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.components.functions import find_function
from slime_core.errors import ManifestMismatch, PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.discovery import Source
from slime_core.plugins.manifest import Manifest, ManifestEntry, attach, mismatches, record
from slime_core.plugins.registration import Kind
from tests.plugin_files import HEAD, Site

REGISTER = "@hookimpl\ndef slime_register(add: Registration) -> None:\n    "
LENGTH = "class Length:\n    async def score(self, samples): return [1.0]\n"
LOCAL = f"{REGISTER}add.reward_model('length', Length)\n{LENGTH}"
ATTACH = """
import sys
from slime_core.components.construction import load
from slime_core.plugins.manifest import Manifest, attach
from slime_core.plugins.registration import Kind
registry = attach(Manifest.from_json(sys.stdin.read()))
print(load(registry, Kind.REWARD_MODEL, "length").__module__, *registry.loaded)
"""


@pytest.fixture
def acme(site: Site) -> Path:
    """The folder of the package of plugin ``acme``."""
    return site.install("acme", f"{REGISTER}add.reward_model('length', 'acme_p.code:Length')", code=LENGTH) / "acme_p"


def manifest_of(*names: str) -> Manifest:
    return activate(names).manifest


def entry_of(name: str) -> ManifestEntry:
    (entry,) = (entry for entry in manifest_of(name).plugins if entry.name == Path(name).stem)
    return entry


def row(manifest: Manifest) -> list[str]:
    """The only row of the table of differences: plugin, driver, this process."""
    with pytest.raises(ManifestMismatch) as failure:
        attach(manifest)
    rows = [re.split("  +", line.strip()) for line in str(failure.value).splitlines() if line.startswith("  ")]
    assert len(rows) == 2
    assert socket.gethostname() in str(failure.value)
    return rows[1]


def in_another_process(manifest: Manifest, path: Path) -> str:
    words = [sys.executable, "-c", ATTACH]
    done = subprocess.run(
        words, input=manifest.to_json(), env={"PYTHONPATH": str(path)}, text=True, capture_output=True
    )
    return done.stdout.strip() or done.stderr.strip()


# --- Round trips ------------------------------------------------------------------------------------------------------


def test_a_manifest_survives_json_and_pickling(site: Site, acme: Path) -> None:
    manifest = manifest_of("acme", site.file("mine", LOCAL))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert pickle.loads(pickle.dumps(manifest)) == manifest
    about = [(entry.name, entry.distribution, entry.version, entry.source) for entry in manifest.plugins]
    assert about[0][0] == "core"
    assert about[1] == ("acme", "acme-dist", "2.1", Source.INSTALLED)
    assert (about[2][0], about[2][3]) == ("mine", Source.FILE)
    assert str(manifest).startswith("core ")


ENTRY = {
    "name": "x",
    "distribution": "x",
    "version": "1",
    "module": "x",
    "digest": "0",
    "source": "file",
    "content": "",
}


@pytest.mark.parametrize(
    "value",
    [
        "{",
        [],
        {},
        {"plugins": [{"name": "x"}], "functions": []},
        {"plugins": [ENTRY | {"version": 3}], "functions": []},
        {"plugins": [ENTRY | {"source": "web"}], "functions": []},
        {"plugins": ["x"], "functions": []},
    ],
)
def test_a_text_that_is_no_manifest_is_refused(value: object) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(PluginError):
        Manifest.from_json(text)
    assert Manifest.from_json(json.dumps({"plugins": [ENTRY], "functions": []})).plugins[0].source is Source.FILE


# --- Another process --------------------------------------------------------------------------------------------------


def test_another_process_attaches_the_same_plugins(acme: Path) -> None:
    assert in_another_process(manifest_of("acme"), acme.parent) == "acme_p.code core acme"


def test_a_single_file_travels_and_needs_no_file_there(site: Site, tmp_path: Path) -> None:
    manifest = manifest_of(site.file("mine", LOCAL))
    (tmp_path / "mine.py").unlink()
    assert in_another_process(manifest, tmp_path) == f"{manifest.plugins[1].module} core mine"


# --- Differences ------------------------------------------------------------------------------------------------------


def test_another_content_is_refused_with_both_digests(acme: Path) -> None:
    manifest = manifest_of("acme")
    (acme / "code.py").write_text("class Length: changed = True\n")
    digests = [entry.digest[:12] for entry in (manifest.plugins[1], entry_of("acme"))]
    assert row(manifest) == ["acme", *(f"acme-dist 2.1 {digest}" for digest in digests)]


def test_another_version_is_refused_with_both_versions(acme: Path) -> None:
    core, entry = manifest_of("acme").plugins
    digest = entry.digest[:12]
    manifest = Manifest((core, replace(entry, version="2.0")))
    assert row(manifest) == ["acme", f"acme-dist 2.0 {digest}", f"acme-dist 2.1 {digest}"]
    older = Manifest((replace(core, version="0.0.9"),))
    assert [text[:14] for text in row(older)] == ["core", "slime-rl 0.0.9", "slime-rl 0.1.0"]


def test_a_distribution_that_is_not_installed_is_missing(acme: Path) -> None:
    entry = replace(entry_of("acme"), distribution="nowhere")
    assert row(Manifest((entry,))) == ["acme", f"nowhere 2.1 {entry.digest[:12]}", "-"]


def test_a_package_that_is_gone_while_its_metadata_stays_differs(acme: Path) -> None:
    manifest = manifest_of("acme")
    shutil.rmtree(acme)
    assert row(manifest)[0] == "acme"
    assert "ManifestMismatch" in in_another_process(manifest, acme.parent)


def test_bytes_that_do_not_have_the_digest_are_refused(site: Site) -> None:
    core, entry = manifest_of(site.file("mine", LOCAL)).plugins
    assert row(Manifest((core, replace(entry, content="eCA9IDEK"))))[0] == "mine"


def test_every_difference_is_listed_and_the_order_does_not_count(site: Site, acme: Path) -> None:
    zeta = site.install("zeta", REGISTER + "...")
    manifest = manifest_of("acme", "zeta")
    assert manifest.differences(manifest_of("zeta", "acme")) == []
    assert [(entry.name, entry.actual) for entry in manifest.differences(manifest_of("acme"))] == [("zeta", "-")]
    assert [(entry.name, entry.expected) for entry in manifest_of("acme").differences(manifest)] == [("zeta", "-")]
    shutil.rmtree(zeta / "zeta_dist-2.1.dist-info")
    (acme / "plugin.py").unlink()
    assert [entry.name for entry in mismatches(manifest)] == ["acme", "zeta"]


def test_a_file_may_be_in_another_folder(site: Site, tmp_path: Path) -> None:
    manifest = manifest_of(site.file("mine", LOCAL))
    (tmp_path / "elsewhere").mkdir()
    other = shutil.move(tmp_path / "mine.py", tmp_path / "elsewhere/mine.py")
    assert manifest.differences(manifest_of(str(other))) == []


def test_functions_by_path_are_compared_under_the_name_of_their_option(site: Site, tmp_path: Path) -> None:
    source = find_function(site.file("mine", "def reward(): ...") + ":reward", setting="custom_rm_path")
    manifest = record([], [source.code])
    assert [(entry.name, entry.source) for entry in manifest.functions] == [("custom_rm_path", Source.FILE)]
    assert mismatches(Manifest.from_json(manifest.to_json())) == []
    changed = find_function(site.file("mine", "def reward(): return 1") + ":reward", setting="custom_rm_path")
    assert [entry.name for entry in manifest.differences(record([], [changed.code]))] == ["custom_rm_path"]


# --- Digests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "changes"),
    [
        (lambda package: (package / "code.py").write_text("x = 2\n"), True),
        (lambda package: (package / "prompt.txt").write_text("Think first."), True),
        (lambda package: (package / "code.py").rename(package / "other.py"), True),
        (lambda package: (package / "code.py").unlink(), True),
        (lambda package: (package / "x.pyc").touch(), False),
        (lambda package: (package / ".hidden").touch(), False),
        (lambda package: (package / "__pycache__").mkdir(exist_ok=True), False),
        (lambda package: (package.parent / "other.py").touch(), False),
        (lambda package: (package.parent / "acme_dist-2.1.dist-info/RECORD").touch(), False),
    ],
    ids=["content", "a template", "a name", "deleted", "a cache", "hidden", "caches", "another module", "metadata"],
)
def test_the_digest_is_that_of_the_files_of_the_package(
    acme: Path, edit: Callable[[Path], object], changes: bool
) -> None:
    before = entry_of("acme").digest
    edit(acme)
    assert (entry_of("acme").digest != before) is changes


def test_a_module_without_a_package_has_the_digest_of_its_file(site: Site) -> None:
    folder = site.install("acme", points={"acme": "lone"})
    (folder / "lone.py").write_text(HEAD + REGISTER + "...")
    before = entry_of("acme").digest
    (folder / "lone.py").write_text(HEAD + REGISTER + "... # changed")
    (folder / "acme_p/plugin.py").write_text("")
    assert entry_of("acme").digest != before


def test_a_namespace_that_others_share_is_not_part_of_the_digest(site: Site) -> None:
    folder = site.install("acme", points={"acme": "shared.acme.plugin"})
    for package in ("acme", "zeta"):
        (folder / "shared" / package).mkdir(parents=True)
        (folder / "shared" / package / "__init__.py").touch()
    (folder / "shared/acme/plugin.py").write_text(HEAD + REGISTER + "...")
    before = entry_of("acme").digest
    (folder / "shared/zeta/more.py").touch()
    assert entry_of("acme").digest == before
    (folder / "shared/acme/more.py").touch()
    assert entry_of("acme").digest != before


def test_a_module_on_the_path_is_compared_like_an_installed_plugin(site: Site) -> None:
    folder = site.install("lab", REGISTER + "...", points={})
    manifest = manifest_of("lab_p.plugin")
    assert list(attach(manifest).loaded) == ["core", "lab_p_plugin"]
    (folder / "lab_p/deep.py").touch()
    assert row(manifest)[0] == "lab_p_plugin"


def test_a_file_that_cannot_be_read_is_an_error_of_its_plugin(acme: Path) -> None:
    (acme / "memory").symlink_to("/proc/self/mem")  # root cannot read it either
    with pytest.raises(PluginError, match=r"'acme' \(acme-dist 2\.1\).*OSError"):
        manifest_of("acme")


def test_attach_loads_what_the_manifest_names_and_nothing_else(site: Site, acme: Path) -> None:
    site.install("zeta", "raise SystemExit(3)")
    manifest = manifest_of("acme")
    sys.modules.pop("zeta_p", None)
    registry = attach(manifest)
    assert list(registry.loaded) == ["core", "acme"]
    assert registry.owner(Kind.REWARD_MODEL, "length").version == "2.1"
    assert "zeta_p" not in sys.modules
