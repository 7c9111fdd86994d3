"""``slime eval``: what a leading folder means, what is refused, and what is printed and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core.checkpoint.folder import RunState, drafted, write_state
from slime_core.cli.evaluate import expand, table
from slime_core.cli.main import main
from slime_core.errors import ConfigError
from slime_core.plugins.activation import activate
from slime_core.plugins.manifest import Manifest
from slime_core.runtime import launch

SCORES = {
    "eval/arithmetic": 0.5,
    "eval/arithmetic-truncated_ratio": 0.25,
    "eval/arithmetic-pass@1": 0.5,
    "eval/arithmetic/response_len/mean": 3.25,
    "eval/arithmetic-failed/engine": 2.0,
}
TABLE = "  set         score   pass@1  truncated  length  failed\n  arithmetic  0.5000  0.5000  0.2500     3.2     2"


def checkpoint(folder: Path, *, hf: bool) -> Path:
    with drafted(folder, 4) as draft:
        if hf:
            (draft / "hf").mkdir()
        write_state(draft, RunState(4))
    return folder / "step-000004"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with a checkpoint that has no hf folder; the working directory is its parent."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(f'[run]\nplugins = ["grpo"]\noutput_dir = "{tmp_path / "run"}"\n')
    checkpoint(tmp_path / "run" / "checkpoints", hf=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """The jobs that were started, with the checkpoints that a learner would have loaded."""
    started: list[tuple[Any, Any]] = []

    def evaluate(job: Any, *, warn: Any, held: Any = None) -> dict[str, float]:
        started.append((job, held))
        return SCORES

    monkeypatch.setattr(launch, "evaluate", evaluate)
    return started


def test_a_hugging_face_folder_is_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert expand([str(tmp_path), "--eval-temperature", "1"]) == [
        "--hf-checkpoint",
        str(tmp_path),
        "--eval-temperature",
        "1",
    ]


def test_an_evaluation_of_a_run_goes_without_plugins_that_only_track(run: Path) -> None:
    assert activate(["grpo", "plots"]).registry.only_tracking() == ("plots",)
    manifest = Manifest(()).to_json(only_track=["wand", "plots", "--trust-remote-code"])
    (run / "plugins.json").write_text(manifest)
    left_out = ["--no-plugin", "plots", "--no-plugin", "wand"]
    known = ["--config", f"{run}/config.toml"]
    assert expand(["run"]) == [*known, *left_out, "--load", "run/checkpoints/step-000004"]
    assert expand(["run", "--plugin", "plots"])[:3] == [*known, "--load"]
    (run / "plugins.json").write_text("{}")
    assert expand(["run"])[:3] == [*known, "--load"]


def test_a_run_whose_tracker_is_not_installed_is_evaluated(run: Path, evaluated: list[tuple[Any, Any]]) -> None:
    text = (run / "config.toml").read_text().replace('["grpo"]', '["grpo", "wand"]')
    (run / "config.toml").write_text(f'{text}[wand]\nproject = "mine"\n')
    assert main(["eval", "run"]) == 2
    (run / "plugins.json").write_text(Manifest(()).to_json(only_track=["wand"]))
    assert main(["eval", "run"]) == 0
    assert len(evaluated) == 1


def test_a_checkpoint_without_hf_is_loaded_by_a_learner_with_the_settings_of_its_run(run: Path) -> None:
    assert expand(["run"]) == ["--config", f"{run}/config.toml", "--load", "run/checkpoints/step-000004"]
    lone = checkpoint(run.parent / "kept", hf=False)
    assert expand([str(lone), "--config", "x.toml"]) == ["--load", str(lone), "--config", "x.toml"]
    with pytest.raises(ConfigError) as caught:
        expand([str(lone)])
    assert "config.toml" in str(caught.value)


def test_a_folder_that_holds_nothing_to_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        expand([str(tmp_path)])
    assert "step-NNNNNN" in str(caught.value)
    with pytest.raises(ConfigError, match=f"{tmp_path}/missing"):
        expand([str(tmp_path / "missing")])


def test_scores_are_printed_as_a_table_and_one_a_line(
    evaluated: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--eval-temperature", "0"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("model: ")
    assert f"\n\n{TABLE}\n\neval/arithmetic: 0.5000\neval/arithmetic-truncated_ratio: 0.2500\n" in shown
    ((job, held),) = evaluated
    assert (job.samples, held) == (None, None)
    assert list(tmp_path.iterdir()) == []


def test_scores_are_printed_as_json_and_written_where_requested(
    evaluated: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "measured"
    words = ["--n-samples-per-eval-prompt", "2", "--output-dir", str(folder)]
    assert main(["eval", "--json", *words]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["metrics"] == SCORES
    assert (report["sets"]["arithmetic"]["n_samples"], report["sets"]["arithmetic"]["temperature"]) == (2, 0.0)
    assert shown.err.startswith("model: ")
    assert json.loads((folder / "scores.json").read_text()) == report
    ((job, _),) = evaluated
    assert (job.samples, job.logs) == (folder / "samples", folder / "logs")


@pytest.mark.parametrize("words", [["--eval-num-gpus", "1"], ["--eval-interleaved"]])
def test_without_training_an_evaluation_cannot_be_concurrent(
    evaluated: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *words]) == 0
    ((job, _),) = evaluated
    assert not job.config.eval.is_concurrent
    assert job.config.auxiliary_groups == ()


def test_the_samples_of_a_run_are_not_replaced(
    run: Path, evaluated: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    # The run's own settings name its folder; only a flag asks for samples.
    assert main(["eval", "run"]) == 0
    ((job, held),) = evaluated
    assert job.samples is None
    assert held.path == Path("run/checkpoints/step-000004").absolute()
    assert main(["eval", "run", "--output-dir", "run"]) == 2
    assert f"output_dir: {run}" in capsys.readouterr().err.splitlines()[-1]
    assert len(evaluated) == 1


def test_each_set_is_looked_through_by_its_own_settings(
    evaluated: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text('{"q": "1+1"}\n{"q": "%s"}\n' % ("1" * 150))
    own = f"name='a', path='{tmp_path}/x.jsonl'"
    messages = {
        own: "line 1: no field 'prompt', found q.",
        f"{own}, input_key='q'": "line 1: no field 'label', found q.",
        f"{own}, input_key='q', label_key='none'": "line 1: reward model 'exact_match'",
        f"{own}, input_key='q', label_key='none', rm_type='zero'": "line 2: a prompt of ",
        f"{own}, rm_type='exact_mach'": "a reward model called 'exact_mach' (did you mean 'exact_match'?)",
    }
    for table_, message in messages.items():
        assert main(["eval", "--eval-datasets", table_]) != 0
        assert message in capsys.readouterr().err
    assert evaluated == []
    shorter = f"{own}, input_key='q', label_key='none', rm_type='zero', max_prompt_len=50"
    assert main(["eval", "--eval-datasets", shorter]) == 0


def test_a_table_has_a_column_for_every_k_and_only_sets_that_were_measured() -> None:
    more = {"eval/b": 1.0, "eval/b-pass@1": 1.0, "eval/b-pass@2": 1.0}
    assert table(["arithmetic", "b", "c"], {**SCORES, **more}).splitlines() == [
        "  set         score   pass@1  pass@2  truncated  length  failed",
        "  arithmetic  0.5000  0.5000          0.2500     3.2     2",
        "  b           1.0000  1.0000  1.0000                     0",
    ]
    assert table(["c"], SCORES) == ""
