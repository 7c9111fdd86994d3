"""A resume is refused before the run folder changes; what it changes, plugins included, is shown."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_core import launch
from slime_core.checkpoint.folder import Checkpoint, RunState, drafted, write_state
from slime_core.cli.main import main
from slime_core.cli.run import check_plugins
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import CheckpointError, ManifestMismatch
from slime_core.plugins.activation import activate
from slime_core.plugins.discovery import Source
from slime_core.plugins.manifest import Manifest, ManifestEntry

SETTINGS = ("--plugin", "grpo", "--device", "cpu", "--num-rollout", "4", "--n-samples-per-prompt", "8")
ROWS = "".join(json.dumps({"step": step, "train/loss": 0.5}) + "\n" for step in range(3))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The checkpoints that starts of the run were to continue from; a test may put an error in front."""
    found: list[Any] = []

    def start(job: Any, *, track: Any, resume: Any = None) -> RunState:
        if found and isinstance(found[0], Exception):
            raise found[0]
        found.append(None if resume is None else resume.state.step)
        track.record.begin()
        return RunState(4)

    monkeypatch.setattr(launch, "run", start)
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> Path:
    """A run of 3 steps with checkpoints after steps 2 and 3, and the prompts that it was given."""
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    rows = (ARITHMETIC / "data" / "train.jsonl").read_text().splitlines()[:100]  # a start reads every prompt
    prompts.write_text("\n".join(rows) + "\n")
    assert main(["run", *SETTINGS, "--prompt-data", "prompts.jsonl", "--output-dir", "r"]) == 0
    seen.clear()
    for step in (2, 3):
        with drafted(tmp_path / "r" / "checkpoints", step) as draft:
            shutil.copytree(ARITHMETIC / "model", draft / "hf")
            cursor = {"ledger": {}, "source": {}, "in_flight": []}
            write_state(draft, RunState(step, cursor, json.loads((tmp_path / "r" / "plugins.json").read_text())))
    (tmp_path / "r" / "metrics.jsonl").write_text(ROWS)
    return tmp_path / "r"


def content(folder: Path) -> Mapping[str, str]:
    """What a later resume reads: everything but the lock and TensorBoard's empty files."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "tensorboard"]
    names = {path.relative_to(folder).as_posix(): path for path in files if path.name != "run.lock"}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(names.items())}


@pytest.mark.parametrize("command", ["run", "check"])
def test_another_model_is_refused(run: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ARITHMETIC / "model", tmp_path / "model")
    wide = json.loads((tmp_path / "model" / "config.json").read_text())
    wide["num_hidden_layers"] += 1
    (tmp_path / "model" / "config.json").write_text(json.dumps(wide))
    before = content(run)
    assert main([command, "--load", "r", "--hf-checkpoint", "model"]) == 2
    assert "num_hidden_layers" in capsys.readouterr().err
    assert content(run) == before


def test_a_refusal_that_comes_only_from_the_processes_changes_nothing(run: Path, seen: list[Any]) -> None:
    before = content(run)
    seen.append(CheckpointError("a data source of a plugin refuses its state"))
    assert main(["run", "--load", "r/checkpoints/step-000002", "--lr", "0.5"]) == 1
    assert content(run) == before


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_resume_lists_each_setting_that_it_changes(
    run: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--load", "r", "--num-rollout", "9", "--lr", "0.5", "--rollout-temperature", "0.5")
    capsys.readouterr()
    assert main([command, *words]) == 0
    changes = [line for line in capsys.readouterr().out.splitlines() if " -> " in line]
    assert [line.partition(": ")[2] for line in changes] == [
        "optimizer.lr: 0.0003 -> 0.5",
        "rollout.num_rollout: 4 -> 9",
        "rollout.rollout_temperature: 1.0 -> 0.5",
    ]


def test_a_resume_without_changes_lists_none_and_one_that_goes_back_sets_aside(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["run", "--load", "r/checkpoints/step-000002"]) == 0
    assert " -> " not in capsys.readouterr().out
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run / "checkpoints" / ".abandoned-step-000003").is_dir()


@pytest.mark.parametrize("phase", ["start", "step"])
def test_ctrl_c_ends_with_what_is_saved_and_the_command_that_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], phase: str
) -> None:
    def interrupted(job: Any, *, track: Any, resume: Any = None) -> RunState:
        if phase == "step":
            track.record.begin()
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run", interrupted)
    assert main(["run", "--load", "r"]) == 130
    saved, last = capsys.readouterr().err.splitlines()[-2:]
    assert "step-000003" in saved
    assert f"slime run --load {run}" in saved
    assert last == "slime: interrupted"


# --- Other plugins ----------------------------------------------------------------------------------------------------


CORE = ManifestEntry("core", "slime-rl", "0.1.0", "slime_core.builtin.plugin", "c" * 64)
ACME = ManifestEntry("acme", "acme-tree", "2.1", "acme.plugin", "a" * 64)
LAB = ManifestEntry("custom_rm_path", "module lab", "(local)", "lab", "f" * 64, source=Source.MODULE)
THEN = Manifest((CORE, ACME))


def check(now: Manifest, then: Manifest | None = THEN, *, allowed: bool = False, without: tuple[str, ...] = ()) -> None:
    checkpoint = Checkpoint(Path("run/step-000002"), RunState(2, plugins=json.loads(then.to_json()) if then else {}))
    check_plugins(now, checkpoint, allowed=allowed, without=without)


def test_another_version_added_and_removed_plugins_are_one_table() -> None:
    newer = replace(ACME, version="2.2")
    more = ManifestEntry("more", "more", "1.0", "more", "b" * 64)
    with pytest.raises(ManifestMismatch) as failure:
        check(Manifest((CORE, newer, more)), Manifest((CORE, ACME, replace(more, name="gone", distribution="gone"))))
    words = list(map(str.split, str(failure.value).splitlines()))
    assert {row[0]: row[1:] for row in words if row[0] in ("acme", "gone", "more")} == {
        "acme": ["acme-tree", "2.1", "a" * 12, "acme-tree", "2.2", "a" * 12],
        "gone": ["gone", "1.0", "b" * 12, "-"],
        "more": ["-", "more", "1.0", "b" * 12],
    }


@pytest.mark.parametrize(
    ("now", "then"),
    [
        pytest.param(Manifest((replace(CORE, digest="d" * 64), ACME)), THEN, id="a core that was edited"),
        pytest.param(Manifest((CORE, ACME), (LAB,)), THEN, id="a function named by path"),
        pytest.param(THEN, None, id="a checkpoint that recorded no plugins"),
        pytest.param(Manifest((CORE,)), THEN, id="a plugin that is missing"),
    ],
)
def test_every_other_difference_needs_permission(
    now: Manifest, then: Manifest | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ManifestMismatch, match="--allow-plugin-change"):
        check(now, then)
    check(now, then, allowed=True)
    assert "step-000002" in capsys.readouterr().err


def test_the_same_plugins_in_any_order_and_without_those_left_out_may_resume() -> None:
    check(Manifest((ACME, CORE)))
    check(Manifest((CORE,)), without=("acme",))
    with pytest.raises(ManifestMismatch):
        check(Manifest((CORE,), (LAB,)), without=("acme",))


GONE = ManifestEntry("gone", "lab-gone", "1.2", "gone.plugin", "b" * 64)
OPTIONS = """
from pathlib import Path
from slime_core import PluginOptions, hookimpl

