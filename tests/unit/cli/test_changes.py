"""A resume with other plugins than those of the run that wrote the checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.checkpoint.folder import Checkpoint, RunState, drafted, find, write_state
from slime_core.cli.main import main
from slime_core.cli.run import continued
from slime_core.errors import ConfigError, ManifestMismatch
from slime_core.plugins.activation import activate
from slime_core.plugins.manifest import Manifest, ManifestEntry, PluginChange

CORE = ManifestEntry("core", "slime-rl", "0.1.0", "slime_core.builtin.plugin", "c" * 64, files=(("a.py", "1"),))
ACME = ManifestEntry("acme", "acme-tree", "2.1", "acme.plugin", "a" * 64)
THEN = Manifest((CORE, ACME))


def checkpoint(manifest: Manifest | None = THEN) -> Checkpoint:
    plugins = json.loads(manifest.to_json()) if manifest else {}
    return Checkpoint(Path("run/checkpoints/step-000002"), RunState(2, plugins=plugins))


def refusal(now: Manifest, then: Manifest | None = THEN) -> str:
    with pytest.raises(ManifestMismatch) as failure:
        continued(now, checkpoint(then), allowed=False)
    return str(failure.value)


def test_the_same_plugins_in_any_order_may_resume():
    now = Manifest((ACME, CORE))
    assert continued(now, checkpoint(), allowed=False) == now


def test_another_version_added_and_removed_plugins_are_one_table():
    newer, more = replace(ACME, version="2.2"), replace(ACME, plugin="more", distribution="more", digest="b" * 64)
    then = Manifest((CORE, ACME, replace(more, plugin="gone", distribution="gone")))
    message = refusal(Manifest((CORE, newer, more)), then)
    assert "run/checkpoints/step-000002" in message
    assert "--allow-plugin-change" in message
    rows = {
        words[0]: words[1:] for words in map(str.split, message.splitlines()) if words[0] in ("acme", "gone", "more")
    }
    assert rows == {
        "acme": ["acme-tree", "2.1", "a" * 12, "acme-tree", "2.2", "a" * 12, "version"],
        "gone": ["gone", "2.1", "b" * 12, "-", "missing"],
        "more": ["-", "more", "2.1", "b" * 12, "added"],
    }


def test_a_core_that_was_edited_counts_and_its_files_are_named():
    edited = replace(CORE, digest="d" * 64, files=(("a.py", "2"), ("b.py", "3")))
    assert "content of a.py, b.py" in refusal(Manifest((edited, ACME)))


def test_a_function_named_by_path_counts_too():
    function = ManifestEntry("custom_rm_path", "module lab", "(local)", "lab", "f" * 64, source="module")
    assert "custom_rm_path  -            module lab" in refusal(Manifest((CORE, ACME), (function,)))


def test_a_checkpoint_that_recorded_no_plugins_is_one_of_other_plugins():
    assert "core    -            slime-rl 0.1.0 cccccccccccc  added" in refusal(THEN, None)


def test_an_allowed_change_is_warned_about_and_recorded_after_the_earlier_ones(capsys):
    earlier = PluginChange(1, ("core: x -> y (version)",))
    now = Manifest((CORE, replace(ACME, version="2.2")))
    manifest = continued(now, checkpoint(replace(THEN, changes=(earlier,))), allowed=True)
    line = "acme: acme-tree 2.1 aaaaaaaaaaaa -> acme-tree 2.2 aaaaaaaaaaaa (version)"
    assert manifest == replace(now, changes=(earlier, PluginChange(2, (line,))))
    assert "--allow-plugin-change: step-000002" in capsys.readouterr().err


def test_changes_of_the_past_stay_recorded_when_nothing_has_changed_since():
    changes = (PluginChange(1, ("core: x -> y (version)",)),)
    assert continued(THEN, checkpoint(replace(THEN, changes=changes)), allowed=True).changes == changes


def test_allowing_a_change_where_nothing_is_resumed_is_a_mistake():
    with pytest.raises(ConfigError) as failure:
        continued(THEN, None, allowed=True)
    assert "allow_plugin_change" in str(failure.value)
    assert "--load" in str(failure.value)


def test_slime_run_refuses_before_it_makes_a_folder(tmp_path: Path, monkeypatch, capsys):
    with drafted(tmp_path / "old" / "checkpoints", 2) as draft:
        write_state(draft, RunState(2, plugins=json.loads(THEN.to_json())))
    assert find(tmp_path / "old").state.step == 2
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--plugin", "grpo", "--load", "old", "--output-dir", "new"]) == 2
    printed = capsys.readouterr().err
    assert "  acme    acme-tree 2.1 aaaaaaaaaaaa " in printed
    assert not (tmp_path / "new").exists()


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
def slime_options():
    return Options
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with a plugin that is no longer installed and has options, and with one that is."""
    run = tmp_path / "old"
    now = activate(["grpo", "offpolicy"], architecture="Qwen3ForCausalLM").manifest
    manifest = Manifest((*now.entries, GONE))
    with drafted(run / "checkpoints", 2) as draft:
        write_state(draft, RunState(2, plugins=json.loads(manifest.to_json())))
    (run / "plugins.json").write_text(manifest.to_json())
    (run / "config.toml").write_text(
        '[run]\nplugins = ["grpo", "gone", "offpolicy"]\n[gone]\nx = 1\n[offpolicy]\ntis_clip = 3.0\n'
    )
    monkeypatch.chdir(tmp_path)
    return run


def test_a_missing_plugin_of_a_run_is_named_with_the_way_on(ran: Path, capsys) -> None:
    assert main(["check", "--load", "old", "--num-rollout", "4"]) == 2
    message = capsys.readouterr().err
    assert "--plugin gone" in message
    assert "--no-plugin" in message


def test_a_resume_goes_on_without_a_plugin_that_has_options_installed_or_not(ran: Path, capsys) -> None:
    words = ["check", "--load", "old", "--num-rollout", "4"]
    assert main([*words, "--no-plugin", "gone", "--no-plugin", "offpolicy"]) == 0
    warned = capsys.readouterr().err
    assert "--no-plugin: step-000002" in warned
    assert "gone       lab-gone 1.2 bbbbbbbbbbbb" in warned
    assert main([*words, "--no-plugin", "gone", "--no-plugin", "models"]) == 2  # another one is needed as ever


def test_a_missing_plugin_that_is_not_taken_away_is_refused(ran: Path, capsys) -> None:
    (ran / "config.toml").write_text('[run]\nplugins = ["grpo", "gone"]\n')
    assert main(["check", "--load", "old", "--num-rollout", "4", "--no-plugin", "gone"]) == 2
    assert "--allow-plugin-change" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mine", "./mine.py"])
def test_a_single_file_that_has_gone_is_left_out_by_its_name_or_its_path(ran: Path, capsys, name: str) -> None:
    plugin = ran.parent / "mine.py"
    (ran / "config.toml").write_text(f'[run]\nplugins = ["grpo", "{plugin}"]\n[mine]\nx = 1\n')
    assert main(["check", "--config", str(ran / "config.toml"), "--no-plugin", name]) == 0
    assert main(["check", "--config", str(ran / "config.toml"), "--no-plugin", "other"]) == 2
    assert f"{plugin}: cannot be read in " in capsys.readouterr().err


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
