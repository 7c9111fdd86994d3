"""The rules between settings: each broken once, and silent where its settings were broken before."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load
from slime_core.errors import ConfigError

PRODUCT = "rollout_batch_size x n_samples_per_prompt = 32 x 8 = 256"
HERE = Path.cwd()


def broken_rules(line: str, **options: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config, **options)]  # type: ignore[arg-type]


def test_the_embedded_run_breaks_no_rule() -> None:
    assert broken_rules("") == []


@pytest.mark.parametrize(
    ("line", "start"),
    [
        (
            "--global-batch-size 100 --num-steps-per-rollout 2",
            f"{PRODUCT}, but global_batch_size x num_steps_per_rollout = 100 x 2 = 200; they must be equal",
        ),
        ("--global-batch-size 100", f"{PRODUCT}, which global_batch_size = 100 does not divide"),
        ("--num-steps-per-rollout 3", f"{PRODUCT}, which num_steps_per_rollout = 3 does not"),
        ("--rollout-batch-size 1 --n-samples-per-prompt 2 --actor-num-nodes 3", "2 samples an optimizer step, for 3 "),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "rollout_num_gpus = 3 is no multiple of"),
        ("--sglang-context-length 5 --rollout-max-response-len 5", "sglang_context_length = 5 has no room for"),
        ("--corrections tis tis", "corrections: tis is named 2 times, and its weights would be multiplied; name it"),
        (
            "--rollout-max-response-len 128",
            "rollout_max_response_len = 128, but the model reads at most max_position_embeddings = 128 tokens",
        ),
        ("--eval-max-response-len 500", "eval_max_response_len = 500, but the model reads at most"),
        ("--min-lr 1 --lr 0.5", "min_lr = 1.0 is above lr = 0.5"),
        ("--lr-decay-iters 5 --lr-warmup-iters 5", "lr_decay_iters = 5 must be above lr_warmup_iters = 5"),
        ("--wait-fail-s 5", "wait_warn_s = 60 is above wait_fail_s = 5"),
        (
            "--rollout-max-response-len 8 --prompt-data missing.jsonl",
            f"prompt_data: {HERE}/missing.jsonl does not exist; accepted: a prompt file",
        ),
        ("--eval-prompt-data aime missing.jsonl", f"eval_prompt_data aime: {HERE}/missing.jsonl does not exist"),
        ("--hf-checkpoint missing", f"hf_checkpoint: {HERE}/missing is no folder; accepted: a Hugging Face"),
        ("--use-kl-loss --ref-load .", f"ref_load: {HERE} holds no config.json; accepted: a Hugging Face folder"),
        ("--load missing", f"load: {HERE}/missing is no folder; accepted: a run folder"),
        ("--output-dir /dev/null/run", "output_dir: /dev/null is a file, so /dev/null/run cannot be a folder"),
    ],
)
def test_a_broken_rule_shows_the_numbers_and_the_way_out(line: str, start: str) -> None:
    (message,) = broken_rules(line)
    assert message.startswith(start)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "is no JSON object"),
        ("[]", "is no JSON object"),
        ("{}", "names no architecture"),
        ('{"architectures": []}', "names no architecture"),
        ('{"architectures": "Qwen3ForCausalLM"}', "names no architecture"),
    ],
)
def test_a_config_json_that_names_no_architecture_is_a_mistake(text: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    (message,) = broken_rules(f"--hf-checkpoint {tmp_path}")
    assert message.startswith(f"hf_checkpoint: {tmp_path}/config.json {found}; accepted: a Hugging Face folder")


@pytest.mark.parametrize(
    "more", ["", ', "max_position_embeddings": null', ', "max_position_embeddings": 8, "rope_scaling": {"factor": 4}']
)
def test_where_it_is_not_known_how_far_the_model_reads_any_length_may_be_asked(more: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": ["Qwen3ForCausalLM"]{more}}}')
    assert broken_rules(f"--hf-checkpoint {tmp_path} --rollout-max-response-len 5000") == []


@pytest.mark.parametrize(("line", "count"), [("", 1), ("--eval-max-response-len 8", 0)])
def test_an_evaluation_looks_at_the_length_it_uses(line: str, count: int) -> None:
    assert len(broken_rules(f"--rollout-max-response-len 128 {line}", purpose="eval")) == count


def test_two_evaluation_files_of_one_name_are_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.touch()
    (message,) = broken_rules(f"--eval-prompt-data a {file} a {file}")
    assert message == "eval_prompt_data: 2 files are named 'a'; metrics carry the name, each needs its own"


def test_a_run_without_an_estimator_is_told_which_plugin_has_one() -> None:
    with pytest.raises(ConfigError, match=r"1 mistake in the settings:\n  - advantage_estimator: .*--plugin grpo"):
        load([])


def test_an_evaluation_needs_data_but_no_estimator() -> None:
    assert load([], purpose="eval").config.algorithm.advantage_estimator is None
    with pytest.raises(ConfigError, match="nothing to evaluate on"):
        load(["--eval-prompt-data", "none"], purpose="eval")


def test_a_rule_is_silent_where_a_setting_it_reads_was_already_wrong() -> None:
    with pytest.raises(ConfigError, match="1 mistake in the settings") as caught:
        load(["--advantage-estimator", "toy", "--global-batch-size", "much", "--num-steps-per-rollout", "3"])
    assert "--global-batch-size: found 'much'" in str(caught.value)


def test_rules_and_other_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError, match="3 mistakes in the settings"):
        load(["--lr", "fast", "--rollout-sise", "3", "--kl-loss-coef", "1", "--advantage-estimator", "toy"])