class Options(PluginOptions):
    table: Path = Path("table.json")
    \"\"\"A file whose default is relative.\"\"\"
    more: list[Path] = []
    \"\"\"Further files.\"\"\"
    named: dict[str, Path] = {}
    \"\"\"Files by name.\"\"\"

@hookimpl
def slime_register(add):
    add.options(Options)
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with a plugin that is no longer installed and has options, and with one that is."""
    run = tmp_path / "old"
    now = activate(["datasets", "grpo", "offpolicy"], architecture="Qwen3ForCausalLM").manifest
    manifest = Manifest((*now.plugins, GONE))
    with drafted(run / "checkpoints", 2) as draft:
        write_state(draft, RunState(2, plugins=json.loads(manifest.to_json())))
    (run / "plugins.json").write_text(manifest.to_json())
    (run / "config.toml").write_text(
        '[run]\nplugins = ["grpo", "gone", "offpolicy"]\n[gone]\nx = 1\n[offpolicy]\ntis_clip = 3.0\n'
    )
    monkeypatch.chdir(tmp_path)
    return run


def test_a_resume_goes_on_without_a_plugin_that_has_options_installed_or_not(ran: Path, capsys) -> None:
    words = ["check", "--load", "old", "--num-rollout", "4"]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "--plugin gone" in message
    assert "--no-plugin" in message
    assert main([*words, "--no-plugin", "gone", "--no-plugin", "offpolicy"]) == 0
    warned = capsys.readouterr().err
    assert "step-000002" in warned
    assert "gone       lab-gone 1.2 bbbbbbbbbbbb" in warned
    assert main([*words, "--no-plugin", "gone", "--no-plugin", "models"]) == 2  # another one is needed as ever
    # A plugin that is not named leaves the table of its options.
    (ran / "config.toml").write_text('[run]\nplugins = ["grpo"]\n[gone]\nx = 1\n')
    assert main([*words, "--no-plugin", "gone", "--allow-plugin-change"]) == 0


@pytest.mark.parametrize("name", ["mine", "./mine.py"])
def test_a_single_file_that_has_gone_is_left_out_by_its_name_or_its_path(ran: Path, capsys, name: str) -> None:
    plugin = ran.parent / "mine.py"
    (ran / "config.toml").write_text(f'[run]\nplugins = ["grpo", "{plugin}"]\n[mine]\nx = 1\n')
    assert main(["check", "--config", str(ran / "config.toml"), "--no-plugin", name]) == 0
    assert main(["check", "--config", str(ran / "config.toml"), "--no-plugin", "other"]) == 2
    assert str(plugin) in capsys.readouterr().err


def test_relative_paths_of_plugins_mean_the_same_from_another_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    (first / "opts.py").write_text(OPTIONS)
    (first / "rewards.py").write_text("async def one(args, sample, **kwargs):\n    return 1.0\n")
    monkeypatch.chdir(first)
    (first / "opts.toml").write_text('[opts]\nmore = ["a"]\nnamed = { b = "c" }\n')
    words = ["--config", "opts.toml", "--plugin", "grpo", "--plugin", "opts.py", "--custom-rm-path", "rewards.py:one"]
    assert main(["config", "show", *words]) == 0
    (first / "config.toml").write_text(capsys.readouterr().out)
    monkeypatch.chdir(second)
    assert main(["config", "show", "--config", "../first/config.toml"]) == 0
    again = capsys.readouterr().out
    for line in (
        f'table = "{first}/table.json"',
        f'more = ["{first}/a"]',
        f'custom_rm_path = "{first}/rewards.py:one"',
    ):
        assert line in again
    assert f'"{first}/c"' in again
