"""What ``--plugin searchr1`` means, what the options may be, and rows of the paper's repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core import PromptRequest, RunPlan
from slime_core.cli.activation import resolve
from slime_core.config.load import Resolved
from slime_core.errors import ConfigError
from slime_searchr1 import plugin
from slime_searchr1.options import SearchOptions

WORLD = plugin.WORLD
MODEL = ("--hf-checkpoint", str(WORLD / "model"))
EXAMPLE = Path(__file__).parents[3] / "examples" / "search_r1" / "run.toml"


def resolved(line: str, *more: str) -> Resolved:
    return resolve([*line.split(), *more])[0]


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


def test_given_settings_override_the_presets(paper: Path) -> None:
    line = "--plugin searchr1 --reward-key format --eval-reward-key score --label-key golden_answers"
    config = resolved(line, *MODEL, "--prompt-data", str(paper)).config
    assert (config.rollout.reward_key, config.eval.eval_reward_key) == ("format", "score")
    assert config.data.label_key == "golden_answers"


def test_rows_of_the_papers_repository_load_as_they_are(paper: Path) -> None:
    from slime_core.prompts.rows import numbered_prompts

    found = [row for _, row in numbered_prompts(PromptRequest(paper, label_key="reward_model"))]
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
        ("--search-url localhost:8000", "--search-url"),
        ("--search-url http://me:pw@host/retrieve", "--search-url"),
        ("--search-url http://host/${NOT_SET}", "variable NOT_SET"),
        ("--searchr1.corpus none.jsonl", "none.jsonl"),
        ("--max-turns 1", "--max-turns 1"),
        ("--searchr1.format-score 2", "--searchr1.format-score: found '2'"),
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
    with pytest.raises(ConfigError, match="--plugin searchr1"):
        resolved("--plugin grpo --search-url http://host/retrieve")


def test_prompts_without_a_model_are_refused(paper: Path) -> None:
    with pytest.raises(ConfigError, match="--hf-checkpoint FOLD"):
        resolved("--plugin searchr1 --prompt-data", str(paper))


def test_the_name_of_the_plugin_alone_is_the_example() -> None:
    alone = resolved("--plugin searchr1")
    assert alone.config.model.hf_checkpoint == WORLD / "model"
    assert alone.config.data.prompt_data == WORLD / "data" / "train.jsonl"
    assert [one.path for one in alone.config.eval.eval_datasets] == [WORLD / "data" / "held_out.jsonl"]
    assert str(alone.provenance["hf_checkpoint"]) == "preset of plugin searchr1"
    example = resolved("--config", str(EXAMPLE))
    assert (example.config, example.plugin_options) == (alone.config, alone.plugin_options)


def test_settings_of_the_built_in_world_can_be_overridden() -> None:
    config = resolved("--plugin searchr1 --lr 1e-6 --num-rollout 3 --no-eval").config
    assert (config.optimizer.lr, config.rollout.num_rollout, config.eval.files) == (1e-6, 3, ())
    config = resolved(
        "--plugin searchr1 --eval-interval 7 --eval-prompt-data own", str(WORLD / "data" / "train.jsonl")
    ).config
    assert (config.eval.eval_interval, [name for name, _ in config.eval.files]) == (7, ["own"])
    config = resolved("--plugin searchr1 --eval-prompt-data none --eval-interval none").config
    assert (config.eval.eval_interval, config.eval.files, config.eval.eval_datasets) == (None, (), ())


def test_another_model_has_none_of_the_worlds_settings(paper: Path) -> None:
    config = resolved("--plugin searchr1", *MODEL, "--prompt-data", str(paper)).config
    plain = resolved("--plugin grpo", *MODEL, "--prompt-data", str(paper)).config
    assert (config.optimizer, config.eval.files) == (plain.optimizer, ())
    assert config.rollout.num_rollout == plain.rollout.num_rollout


def test_a_retriever_that_nothing_searches_is_refused() -> None:
    for flag in ("--search-url http://127.0.0.1:1/retrieve", "--searchr1.topk 5"):
        with pytest.raises(ConfigError, match="generate_function = single_turn"):
            resolved(f"--plugin searchr1 --generate-function single_turn {flag}", *MODEL)
