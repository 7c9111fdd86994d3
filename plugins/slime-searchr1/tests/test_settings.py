"""What ``--plugin searchr1`` means, what the options may be, and rows of the paper's repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import slime_searchr1
from slime_core import RunPlan
from slime_core.cli.main import _resolve
from slime_core.config.load import Resolved
from slime_core.errors import ConfigError
from slime_searchr1 import plugin
from slime_searchr1.options import SearchOptions

MODEL = ("--hf-checkpoint", str(Path(slime_searchr1.__file__).parent / "world" / "model"))
"""The configuration alone is read."""


def resolved(line: str, *more: str) -> Resolved:
    return _resolve([*line.split(), *more])[0]


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    """Two rows in the form of nq_hotpotqa_train of the paper's repository."""
    rows = [
        {
            "id": f"train_{number}",
            "question": question,
            "golden_answers": answers,
            "data_source": source,
            "prompt": [{"role": "user", "content": f"Answer the given question. Question: {question}?\n"}],
            "ability": "fact-reasoning",
            "reward_model": {"ground_truth": {"target": answers}, "style": "rule"},
            "extra_info": {"index": number, "split": "train"},
            "metadata": None,
        }
        for number, (source, question, answers) in enumerate(
            [("nq", "total number of death row inmates in the us", ["2,718"]), ("hotpotqa", "who", ["A", "B"])]
        )
    ]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_name_of_the_plugin_chooses_how_to_generate_to_reward_and_to_read(paper: Path) -> None:
    config = resolved("--plugin searchr1", *MODEL, "--prompt-data", str(paper)).config
    assert config.algorithm.advantage_estimator == "grpo"
    assert (config.rollout.generate_function, config.rollout.rm_type) == ("search_r1", "search_r1")
    assert (config.rollout.reward_key, config.eval.eval_reward_key) == ("score", "exact_match")
    assert (config.data.label_key, config.data.apply_chat_template) == ("reward_model", True)


def test_what_is_given_stands_before_the_presets(paper: Path) -> None:
    line = "--plugin searchr1 --reward-key format --eval-reward-key score --label-key golden_answers"
    config = resolved(line, *MODEL, "--prompt-data", str(paper)).config
    assert (config.rollout.reward_key, config.eval.eval_reward_key) == ("format", "score")
    assert config.data.label_key == "golden_answers"


def test_rows_of_the_papers_repository_load_as_they_are(paper: Path) -> None:
    from slime_core.prompts.rows import Reading, numbered_prompts

    found = [row for _, row in numbered_prompts(paper, Reading(label_key="reward_model"))]
    assert [row.prompt for row in found][1] == [
        {"role": "user", "content": "Answer the given question. Question: who?\n"}
    ]
    assert json.loads(str(found[0].label)) == {"ground_truth": {"target": ["2,718"]}, "style": "rule"}


def test_the_reward_alone_counts_its_score() -> None:
    config = resolved("--plugin grpo --rm-type search_r1").config
    assert (config.rollout.generate_function, config.rollout.reward_key) == ("single_turn", "score")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--search-url localhost:8000", "--search-url is no address of a service"),
        ("--search-url http://me:pw@host/retrieve", "--search-url holds a password for host written out"),
        ("--search-url http://host/${NOT_SET}", "names the environment variable NOT_SET, which is not set"),
        ("--searchr1.corpus none.jsonl", "none.jsonl is no file"),
        ("--max-turns 1", "--max-turns 1 leaves no turn after a search; give 2 or more"),
        ("--searchr1.format-score 2", "--searchr1.format-score: found '2'; accepted: a number of at least 0"),
        ("--search-url http://host/retrieve --searchr1.corpus x.jsonl", "corpus"),
    ],
)
def test_bad_settings_are_refused_before_the_run(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        resolved("--plugin searchr1", *MODEL, *line.split())
    assert message in str(found.value)


def test_a_secret_in_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    options = SearchOptions(search_url="http://host/retrieve?key=${KEY}")
    assert list(plugin.slime_check(RunPlan(), options)) == []


def test_a_flag_of_the_plugin_alone_is_refused_with_what_activates_it() -> None:
    with pytest.raises(ConfigError, match="activate it with --plugin searchr1 or with --generate-function search_r1"):
        resolved("--plugin grpo --search-url http://host/retrieve")


def test_the_built_in_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="knows digits alone and cannot search; name a model with --hf-checkpoint"):
        resolved("--plugin searchr1")
