"""``slime plugins check``: each fault of a plugin fails the check that names it, and no check of another plugin."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from slime_core.cli.main import main
from slime_testing.checkup import _environment, check_plugins, examined, plugins_of
from slime_testing.examine import HEAVY, pack, unpack
from slime_testing.harness import CORE, Plugin, find_plugin, installed_plugins
from slime_testing.verdicts import Verdict
from slime_testing.wheels import check_distribution
from tests.processes import left_of

PLUGIN = """
from slime_core import hookimpl

@hookimpl
def slime_register(add):
    add.reward_model("length", "acme.code:Length")
"""
CODE = """
class Length:
    async def score(self, samples):
        return [-float(len(sample.response)) for sample in samples]
"""
ACME = Plugin("acme", "acme-tree", "2.1", "acme.plugin")
METADATA = "Metadata-Version: 2.4\nName: acme-tree\nVersion: {version}\n{more}"
ABOUT = "Summary: Trees\nLicense-Expression: MIT\n"
BOUNDS = "Requires-Dist: slime-rl>=0.1,<0.2\n"
RECORD = "acme_tree-2.1.dist-info/RECORD"

Install = Callable[..., Path]


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution as a wheel leaves it: files, metadata, RECORD with hashes."""

    def install(files: Mapping[str, str] | None = None, *, more: str = ABOUT + BOUNDS, version: str = "2.1") -> Path:
        contents = {"acme/plugin.py": PLUGIN, "acme/code.py": CODE, **(files or {})}
        info = f"acme_tree-{version}.dist-info"
        contents[f"{info}/METADATA"] = METADATA.format(version=version, more=more)
        contents[f"{info}/entry_points.txt"] = "[slime]\nacme = acme.plugin\n"
        for name, content in contents.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        rows = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in contents.items()]
        (tmp_path / info / "RECORD").write_text("\n".join([*rows, f"{info}/RECORD,,"]))
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]  # the command has loaded it


