"""``--eval-config FILE``: slime's form of evaluation sets, as YAML or TOML."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.explain import explain, to_toml
from slime_core.config.load import Resolved
from slime_core.config.schema import eval_sets
from slime_core.errors import ConfigError
from tests.function_paths import resolve

NONE = ("--advantage-estimator", "toy", "--eval-prompt-data", "none")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two prompt files."""
    for name in ("aime.jsonl", "gpqa.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "1+1", "label": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*argv: str) -> Resolved:
    return resolve([*NONE, *argv])[0]


def names(*argv: str) -> list[str]:
    return [one.name for one in eval_sets(read(*argv).config)]


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    return str(caught.value)


FILES = {
    "eval.yaml": "eval:\n  defaults: {temperature: 0.6}\n  datasets:\n    - {name: aime, path: aime.jsonl}\n"
    "    - {name: gpqa, path: gpqa.jsonl, temperature: 1.0, rm_type: exact_match}\n",
    "by_name.yaml": "defaults: {temperature: 0.6}\ndatasets:\n  aime: {path: aime.jsonl}\n"
    "  gpqa: {path: gpqa.jsonl, temperature: 1.0, rm_type: exact_match}\n",
    "eval.toml": '[defaults]\ntemperature = 0.6\n[[datasets]]\nname = "aime"\npath = "aime.jsonl"\n'
    '[[datasets]]\nname = "gpqa"\npath = "gpqa.jsonl"\ntemperature = 1.0\nrm_type = "exact_match"\n',
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_sets_is_read_in_every_form_and_written_down_with_the_run(name: str, folder: Path) -> None:
    (folder / name).write_text(FILES[name])
    resolved = read("--eval-config", name)
    aime, gpqa = eval_sets(resolved.config)
    assert (aime.temperature, aime.path, gpqa.temperature, gpqa.rm_type) == (
        0.6,
        folder / "aime.jsonl",
        1.0,
        "exact_match",
    )
    (folder / "config.toml").write_text(to_toml(resolved))
    (folder / name).unlink()
    again = resolve(["--config", "config.toml"])[0]
    assert again.config.eval.eval_datasets == resolved.config.eval.eval_datasets
    assert '"temperature" = 0.6' in explain("eval_datasets", again)


def test_the_last_layer_says_which_sets_there_are(folder: Path) -> None:
    (folder / "eval.yaml").write_text(FILES["eval.yaml"])
    (folder / "run.toml").write_text('[[eval.eval_datasets]]\nname = "old"\npath = "aime.jsonl"\n')
    assert names("--config", "run.toml", "--eval-config", "eval.yaml") == ["aime", "gpqa"]
    (folder / "run.toml").write_text('[eval]\neval_config = "eval.yaml"\n')
    assert names("--config", "run.toml", "--eval-datasets", "name='x', path='aime.jsonl'") == ["x"]
    assert names("--config", "run.toml", "--no-eval") == []


@pytest.mark.parametrize("flags", [("--eval-datasets", "name='x', path='x'"), ("--no-eval",)])
def test_sets_are_given_in_one_place(flags: tuple[str, ...], folder: Path) -> None:
    (folder / "eval.yaml").write_text(FILES["eval.yaml"])
    message = refused("--eval-config", "eval.yaml", *flags)
    assert "eval_datasets, and flag --eval-datasets" in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("datasets: []", "found no evaluation sets"),
        ("[1]", "found list"),
        ("datasets: {aime: aime.jsonl}", "found 'aime.jsonl'"),
        ("datasets: [aime.jsonl]", "found 'aime.jsonl'"),
        ("datasets:\n  aime: {path: aime.jsonl}\n  aime: {path: gpqa.jsonl}\n", "cannot be read: aime "),
        ("a: [", "cannot be read: not YAML"),
        (
            "dataset: 1\ndefaults: {path: x}\ndatasets: {a: {path: aime.jsonl, custom_rm_path: m.f}}",
            "no such key dataset; did you mean datasets?; defaults: path ",
        ),
    ],
)
def test_a_wrong_file_is_reported(text: str, problem: str, folder: Path) -> None:
    (folder / "eval.yaml").write_text(text)
    assert f"--eval-config {folder}/eval.yaml: {problem}" in refused("--eval-config", "eval.yaml")


def test_what_the_core_does_not_know_of_a_set_is_reported(folder: Path) -> None:
    (folder / "eval.yaml").write_text("defaults: {topk: 3}\ndatasets: [{name: a, path: aime.jsonl, 5: 6}]")
    message = refused("--eval-config", "eval.yaml")
    assert "--eval-config: table 1" in message
    assert "table 1 5: found 6" in message


def test_aliases_are_counted_before_they_are_written_out(folder: Path) -> None:
    rows = ["defaults: &a0 {x: 1}", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))]
    (folder / "eval.yaml").write_text("\n".join(rows))
    assert "more than 100,000" in refused("--eval-config", "eval.yaml")


def test_what_several_sets_share_may_be_merged_and_changed(folder: Path) -> None:
    (folder / "eval.yaml").write_text(
        "datasets:\n- &a {name: a, path: aime.jsonl, temperature: 0.5}\n- &b {<<: *a, name: b}\n- {<<: *b, name: c, "
        "temperature: 1.0}\n"
    )
    found = eval_sets(read("--eval-config", "eval.yaml").config)
    assert {one.name: one.temperature for one in found} == {"a": 0.5, "b": 0.5, "c": 1.0}
