"""``slime.lock``: what it says, who is refused by it, and the commands that write and compare it."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from slime_core.cli.main import main
from slime_core.config.load import NamedCode
from slime_core.errors import ManifestMismatch, PluginError
from slime_core.plugins.activation import activate
from slime_core.plugins.manifest import Lock, read_lock

REWARD = """
from slime_core import Component, hookimpl
@hookimpl
def slime_register_reward_models():
    yield Component("length", target="acme.code:Length")
"""
HOOK = "from slime_core import hookimpl\n@hookimpl\ndef slime_run_start(): ...\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def acme(install, folder: Path) -> Path:
    return install("acme-tree", "2.1", plugins={"acme": "acme.plugin"}, files={"acme/plugin.py": REWARD})


def lock(*names: str) -> Lock:
    return Lock.of(activate(names).manifest, Path("slime.lock"))


def test_a_lock_lists_core_first_then_by_name_and_holds_no_path_and_no_time(acme, folder):
    (folder / "mine.py").write_text(HOOK)
    text = lock(str(folder / "mine.py"), "acme").to_toml()
    assert text == lock("acme", str(folder / "mine.py")).to_toml()
    rows = tomllib.loads(text)["plugin"]
    assert [row["name"] for row in rows] == ["core", "acme", "mine"]
    assert rows[1].keys() == {"name", "distribution", "version", "entry_point", "sha256"}
    assert rows[2] == {"name": "mine", "file": "mine.py", "sha256": rows[2]["sha256"]}
    assert str(folder.parent) not in text


def test_a_file_is_locked_by_its_path_from_the_lock(folder, tmp_path):
    for path in (folder / "lab" / "near.py", tmp_path / "far.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{HOOK}x = {path.stem!r}\n")
    rows = tomllib.loads(lock("lab/near.py", str(tmp_path / "far.py")).to_toml())["plugin"]
    assert [row["file"] for row in rows[1:]] == ["../far.py", "lab/near.py"]


def test_a_file_above_the_working_directory_is_found_again(folder, monkeypatch, capsys):
    (folder / "mine.py").write_text(HOOK)
    (folder / "sub").mkdir()
    (folder.parent / "link").symlink_to(folder / "sub")
    monkeypatch.chdir(folder.parent / "link")
    assert main(["plugins", "lock", "--plugin", "grpo", "--plugin", "../mine.py"]) == 0
    assert main(["plugins", "verify"]) == 0
    assert " 4 plugins " in capsys.readouterr().out


def test_a_written_lock_is_read_again_and_accepts_the_same_set(acme, folder, install):
    (folder / "mine.py").write_text(HOOK)
    install("unrelated", files={"lab/__init__.py": "", "lab/plugin.py": HOOK})
    names = [str(folder / "mine.py"), "acme", "lab.plugin"]
    hooks = ["mine.py:slime_run_start", "json:loads"]
    code = [NamedCode("compat", "rollout_sample_hook_path", "--rollout-sample-hook-path", path) for path in hooks]
    manifest = activate([*names, "compat"], code=lambda registry: code).manifest
    (folder / "slime.lock").write_text(Lock.of(manifest, folder / "slime.lock").to_toml())
    again = read_lock(folder / "slime.lock")
    again.check(manifest)
    assert again.verify() == []
    assert [entry.plugin for entry in again.manifest.functions] == ["rollout_sample_hook_path"] * 2


def test_a_plugin_that_the_lock_does_not_have_is_not_even_admitted(acme):
    manifest = activate(["acme"]).manifest
    digest = manifest.entries[1].digest[:12]
    with pytest.raises(ManifestMismatch, match=rf"slime\.lock:\n.*\n  acme +- +acme-tree 2\.1 {digest}"):
        lock().admit(manifest)


def test_a_plugin_that_only_the_lock_has_is_refused_when_the_set_is_whole(acme):
    found = lock("acme")
    found.admit(activate([]).manifest)
    with pytest.raises(ManifestMismatch, match=r"acme +acme-tree 2\.1 \w{12} +- "):
        found.check(activate([]).manifest)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("plugin = 3", "'version'"),
        ("version = 2\nplugin = []", "version is 2.* 1"),
        ("version = 1", "'plugin'"),
        ("version = 1\n[[plugin]]\nname = 'x'", "{'name': 'x'}"),
        ("version = 1\n[[plugin]]\nname = 'x'\nfile = 1\nsha256 = 'y'", "{'name': 'x', 'file': 1, 'sha256'"),
        (
            "version = 1\n[[plugin]]\nname = 'x'\ndistribution = ''\nversion = ''\nentry_point = 'x'\nsha256 = 'y'",
            "{'name': 'x', 'distribution': ''",
        ),
        ("not toml", "'='"),
    ],
)
def test_a_file_that_is_no_lock_is_refused_with_what_is_wrong(folder, text, mistake):
    (folder / "slime.lock").write_text(text)
    with pytest.raises(PluginError, match=rf"^slime\.lock .*{mistake}"):
        read_lock(Path("slime.lock"))


# --- Commands ---------------------------------------------------------------------------------------------------------


def test_lock_writes_what_a_run_would_use_with_what_it_needs(folder, capsys):
    assert main(["plugins", "lock", "--plugin", "searchr1"]) == 0
    assert capsys.readouterr().out == "slime.lock: core 0.1.0, grpo 0.1.0, models 0.1.0, searchr1 0.1.0\n"
    assert main(["plugins", "verify"]) == 0
    assert " 4 plugins " in capsys.readouterr().out


def test_lock_takes_a_config_and_the_name_of_the_lock(folder, capsys):
    (folder / "run.toml").write_text('[run]\nplugins = ["grpo"]\n')
    assert main(["plugins", "lock", "run.toml", "--no-plugin", "ppo", "--lock-file", "kept.lock"]) == 0
    assert capsys.readouterr().out == f"{folder / 'kept.lock'}: core 0.1.0, grpo 0.1.0, models 0.1.0\n"


@pytest.mark.parametrize("line", ["--plguin grpo", "--run one"])
def test_lock_refuses_what_it_does_not_understand_and_writes_nothing(folder, line, capsys):
    assert main(["plugins", "lock", *line.split()]) == 2
    assert not (folder / "slime.lock").exists()


@pytest.mark.parametrize("words", [["kept.lock"], ["--lock-file", "kept.lock"], ["--lock-file=kept.lock"]])
def test_verify_takes_the_lock_as_a_run_does(folder, words, capsys):
    assert main(["plugins", "lock", "--plugin", "grpo", "--lock-file", "kept.lock"]) == 0
    assert main(["plugins", "verify", *words]) == 0
    assert re.search("kept.lock: .* 3 plugins ", capsys.readouterr().out)


def test_lock_says_how_it_is_used(capsys):
    assert main(["plugins", "lock", "--help"]) == 0
    assert capsys.readouterr().out.startswith("slime plugins lock ")


def test_verify_prints_every_difference_and_fails(acme, folder, install, capsys):
    site = install("zeta", "1.0", plugins={"zeta": "zeta"}, files={"zeta.py": HOOK})
    (folder / "mine.py").write_text(HOOK)
    found = lock("acme", "zeta", str(folder / "mine.py"))
    (folder / "slime.lock").write_text(found.to_toml())
    (acme / "acme" / "plugin.py").write_text(REWARD + "\n")
    (site / "zeta-1.0.dist-info" / "METADATA").write_text("Name: zeta\nVersion: 1.1\n")
    (folder / "mine.py").unlink()
    assert main(["plugins", "verify", "slime.lock"]) == 1
    _, acme_was, mine, zeta = (entry.digest[:12] for entry in found.manifest.entries)
    acme_is = activate(["acme"]).manifest.entries[1].digest[:12]
    rows = [re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert rows[2:5] == [
        ["acme", f"acme-tree 2.1 {acme_was}", f"acme-tree 2.1 {acme_is}", "content"],
        ["mine", f"mine.py {mine}", "-", "missing"],
        ["zeta", f"zeta 1.0 {zeta}", f"zeta 1.1 {zeta}", "version"],
    ]


def test_a_locked_run_without_its_lock_is_refused_with_the_way_to_one(folder, capsys):
    assert main(["run", "--locked", "--plugin", "grpo"]) == 2
    assert re.search(rf"{folder / 'slime.lock'} (.|\n)*slime plugins lock .*--lock-file", capsys.readouterr().err)


@pytest.mark.parametrize("words", [["--locked"], ["--lock-file", "slime.lock"]])
def test_a_locked_run_refuses_another_plugin_before_it_is_imported_or_a_folder_is_made(acme, folder, words, capsys):
    assert main(["plugins", "lock", "--plugin", "grpo"]) == 0
    assert main(["run", *words, "--plugin", "grpo", "--plugin", "acme", "--output-dir", "new"]) == 2
    printed = capsys.readouterr().err
    assert re.search(rf"{folder / 'slime.lock'}:\n(.|\n)*  acme +- +acme-tree 2\.1 ", printed)
    assert "acme.plugin" not in sys.modules
    assert sorted(path.name for path in folder.iterdir()) == ["slime.lock"]


def test_a_locked_run_that_lacks_a_plugin_of_the_lock_is_refused(folder, capsys):
    assert main(["plugins", "lock", "--plugin", "searchr1"]) == 0
    assert main(["run", "--locked", "--plugin", "grpo", "--output-dir", "new"]) == 2
    assert " -     missing\n" in capsys.readouterr().err
