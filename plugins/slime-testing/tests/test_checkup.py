"""``slime plugins check``: every way in which a plugin can be unsound costs that plugin its rows, and no other."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from slime_core.cli.main import main
from slime_core.harness import activate
from slime_core.plugins.discovery import CORE, PluginIdentity, PluginSource, Source, installed, local_file, resolve
from slime_testing.checkup import _environment, check_plugins, examined, sources_of
from slime_testing.claims import broken_claims, unclaimed
from slime_testing.examine import pack, unpack
from slime_testing.verdicts import Verdict
from slime_testing.wheels import look_at_distribution
from tests.processes import left_of

PLUGIN = """
from slime_core import Component, hookimpl
@hookimpl
def slime_register_reward_models():
    yield Component("length", target="acme.code:Length")
"""
CODE = """
class Length:
    def __init__(self, options, run): ...
    async def score(self, samples):
        return [-float(len(sample.response)) for sample in samples]
"""
ACME = PluginIdentity("acme", "acme-tree", "2.1", "acme.plugin")
METADATA = "Metadata-Version: 2.4\nName: acme-tree\nVersion: {version}\n{more}"
GOOD = "Summary: Trees\nLicense-Expression: MIT\nRequires-Dist: slime-rl>=0.1,<0.2\n"

Place = Callable[..., Path]


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """An installed distribution as a wheel leaves it: RECORD with hashes, metadata."""

    def place(
        files: Mapping[str, str] | None = None,
        *,
        more: str = GOOD,
        version: str = "2.1",
        claims: str = "length = acme\n",
    ) -> Path:
        contents = {"acme/plugin.py": PLUGIN, "acme/code.py": CODE, **(files or {})}
        info = f"acme_tree-{version}.dist-info"
        contents[f"{info}/METADATA"] = METADATA.format(version=version, more=more)
        contents[f"{info}/entry_points.txt"] = f"[slime]\nacme = acme.plugin\n[slime.reward_models]\n{claims}"
        for name, content in contents.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        rows = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in contents.items()]
        (tmp_path / info / "RECORD").write_text("\n".join([*rows, f"{info}/RECORD,,"]))
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return place


def _hash(content: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()


def metadata_of(plugin: PluginIdentity = ACME) -> dict[str, Verdict]:
    return {verdict.check: verdict for verdict in look_at_distribution(plugin, installed())}


def inside(timeout_s: float = 240, source: PluginSource | None = None) -> dict[str, tuple[str, str]]:
    found = examined(source or PluginSource(ACME), timeout_s=timeout_s)
    return {verdict.check: (verdict.status, verdict.reason) for verdict in found}


def assert_verdict(check: str, status: str, *names: str) -> None:
    """The check ended with this status, and its reason holds the names."""
    verdict = metadata_of()[check]
    assert verdict.status == status
    assert [name for name in names if name not in verdict.reason] == [], verdict.reason


# --- From outside -----------------------------------------------------------------------------------------------------


def test_a_sound_distribution_passes(acme: Place) -> None:
    acme()
    assert metadata_of()["name"] == Verdict("name")
    assert metadata_of()["metadata"] == Verdict("metadata")
    assert metadata_of()["bounds"] == Verdict("bounds")
    assert metadata_of()["files"] == Verdict("files", "ok", "4 as they were installed")


def test_a_changed_and_a_missing_file_are_named(acme: Place) -> None:
    site = acme()
    (site / "acme/code.py").write_text(CODE + "# changed\n")
    (site / "acme/plugin.py").unlink()
    assert_verdict("files", "FAILED", "acme/plugin.py", "acme/code.py", "acme-tree")


def test_many_changed_files_are_counted(acme: Place) -> None:
    site = acme({f"acme/part{number}.py": "" for number in range(7)})
    for number in range(7):
        (site / f"acme/part{number}.py").unlink()
    assert "acme/part4.py" in metadata_of()["files"].reason


def test_an_editable_install_is_reported_as_one(acme: Place) -> None:
    site = acme()
    described = {"url": "file:///src/acme", "dir_info": {"editable": True}}
    (site / "acme_tree-2.1.dist-info/direct_url.json").write_text(json.dumps(described))
    assert_verdict("files", "skipped", "file:///src/acme")


def test_files_without_a_record_or_hashes_cannot_be_compared(acme: Place) -> None:
    site = acme()
    record = site / "acme_tree-2.1.dist-info/RECORD"
    record.write_text("acme/plugin.py,,\n")
    assert "its RECORD holds" in metadata_of()["files"].reason
    record.unlink()
    assert "no RECORD of what" in metadata_of()["files"].reason


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"acme/plugin.py,sha256=x,1,extra\n", "RECORD"),
        (b"acme/\xff.py,sha256=x,1\n", "'utf-8'"),
        (b"acme/plugin.py,shake_128=x,1\n", "shake_128"),
        (b"acme/plugin.py,md17=x,1\n", "md17"),
    ],
)
def test_a_record_that_no_installer_writes_fails_its_own_row(acme: Place, record: bytes, reason: str) -> None:
    (acme() / "acme_tree-2.1.dist-info/RECORD").write_bytes(record)
    assert_verdict("files", "FAILED", reason)


def test_only_folders_of_the_interpreter_are_left_for_the_other_process_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdlib, packages = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    kept = [f"{sys.prefix}-lab", f"{sys.base_prefix}/src/lab", f"{stdlib}-lab"]
    monkeypatch.setattr(sys, "path", ["", stdlib, f"{stdlib}/lib-dynload", *kept, packages])
    assert _environment(tmp_path)["PYTHONPATH"].split(os.pathsep) == kept


def test_missing_metadata_is_a_warning(acme: Place) -> None:
    acme(more="")
    assert_verdict("metadata", "warning", "Summary", "project.description", "License-Expression", "project.license")


def test_a_missing_bound_on_the_core_is_a_warning(acme: Place) -> None:
    acme(more="Requires-Dist: slime-rl>=0.1\n")
    assert_verdict("bounds", "warning", "slime-rl>=0.1,", "'slime-rl>=0.1,<0.2'")


@pytest.mark.parametrize("more", ["Requires-Dist: numpy>=1\n", "Requires-Dist: slime-rl>=9; extra == 'next'\n"])
def test_a_bound_that_is_not_there_is_a_warning(acme: Place, more: str) -> None:
    acme(more=more)
    assert_verdict("bounds", "warning", "acme-tree 2.1", "'slime-rl>=0.1,<0.2'")


def test_a_core_outside_the_bounds_is_refused(acme: Place) -> None:
    acme(more="Requires-Dist: slime-rl<0.1\n")
    assert_verdict("bounds", "FAILED", "slime-rl<0.1", "slime-rl 0.1.0")


def test_a_version_that_is_none_is_refused(acme: Place) -> None:
    acme(version="newest")
    assert_verdict("metadata", "FAILED", "'newest'")


def test_a_name_that_two_distributions_claim_is_refused_for_both(acme: Place) -> None:
    site = acme()
    other = site / "other-1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (other / "entry_points.txt").write_text("[slime]\nacme = other.plugin\n")
    assert_verdict("name", "FAILED", "acme-tree 2.1", "other 1", "acme-tree:acme")
    both = sources_of(["acme"], installed())
    assert [source.plugin.distribution for source in both] == ["acme-tree", "other"]


# --- From inside ------------------------------------------------------------------------------------------------------


def test_a_sound_plugin_passes_every_check(acme: Place) -> None:
    acme()
    assert inside() == {
        "import": ("ok", ""),
        "hooks": ("ok", ""),
        "registration": ("ok", ""),
        "claims": ("ok", ""),
        "reward model length": ("ok", ""),
        "reward model length, properties": ("ok", ""),
    }


@pytest.mark.parametrize(
    ("claim", "group", "name"),
    [
        ("width = acme", "slime.reward_models", "width"),
        ("[slime.flags]\nfade-strength = acme", "slime.flags", "fade-strength"),
    ],
)
def test_a_claim_that_the_plugin_does_not_keep_is_found(acme: Place, claim: str, group: str, name: str) -> None:
    acme(claims=f"length = acme\n{claim}\n")
    status, reason = inside()["claims"]
    assert status == "FAILED"
    assert f'[project.entry-points."{group}"] claims {name}' in reason


@pytest.mark.parametrize("name", ["grpo", "models", "offpolicy", "ppo", "rewards", "searchr1"])
def test_our_own_plugins_claim_what_they_declare_and_have_bounds(name: str) -> None:
    active = activate(name)
    assert broken_claims(active) == []
    assert unclaimed(active) == []
    assert metadata_of(active.identity)["bounds"] == Verdict("bounds")


def test_a_component_that_naming_would_not_activate_is_found(acme: Place) -> None:
    acme(claims="")
    status, reason = inside()["claims"]
    assert status == "warning"
    assert '"slime.reward_models"] length = "acme"' in reason


def test_a_plugin_that_does_not_import_has_no_other_rows(acme: Place) -> None:
    acme({"acme/plugin.py": "import no_such_thing"})
    ((check, (status, reason)),) = inside().items()
    assert (check, status) == ("import", "FAILED")
    assert "'acme' (acme-tree 2.1" in reason


@pytest.mark.parametrize(
    ("source", "end"),
    [
        ("import os; print('bye', flush=True); os._exit(0)", "exit code 0"),
        ("import os; print('bye', flush=True); os._exit(7)", "exit code 7"),
        ("import os; print('bye', flush=True); os.kill(os.getpid(), 9)", "SIGKILL"),
    ],
)
def test_a_plugin_that_ends_the_interpreter_is_reported_by_its_exit_code(acme: Place, source: str, end: str) -> None:
    acme({"acme/plugin.py": source})
    ((check, (status, reason)),) = inside().items()
    assert (check, status) == ("import", "FAILED")
    assert end in reason
    assert reason.endswith(": bye")


def test_a_plugin_that_hangs_is_ended_with_what_it_started(acme: Place, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    start = f"open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '300']).pid))"
    acme({"acme/plugin.py": f"import subprocess, time\n{start}\ntime.sleep(300)"})
    ((check, (status, reason)),) = inside(timeout_s=6).items()
    assert check in ("start", "import")  # a busy machine may not have come further
    assert status == "FAILED"
    assert "6 s (--timeout-s)" in reason
    if pid.exists():
        assert left_of(*map(int, pid.read_text().split())) == []


def test_a_target_that_ends_the_interpreter_leaves_the_rows_before_it(acme: Place) -> None:
    acme({"acme/code.py": "import os; os._exit(3)"})
    found = inside()
    assert [status for status, _ in found.values()] == ["ok", "ok", "ok", "ok", "FAILED"]
    assert "exit code 3" in found["reward model length"][1]


def test_an_ignored_hook_is_found(acme: Place) -> None:
    acme({"acme/plugin.py": PLUGIN.replace("@hookimpl\n", "")})
    assert list(inside()) == ["import", "hooks"]
    assert "slime_register_reward_models" in inside()["hooks"][1]


def test_a_component_that_core_has_already_is_found(acme: Place) -> None:
    acme({"acme/plugin.py": PLUGIN.replace('"length"', '"random"')})
    assert "reward model 'random'" in inside()["registration"][1]


def test_a_target_that_does_not_fit_is_found(acme: Place) -> None:
    acme({"acme/code.py": CODE.replace("async ", "")})
    assert "  - score is not async" in inside()["reward model length"][1]


def test_a_target_that_breaks_a_property_of_its_kind_is_found(acme: Place) -> None:
    acme({"acme/code.py": CODE.replace("in samples]", "in samples[::-1]]")})
    found = inside()
    assert found["reward model length"] == ("ok", "")
    status, reason = found["reward model length, properties"]
    assert status == "FAILED"
    assert any(line.startswith("rewards_come_in_the_order_of_the_samples: ") for line in reason.splitlines())


def test_properties_that_the_examples_of_the_kit_cannot_show_are_skipped(acme: Place) -> None:
    acme({"acme/code.py": CODE.replace("len(sample.response)", "0")})
    status, reason = inside()["reward model length, properties"]
    assert status == "skipped"
    assert "the_examples_get_different_rewards" in reason


def test_components_that_only_a_run_can_fill_have_no_properties() -> None:
    found = inside(source=resolve("compat"))
    assert found["reward model custom_rm_path"] == ("ok", "")
    assert found["properties"][0] == "skipped"
    assert not any(check.endswith(", properties") for check in found)


def test_hooks_of_a_run_s_life_are_held_to_their_properties(acme: Place) -> None:
    acme({"acme/plugin.py": PLUGIN + "@hookimpl\ndef slime_run_start(run):\n    pass\n"})
    assert inside()["hooks of the run's life"] == ("ok", "")


def test_a_heavy_import_is_a_warning(acme: Place) -> None:
    acme({"acme/plugin.py": "import numpy\n" + PLUGIN})
    status, reason = inside()["import"]
    assert status == "warning"
    assert "numpy" in reason


def test_a_single_file_crosses_as_bytes(tmp_path: Path) -> None:
    source = local_file(PLUGIN.replace("acme.code", "nowhere.code").encode(), path="/lab/mine.py")
    assert unpack(pack(source)) == source
    assert source.source is Source.FILE
    assert inside(source=source)["reward model length"][0] == "FAILED"


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_table_names_each_plugin_and_the_exit_code_says_whether_all_is_well(
    acme: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    acme({"acme/code.py": "raise RuntimeError('no')"}, more="")
    assert main(["plugins", "check", "acme", "searchr1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "acme (acme-tree 2.1, acme.plugin)"
    assert "  ok       registration" in lines
    assert any(line.startswith("  FAILED   reward model length  ") for line in lines)
    assert "  ok       reward model search_r1, properties" in lines
    assert lines[-1].startswith("2 plugins: 1 FAILED, ")


def test_json_holds_every_check(acme: Place, capsys: pytest.CaptureFixture[str]) -> None:
    acme()
    assert check_plugins(["acme"], as_json=True) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["distribution"], found["failed"]) == ("acme", "acme-tree", False)
    assert {"check": "reward model length", "status": "ok", "reason": ""} in found["checks"]


def test_all_installed_plugins_are_checked_where_none_is_named() -> None:
    assert PluginSource(CORE) in sources_of([], installed())
    assert [source.plugin for source in sources_of([], installed())] == installed()


def test_checking_imports_no_plugin_here(acme: Place) -> None:
    acme()
    assert check_plugins(["acme"]) == 0
    assert "acme" not in sys.modules


WRITES = """
from pathlib import Path
from slime_core import Component, PluginOptions, hookimpl, observer

Path("imported.txt").write_text("")

class Options(PluginOptions):
    notes: Path = Path("notes.txt")
    \"\"\"Where it writes.\"\"\"

class Words:
    def __init__(self, options, run):
        options.notes.write_text("made")
    async def score(self, samples):
        Path("scores.txt").write_text("")
        return [float(len(sample.response)) for sample in samples]

@hookimpl
def slime_options():
    return Options

@hookimpl
def slime_register_reward_models():
    yield Component("words", target=f"{__name__}:Words")

@hookimpl
def slime_run_start(run, options):
    Path("started.txt").write_text(str(options.notes))

    (Path.home() / "started.txt").write_text("")

folder = None

@hookimpl
def slime_sampler_start(sampler):
    global folder
    folder = sampler.folder

@hookimpl
@observer
def slime_after_rollout(rollout, samples):
    (folder / f"rollout-{rollout}.txt").write_text("")
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


def test_nothing_is_written_into_the_users_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "writes.py").write_text(WRITES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    code = main(["plugins", "check", "./writes.py"])
    assert code == 0, capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["writes.py"]
