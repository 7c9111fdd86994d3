"""What ``--plugin searchr1`` means, bad settings, and rows of the paper's repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core import RunPlan
from slime_core.cli.activation import resolve
from slime_core.config.load import Resolved
from slime_core.errors import ConfigError
from slime_core.provisional import PromptRequest
from slime_datasets.rows import prompts_of
from slime_searchr1.options import SearchOptions
from slime_searchr1.plugin import WORLD, slime_check

MODEL = ("--hf-checkpoint", str(WORLD / "model"))
EXAMPLE = Path(__file__).parents[3] / "examples" / "search_r1" / "run.toml"


def resolved(line: str, *more: str) -> Resolved:
    return resolve([*line.split(), *more])[0]


@pytest.fixture
def paper(tmp_path: Path) -> tuple[str, str]:
    """``--prompt-data`` with a row in the form of nq_hotpotqa_train of the paper's repository."""
    row = {
        "id": "train_0",
        "question": "who",
        "golden_answers": ["A", "B"],
        "data_source": "hotpotqa",
        "prompt": [{"role": "user", "content": "Answer the given question. Question: who?\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": ["A", "B"]}, "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
        "metadata": None,
    }
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return "--prompt-data", str(path)


def test_the_name_of_the_plugin_chooses_how_to_generate_to_reward_and_to_read(paper) -> None:
    config = resolved("--plugin searchr1", *MODEL, *paper).config
    assert config.algorithm.advantage_estimator == "grpo"
    assert (config.rollout.generate_function, config.rollout.rm_type) == ("search_r1", "search_r1")
    assert (config.rollout.reward_key, config.eval.eval_reward_key) == ("score", "exact_match")
    assert (config.data.label_key, config.data.apply_chat_template) == ("reward_model", True)
    # Another model and other prompts have none of the invented world's settings.
    plain = resolved("--plugin grpo", *MODEL, *paper).config
    assert (config.optimizer, config.eval.files) == (plain.optimizer, ())
    assert config.rollout.num_rollout == plain.rollout.num_rollout


def test_settings_of_the_user_override_the_presets(paper) -> None:
    line = "--plugin searchr1 --reward-key format --eval-reward-key score --label-key golden_answers"
    config = resolved(line, *MODEL, *paper).config
    assert (config.rollout.reward_key, config.eval.eval_reward_key) == ("format", "score")
    assert config.data.label_key == "golden_answers"


def test_rows_of_the_papers_repository_load_as_they_are(paper) -> None:
    ((_, row),) = prompts_of(PromptRequest(Path(paper[1]), label_key="reward_model"))
    assert row.prompt == [{"role": "user", "content": "Answer the given question. Question: who?\n"}]
    assert json.loads(str(row.label)) == {"ground_truth": {"target": ["A", "B"]}, "style": "rule"}


def test_the_reward_alone_counts_its_score() -> None:
    config = resolved("--plugin grpo --rm-type search_r1").config
    assert (config.rollout.generate_function, config.rollout.reward_key) == ("single_turn", "score")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (f"{' '.join(MODEL)} --search-url localhost:8000", "--search-url"),
        (f"{' '.join(MODEL)} --search-url http://me:pw@host/retrieve", "--search-url"),
        (f"{' '.join(MODEL)} --search-url http://host/${{NOT_SET}}", "NOT_SET"),
        (f"{' '.join(MODEL)} --searchr1.corpus none.jsonl", "none.jsonl"),
        (f"{' '.join(MODEL)} --max-turns 1", "--max-turns"),
        (f"{' '.join(MODEL)} --searchr1.format-score 2", "--searchr1.format-score"),
        (f"{' '.join(MODEL)} --search-url http://host/retrieve --searchr1.corpus x.jsonl", "corpus"),
        (f"--prompt-data {WORLD}/data/train.jsonl", "--hf-checkpoint"),
        ("--generate-function single_turn --search-url http://127.0.0.1:1/retrieve", "--search-url"),
        ("--generate-function single_turn --searchr1.topk 5", "--searchr1.topk"),
    ],
)
def test_bad_settings_are_refused_before_the_run(line: str, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        resolved("--plugin searchr1", *line.split())


def test_a_secret_in_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "secret")
    options = SearchOptions(search_url="http://host/retrieve?key=${KEY}")
    assert list(slime_check(RunPlan(), options)) == []


# --- The invented world -----------------------------------------------------------------------------------------------


def test_the_name_of_the_plugin_alone_is_the_example() -> None:
    alone = resolved("--plugin searchr1")
    assert alone.config.model.hf_checkpoint == WORLD / "model"
    assert alone.config.data.prompt_data == WORLD / "data" / "train.jsonl"
    assert [dataset.path for dataset in alone.config.eval.eval_datasets] == [WORLD / "data" / "held_out.jsonl"]
    assert str(alone.provenance["hf_checkpoint"]) == "preset of plugin searchr1"
    example = resolved("--config", str(EXAMPLE))
    assert (example.config, example.plugin_options) == (alone.config, alone.plugin_options)


def test_settings_of_the_built_in_world_can_be_overridden() -> None:
    config = resolved("--plugin searchr1 --lr 1e-6 --num-rollout 3 --no-eval").config
    assert (config.optimizer.lr, config.rollout.num_rollout, config.eval.files) == (1e-6, 3, ())
    prompts = str(WORLD / "data" / "train.jsonl")
    config = resolved("--plugin searchr1 --eval-interval 7 --eval-prompt-data mine", prompts).config
    assert (config.eval.eval_interval, [name for name, _ in config.eval.files]) == (7, ["mine"])
    config = resolved("--plugin searchr1 --eval-prompt-data none --eval-interval none").config
    assert (config.eval.eval_interval, config.eval.files, config.eval.eval_datasets) == (None, (), ())