def _hash(content: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()


def metadata_of(plugin: Plugin = ACME) -> dict[str, Verdict]:
    return {verdict.check: verdict for verdict in check_distribution(plugin, installed_plugins())}


def inside(timeout_s: float = 240, plugin: Plugin = ACME) -> dict[str, Verdict]:
    return {verdict.check: verdict for verdict in examined(plugin, timeout_s=timeout_s)}


def assert_verdict(check: str, status: str, *names: str) -> None:
    """The check of the distribution ended with this status, and its reason holds the names."""
    verdict = metadata_of()[check]
    assert verdict.status == status
    assert [name for name in names if name not in verdict.reason] == [], verdict.reason


# --- The distribution -------------------------------------------------------------------------------------------------


def test_a_sound_distribution_passes(acme: Install) -> None:
    acme()
    found = metadata_of()
    assert {check: verdict.status for check, verdict in found.items()} == dict.fromkeys(
        ("name", "metadata", "bounds", "files"), "ok"
    )


def test_changed_and_missing_files_are_named_and_the_others_counted(acme: Install) -> None:
    site = acme({f"acme/part{number}.py": "" for number in range(7)})
    (site / "acme/code.py").write_text(CODE + "# changed\n")
    for number in range(7):
        (site / f"acme/part{number}.py").unlink()
    assert_verdict("files", "FAILED", "acme/code.py", "acme/part3.py", "3 more", "acme-tree")


def test_the_files_of_an_editable_install_are_skipped(acme: Install) -> None:
    origin = {"url": "file:///src/acme", "dir_info": {"editable": True}}
    (acme() / "acme_tree-2.1.dist-info/direct_url.json").write_text(json.dumps(origin))
    assert_verdict("files", "skipped")


@pytest.mark.parametrize(
    ("record", "status", "word"),
    [
        (b"", "warning", "RECORD"),
        (b"acme/plugin.py,,\n", "warning", "RECORD"),
        (b"acme/plugin.py,sha256=x,1,extra\n", "FAILED", "RECORD"),
        (b"acme/\xff.py,sha256=x,1\n", "FAILED", "'utf-8'"),
        (b"acme/plugin.py,shake_128=x,1\n", "FAILED", "shake_128"),
        (b"acme/plugin.py,md17=x,1\n", "FAILED", "md17"),
    ],
)
def test_a_record_without_usable_hashes_is_reported(acme: Install, record: bytes, status: str, word: str) -> None:
    (acme() / RECORD).write_bytes(record)
    assert_verdict("files", status, word)


@pytest.mark.parametrize(
    ("more", "check", "status", "names"),
    [
        (BOUNDS, "metadata", "warning", ["project.description", "project.license"]),
        (ABOUT, "bounds", "warning", ["slime-rl>=0.1,<0.2"]),
        ("Requires-Dist: slime-rl>=0.1\n", "bounds", "warning", ["slime-rl>=0.1,<0.2"]),
        ("Requires-Dist: slime-rl>=9; extra == 'next'\n", "bounds", "warning", ["slime-rl>=0.1,<0.2"]),
        ("Requires-Dist: Slime_RL<0.1\n", "bounds", "FAILED", ["<0.1", "slime-rl 0.1.0"]),
        ("Requires-Dist: ???\n", "bounds", "FAILED", ["???"]),
    ],
)
def test_metadata_and_bounds_are_checked(acme: Install, more: str, check: str, status: str, names: list[str]) -> None:
    acme(more=more)
    assert_verdict(check, status, *names)


def test_a_version_that_is_none_fails(acme: Install) -> None:
    acme(version="newest")
    assert_verdict("metadata", "FAILED", "'newest'")


def test_a_name_that_two_distributions_have_fails_for_both(acme: Install) -> None:
    other = acme() / "other-1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (other / "entry_points.txt").write_text("[slime]\nacme = other.plugin\n")
    assert_verdict("name", "FAILED", "acme-tree 2.1", "other 1")
    assert [plugin.distribution for plugin in plugins_of(["acme"], installed_plugins())] == ["acme-tree", "other"]


# --- The plugin -------------------------------------------------------------------------------------------------------


def test_a_sound_plugin_passes_every_check(acme: Install) -> None:
    acme()
    found = inside()
    assert {check: verdict.status for check, verdict in found.items()} == dict.fromkeys(
        ("import", "registration", "reward model length", "reward model length, properties"), "ok"
    )


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import no_such_thing", "acme-tree 2.1"),
        ("import os; os._exit(0)", "exit code 0"),
        ("import os; os._exit(7)", "exit code 7"),
        ("import os; print('bye', flush=True); os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_a_plugin_that_cannot_be_imported_has_no_other_checks(acme: Install, source: str, word: str) -> None:
    acme({"acme/plugin.py": source})
    (verdict,) = inside().values()
    assert (verdict.check, verdict.status) == ("import", "FAILED")
    assert word in verdict.reason
    assert ("bye" in source) == verdict.reason.endswith(": bye")


def test_a_plugin_that_hangs_is_ended_with_what_it_started(acme: Install, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    start = f"open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '300']).pid))"
    acme({"acme/plugin.py": f"import subprocess, time\n{start}\ntime.sleep(300)"})
    (verdict,) = inside(timeout_s=6).values()
    assert verdict.check in ("start", "import")  # a busy machine may not have come further
    assert verdict.status == "FAILED"
    assert "--timeout-s" in verdict.reason
    if pid.exists():
        assert left_of(*map(int, pid.read_text().split())) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "check", "status", "word"),
    [
        ("plugin", "@hookimpl\n", "", "registration", "FAILED", "slime_register"),
        ("plugin", "from", "import numpy\nfrom", "import", "warning", "numpy"),
        ("code", "class", "import os; os._exit(3)\nclass", "reward model length", "FAILED", "exit code 3"),
        ("code", "async ", "", "reward model length", "FAILED", "score"),
        (
            "code",
            "samples]",
            "samples[::-1]]",
            "reward model length, properties",
            "FAILED",
            "rewards_come_in_the_order",
        ),
        (
            "code",
            "len(sample.response)",
            "0",
            "reward model length, properties",
            "skipped",
            "the_examples_get_different",
        ),
    ],
)
def test_a_fault_is_reported_in_its_check(
    acme: Install, file: str, old: str, new: str, check: str, status: str, word: str
) -> None:
    source = {"plugin": PLUGIN, "code": CODE}[file]
    acme({f"acme/{file}.py": source.replace(old, new, 1)})
    found = inside()
    assert found[check].status == status
    assert word in found[check].reason
    assert all(verdict.status == "ok" for verdict in found.values() if verdict.check != check)


def test_what_every_slime_command_would_load_is_named() -> None:
    assert {"torch", "ray", "megatron", "sglang", "transformers"} <= set(HEAVY)


def test_components_that_only_a_run_can_fill_have_no_properties() -> None:
    found = inside(plugin=find_plugin("compat"))
    assert found["reward model custom_rm_path"].status == "ok"
    assert found["properties"].status == "skipped"
    assert not any(check.endswith(", properties") for check in found)


def test_lifecycle_hooks_are_tested(acme: Install) -> None:
    acme({"acme/plugin.py": PLUGIN + "@hookimpl\ndef slime_run_start(run):\n    pass\n"})
    assert inside()["lifecycle hooks"] == Verdict("lifecycle hooks")


def test_a_single_file_is_passed_on_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    plugin = find_plugin(str(path))
    path.unlink()
    assert unpack(pack(plugin)) == plugin
    assert inside(plugin=plugin)["registration"].status == "ok"


# --- The command ------------------------------------------------------------------------------------------------------


def test_only_folders_of_the_interpreter_are_left_for_the_other_process_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdlib, packages = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    added = [f"{sys.prefix}-lab", f"{sys.base_prefix}/src/lab", f"{stdlib}-lab"]
    monkeypatch.setattr(sys, "path", ["", stdlib, f"{stdlib}/lib-dynload", *added, packages])
    assert _environment(tmp_path)["PYTHONPATH"].split(os.pathsep) == added


def test_the_table_names_each_plugin_and_the_exit_code_says_whether_one_failed(
    acme: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    acme({"acme/code.py": "raise RuntimeError('no')"}, more="")
    assert main(["plugins", "check", "acme", "testing"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "acme (acme-tree 2.1, acme.plugin)"
    assert any(line.split()[:4] == ["FAILED", "reward", "model", "length"] for line in lines)
    assert any(line.startswith("testing (slime-testing ") for line in lines)
    assert lines[-1].startswith("2 plugins: 1 FAILED, ")


def test_json_holds_every_check(acme: Install, capsys: pytest.CaptureFixture[str]) -> None:
    acme()
    assert check_plugins(["acme"], as_json=True) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["distribution"], row["failed"]) == ("acme", "acme-tree", False)
    assert {"check": "reward model length", "status": "ok", "reason": ""} in row["checks"]


def test_without_names_all_installed_plugins_are_checked() -> None:
    assert plugins_of([], installed_plugins()) == installed_plugins()
    assert CORE in installed_plugins()


WRITES = """
from pathlib import Path
from slime_core import PluginOptions, hookimpl, observer

Path("imported.txt").write_text("")

class Options(PluginOptions):
    notes: Path = Path("notes.txt")
    \"\"\"File that it writes.\"\"\"

class Words:
    def __init__(self, options):
        options.notes.write_text("built")

    async def score(self, samples):
        return [float(len(sample.response)) for sample in samples]

@hookimpl
def slime_register(add):
    add.options(Options)
    add.reward_model("words", Words)

@hookimpl
def slime_run_start(run, options):
    Path("started.txt").write_text(str(options.notes))
    (Path.home() / "started.txt").write_text("")

@hookimpl
@observer
def slime_after_rollout(rollout, samples):
    Path(f"rollout-{rollout}.txt").write_text("")

@hookimpl
def slime_learner_start(learner):
    (learner.folder / f"rank-{learner.rank}.txt").write_text("")
    Path(f"rank-{learner.rank}.txt").write_text("")

@hookimpl
def slime_after_weight_write(folder):
    if folder is not None:
        (folder / "written.txt").write_text("")
"""


def test_nothing_is_written_into_the_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "writes.py").write_text(WRITES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    code = main(["plugins", "check", "./writes.py"])
    assert code == 0, capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["writes.py"]
