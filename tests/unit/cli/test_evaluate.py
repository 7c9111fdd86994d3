"""``slime eval`` and ``slime ledger``: what a folder means, what is refused, and what is printed and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_core import launch
from slime_core.checkpoint.folder import RunState, drafted, write_state
from slime_core.cli.evaluate import expand, table
from slime_core.cli.main import main
from slime_core.errors import ConfigError
from slime_core.track.ledger import Journal
from slime_core.track.samples import SampleWriter
from slime_core.types import Sample, Status

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


def test_a_run_whose_tracker_is_not_installed_is_evaluated_without_it(
    run: Path, evaluated: list[tuple[Any, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    text = (run / "config.toml").read_text().replace('["grpo"]', '["grpo", "wand"]')
    (run / "config.toml").write_text(f'{text}[wand]\nproject = "mine"\n')
    assert main(["eval", "run"]) == 2
    assert "--no-plugin wand" in capsys.readouterr().err
    assert main(["eval", "run", "--no-plugin", "wand"]) == 0
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


@pytest.mark.parametrize("flags", [[], ["--eval-num-gpus", "1"], ["--eval-interleaved"]])
def test_scores_are_printed_as_a_table_and_one_a_line_and_no_evaluation_is_concurrent(
    flags: list[str],
    evaluated: list[Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--eval-temperature", "0", *flags]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("model: ")
    assert f"\n\n{TABLE}\n\neval/arithmetic: 0.5000\neval/arithmetic-truncated_ratio: 0.2500\n" in shown
    ((job, held),) = evaluated
    assert (job.samples, held) == (None, None)
    assert (job.config.eval.is_concurrent, job.config.auxiliary_groups) == (False, ())
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
        own: "line 1: no field 'prompt'",
        f"{own}, input_key='q'": "line 1: no field 'label'",
        f"{own}, input_key='q', label_key='none'": "line 1: reward model 'exact_match'",
        f"{own}, input_key='q', label_key='none', rm_type='zero'": "line 2: a prompt of ",
        f"{own}, rm_type='exact_mach'": "the reward model 'exact_mach'; did you mean exact_match?",
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


# --- slime ledger -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ledger_run(tmp_path: Path) -> Path:
    """A run folder: of three groups one was trained, one dropped, and one is held by the checkpoint."""
    samples = tmp_path / "samples"
    journal = Journal(samples)
    journal.took({number: [number] for number in range(3)})
    done, dropped = (Sample(group_index=one, index=one, status=Status.COMPLETED) for one in range(2))
    SampleWriter(samples).write("train", 0, [done], dropped=[("zero_std", dropped)])
    journal.closed(0)
    kept = {"journal": journal.position(), "in_flight": [], "held": [[2, [2]]]}
    save(tmp_path, kept)
    journal.took({3: [3]})
    return tmp_path


def save(folder: Path, kept: dict[str, Any]) -> None:
    checkpoint = folder / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": 1, "cursor": {"ledger": kept}}))


def test_the_ledger_shows_the_counts_at_the_checkpoint_and_at_the_end(
    ledger_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", str(ledger_run)]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    at_the_end = rows.index("end of the files, 1 rollouts")
    assert rows[0] == "step-000001, 1 rollouts: balances"
    assert rows[1:at_the_end] == ["trained 1", "filtered zero_std 1", "in_flight 0", "held 1", "returned 0", "taken 3"]
    assert rows[at_the_end + 1 :] == ["trained 1", "filtered zero_std 1", "open 2", "returned 0", "taken 4"]


def test_a_group_that_the_checkpoint_lacks_is_an_error(ledger_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = json.loads((ledger_run / "checkpoints" / "step-000001" / "state.json").read_text())["cursor"]["ledger"]
    save(ledger_run, {**kept, "held": []})
    assert main(["ledger", str(ledger_run)]) == 1
    assert "groups 2 " in capsys.readouterr().err
