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


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two prompt files."""
    for name in ("aime.jsonl", "gpqa.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": "1+1", "label": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*argv: str) -> Resolved:
    return resolve(["--advantage-estimator", "sft", "--eval-prompt-data", "none", *argv])[0]


def read_file(text: str, *argv: str, name: str = "eval.yaml") -> Resolved:
    Path(name).write_text(text)
    return read("--eval-config", name, *argv)


def names(*argv: str) -> list[str]:
    return [entry.name for entry in eval_sets(read(*argv).config)]


LISTED = """
eval:
  defaults: {temperature: 0.6}
  datasets:
    - {name: aime, path: aime.jsonl}
    - {name: gpqa, path: gpqa.jsonl, temperature: 1.0, rm_type: exact_match}
"""
FILES = {
    "eval.yaml": LISTED,
    "by_name.yaml": "defaults: {temperature: 0.6}\ndatasets:\n  aime: {path: aime.jsonl}\n"
    "  gpqa: {path: gpqa.jsonl, temperature: 1.0, rm_type: exact_match}\n",
    "merged.yaml": "datasets:\n- &a {name: aime, path: aime.jsonl, temperature: 0.6}\n"
    "- {<<: *a, name: gpqa, temperature: 1.0, rm_type: exact_match}\n",
    "eval.toml": '[defaults]\ntemperature = 0.6\n[[datasets]]\nname = "aime"\npath = "aime.jsonl"\n'
    '[[datasets]]\nname = "gpqa"\npath = "gpqa.jsonl"\ntemperature = 1.0\nrm_type = "exact_match"\n',
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_sets_is_read_in_every_form_and_written_down_with_the_run(name: str, folder: Path) -> None:
    resolved = read_file(FILES[name], name=name)
    aime, gpqa = eval_sets(resolved.config)
    assert (aime.temperature, aime.path) == (0.6, folder / "aime.jsonl")
    assert (gpqa.temperature, gpqa.rm_type) == (1.0, "exact_match")
    Path("config.toml").write_text(to_toml(resolved))
    Path(name).unlink()
    again = resolve(["--config", "config.toml"])[0]
    assert again.config.eval.eval_datasets == resolved.config.eval.eval_datasets
    assert '"temperature" = 0.6' in explain("eval_datasets", again)


def test_the_last_layer_decides_which_sets_there_are() -> None:
    Path("eval.yaml").write_text(LISTED)
    Path("run.toml").write_text('[[eval.eval_datasets]]\nname = "old"\npath = "aime.jsonl"\n')
    assert names("--config", "run.toml", "--eval-config", "eval.yaml") == ["aime", "gpqa"]
    Path("run.toml").write_text('[eval]\neval_config = "eval.yaml"\n')
    assert names("--config", "run.toml", "--eval-datasets", "name='x', path='aime.jsonl'") == ["x"]
    assert names("--config", "run.toml", "--no-eval") == []


@pytest.mark.parametrize("flags", [("--eval-datasets", "name='x', path='x'"), ("--no-eval",)])
def test_sets_are_given_in_one_place(flags: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="eval_datasets, and flag --eval-datasets"):
        read_file(LISTED, *flags)


ALIASES = [
    "defaults: &a0 {x: 1}",
    *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)),
]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("datasets: []", ["no evaluation sets"]),
        ("[1]", ["list"]),
        ("datasets: {aime: aime.jsonl}", ["'aime.jsonl'"]),
        ("datasets: [aime.jsonl]", ["'aime.jsonl'"]),
        ("datasets:\n  aime: {path: aime.jsonl}\n  aime: {path: gpqa.jsonl}\n", ["aime "]),
        ("a: [", ["not YAML"]),
        ("\n".join(ALIASES), ["100,000"]),
        ("dataset: 1\ndefaults: {path: x}\ndatasets: {a: {path: aime.jsonl}}", ["dataset;", "datasets?", "path"]),
        ("defaults: {topk: 3}\ndatasets: [{name: a, path: aime.jsonl, 5: 6}]", ["table 1", "table 1 5: found 6"]),
    ],
)
def test_a_wrong_file_is_reported(text: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        read_file(text)
    assert all(word in str(refused.value) for word in ("--eval-config", *named))
