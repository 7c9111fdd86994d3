"""What a row needs to be rewarded: checked with file and line before anything starts, and again when rows are read."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from slime_core.cli.activation import resolve
from slime_core.cli.labels import LabelSamples, check_labels
from slime_core.cli.preflight import check_files
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.plugins.construction import prompt_formats, run_view
from slime_core.prompts.numbered import Held
from slime_core.prompts.requests import training_request
from slime_core.prompts.row_checks import RowChecks

WORDS = ("--plugin", "grpo", "--plugin", "rewards", "--rollout-max-response-len", "8")


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1+1=", **row}) + "\n" for row in rows), encoding="utf-8")
    return path


def check(path: Path, line: str) -> list[str]:
    found, active = resolve([*WORDS, "--prompt-data", str(path), *line.split()])
    return check_files(found.config, active.registry, trains=True, options=found.plugin_options)


def refusal(path: Path, line: str) -> str:
    with pytest.raises(DataError) as caught:
        check(path, line)
    return str(caught.value)


NULL, GOOD = {"label": None}, {"label": "4"}
INSTRUCTIONS = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


@pytest.mark.parametrize("label", [None, "", " \t\n"], ids=repr)
@pytest.mark.parametrize(
    "reward", ["math", "boxed_math", "deepscaler", "dapo --reward-key acc", "f1", "gpqa", "exact_match"]
)
def test_labels_that_are_null_or_empty_are_refused_as_a_missing_field_is(tmp_path: Path, label, reward):
    assert "rows.jsonl, line 1: reward model" in refusal(write(tmp_path, {"label": label}), f"--rm-type {reward}")


def test_a_row_without_a_label_among_others_is_refused_or_left_out(tmp_path: Path):
    path = write(tmp_path, GOOD, NULL, GOOD, NULL)
    assert "line 2: reward model 'math'" in refusal(path, "--rm-type math")
    assert [message.partition(": ")[0] for message in check(path, "--rm-type math --on-bad-data skip")] == [
        f"{path}, line 2",
        f"{path}, line 4",
    ]


def test_rows_without_any_label_are_refused_even_if_bad_rows_are_left_out(tmp_path: Path):
    message = refusal(write(tmp_path, NULL, NULL), "--rm-type math --on-bad-data skip")
    assert "none of the 2 rows" in message
    assert "line 1: reward model 'math'" in message


@pytest.mark.parametrize(
    ("reward", "name"),
    [("0.7*math+0.3*f1", "math"), ("0.5*ifeval+0.5*f1", "ifeval"), ("1*gpqa - 0.1*dapo:acc", "gpqa")],
)
def test_every_part_of_a_sum_is_asked(tmp_path: Path, reward: str, name: str):
    found, active = resolve([*WORDS, "--prompt-data", str(write(tmp_path, NULL)), "--rm-type", reward])
    with pytest.raises(DataError, match=f"line 1: reward model '{name}'"):
        check_files(found.config, active.registry, trains=True, options=found.plugin_options)


def test_a_row_is_asked_for_what_its_own_reward_model_needs(tmp_path: Path):
    rows = [{**NULL, "metadata": {"rm_type": "ifeval", **INSTRUCTIONS}}, {**GOOD, "metadata": {"rm_type": "math"}}]
    assert check(write(tmp_path, *rows), "--rm-type math") == []
    path = write(tmp_path, *rows, {**NULL, "metadata": {"rm_type": "0.5*math+0.5*random"}})
    assert "line 3: reward model 'math'" in refusal(path, "--rm-type random")


@pytest.mark.parametrize("reward", ["random", "ifeval", "remote_rm --rm-url http://127.0.0.1:1/x"])
def test_reward_models_that_compare_with_no_label_need_none(tmp_path: Path, reward: str):
    assert check(write(tmp_path, {**NULL, "metadata": INSTRUCTIONS}), f"--rm-type {reward}") == []


@pytest.mark.parametrize("label", ["E=mc^2", "12", "K", 3, True])
def test_a_label_that_is_no_letter_is_refused_for_multiple_choice(tmp_path: Path, label):
    assert "line 1: reward model 'gpqa'" in refusal(write(tmp_path, {"label": label}), "--rm-type gpqa")


@pytest.mark.parametrize("label", ["A", " (c) ", "**J**"])
def test_a_letter_is_a_label_of_multiple_choice(tmp_path: Path, label):
    assert check(write(tmp_path, {"label": label}), "--rm-type gpqa") == []


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"instruction_id_list": []},
        {"instruction_id_list": ["no:such"]},
        {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{}]},
    ],
)
@pytest.mark.parametrize("reward", ["ifeval", "ifbench", "instructions --reward-key strict"])
def test_instructions_that_cannot_be_checked_are_refused(tmp_path: Path, metadata, reward: str):
    path = write(tmp_path, {"label": "1", "metadata": metadata})
    assert "line 1: reward model" in refusal(path, f"--rm-type {reward}")


VERL = {"style": "rule", "ground_truth": "72"}


def test_an_object_is_no_label_of_mathematics_and_its_fields_are_named(tmp_path: Path):
    path = write(tmp_path, {"reward_model": VERL, "extra_info": {"split": "train", "answer": "so 72"}})
    message = refusal(path, "--rm-type math --label-key reward_model")
    assert "line 1" in message
    assert "reward_model.ground_truth" in message
    assert check(path, "--rm-type math --label-key reward_model.ground_truth") == []
    assert check(path, "--rm-type f1 --label-key extra_info.answer") == []
    assert "reward_model.ground_truth" in refusal(path, "--rm-type math --label-key reward_model.truth")


def test_a_list_is_no_label_of_mathematics_and_its_entry_is_named(tmp_path: Path):
    path = write(tmp_path, {"final_answer": ["$2$", "$3$"]})
    assert "final_answer.0" in refusal(path, "--rm-type math --label-key final_answer")
    assert check(path, "--rm-type math --label-key final_answer.0") == []


@pytest.mark.parametrize("label", ["[1, 2)", "{1, 2}", "[1, 2]", 72, 0, 0.5, False, "false"])
def test_text_numbers_and_booleans_are_labels(tmp_path: Path, label):
    assert check(write(tmp_path, {"label": label}), "--rm-type exact_match") == []


def test_rewards_that_take_json_keep_taking_it(tmp_path: Path):
    path = write(tmp_path, {"answers": ["Lemen", "Fador"], "reward_model": {"ground_truth": {"target": ["x"]}}})
    words = f"--plugin searchr1 --rm-type search_r1 --reward-key score --hf-checkpoint {ARITHMETIC / 'model'}"
    assert check(path, f"{words} --label-key answers") == []
    assert check(path, f"{words} --label-key reward_model") == []
    empty = write(tmp_path, {"reward_model": {"ground_truth": {"target": []}}})
    assert "line 1: reward model 'search_r1'" in refusal(empty, f"{words} --label-key reward_model")


def test_evaluation_sets_are_asked_for_what_their_reward_models_need(tmp_path: Path):
    mine = tmp_path / "set.toml"
    path = write(tmp_path, NULL)
    settings = '[[eval.eval_datasets]]\nname = "mine"\npath = "rows.jsonl"\nrm_type = '
    for reward, is_refused in (("math", True), ("random", False)):
        mine.write_text(f'[eval]\neval_interval = 1\n{settings}"{reward}"\n')
        found, active = resolve([*WORDS, "--config", str(mine), "--rm-type", "random"])
        if is_refused:
            with pytest.raises(DataError, match=f"{path}, line 1: reward model 'math'"):
                check_files(found.config, active.registry, trains=True, options=found.plugin_options)
        else:
            check_files(found.config, active.registry, trains=True, options=found.plugin_options)


def test_answers_that_come_from_the_labels_need_labels(tmp_path: Path):
    line = "--advantage-estimator sft --rm-type zero --generate-function from_label --n-samples-per-prompt 1"
    line += " --parity-interval 0"
    assert "line 1: generate function 'from_label'" in refusal(write(tmp_path, NULL), line)
    assert check(write(tmp_path, GOOD), line) == []


def test_a_generate_function_that_gives_rewards_needs_no_label(tmp_path: Path):
    path = write(tmp_path, {**NULL, "metadata": {"generate_function": "from_buffer"}})
    assert check(path, "--plugin datasets --rm-type math") == []


def test_a_row_that_is_met_later_is_refused_or_left_out(tmp_path: Path):
    path = write(tmp_path, *[GOOD] * 3, NULL)
    for words, is_refused in (("", True), ("--on-bad-data skip", False)):
        found, active = resolve([*WORDS, "--rm-type", "math", "--prompt-data", str(path), *words.split()])
        config, registry = found.config, active.registry
        formats = prompt_formats(registry, found.plugin_options, run_view(config))
        request = training_request(config, path, RowChecks.of(config, registry), formats)
        if is_refused:
            with pytest.raises(DataError, match="line 4: reward model 'math'"):
                Held(request)
        else:
            assert len(Held(request)) == 3


# --- Columns ----------------------------------------------------------------------------------------------------------


def parquet(folder: Path, **columns: list[Any]) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["1+1="] * len(next(iter(columns.values()))), **columns}), path)
    return path


def test_nulls_and_nan_of_a_column_are_no_labels(tmp_path: Path):
    words = "--plugin datasets --rm-type math"
    assert "row 2: reward model 'math'" in refusal(parquet(tmp_path, label=["4", None]), words)
    assert "row 1: field 'label' holds nan" in refusal(parquet(tmp_path, label=[float("nan"), 4.0]), words)
    assert check(parquet(tmp_path, label=[Decimal("4.50"), Decimal("1.00")]), words) == []
    assert check(parquet(tmp_path, label=[date(2024, 1, 2)]), "--plugin datasets --rm-type f1") == []


def test_a_path_leads_into_the_structs_of_a_column(tmp_path: Path):
    path = parquet(tmp_path, reward_model=[VERL, None], extra_info=[{"answer": "72"}, {"answer": "5"}])
    words = "--plugin datasets --rm-type math --label-key"
    assert check(path, f"{words} extra_info.answer") == []
    assert "row 2: reward model 'math'" in refusal(path, f"{words} reward_model.ground_truth")
    assert "reward_model.ground_truth" in refusal(path, f"{words} reward_model")


# --- Keys that no row has ---------------------------------------------------------------------------------------------

FUNCTIONS = {"label": "4", "functions": [{"type": "function", "function": {"name": "add"}}]}


@pytest.mark.parametrize("flag", ["--tool-key tools", "--metadata-key about", "--tool-key functions.0.tools"])
def test_a_key_that_no_row_has_is_refused(tmp_path: Path, flag: str):
    message = refusal(write(tmp_path, FUNCTIONS, FUNCTIONS), f"--rm-type math {flag}")
    assert flag.split()[0] in message
    assert "functions" in message


def test_rows_may_lack_a_key_that_others_have(tmp_path: Path):
    rows = [GOOD, FUNCTIONS, {**GOOD, "about": {}}]
    assert check(write(tmp_path, *rows), "--rm-type math --tool-key functions --metadata-key about") == []
    assert check(write(tmp_path, GOOD), "--rm-type math") == []


def test_a_file_of_a_mix_may_lack_a_key_that_another_has(tmp_path: Path):
    with_tools, without = write(tmp_path, FUNCTIONS), tmp_path / "others.jsonl"
    without.write_text(json.dumps({"prompt": "2+2=", **GOOD}) + "\n")
    words = ["--plugin", "datasets", "--rm-type", "math", "--prompt-mix", str(without), "1", str(with_tools), "1"]
    for key, is_refused in (("functions", False), ("tools", True)):
        found, active = resolve([*WORDS, *words, "--tool-key", key])
        if is_refused:
            with pytest.raises(DataError, match="tool_key"):
                check_files(found.config, active.registry, trains=True, options=found.plugin_options)
        else:
            check_files(found.config, active.registry, trains=True, options=found.plugin_options)


# --- Labels against themselves ----------------------------------------------------------------------------------------


def scored(path: Path, line: str) -> list[str]:
    """The warnings of the check of the labels."""
    found, active = resolve([*WORDS, "--prompt-data", str(path), *line.split()])
    labels, warnings = LabelSamples(), list[str]()
    check_files(found.config, active.registry, trains=True, options=found.plugin_options, labels=labels)
    options = found.plugin_options
    check_labels(labels, found.config, active.registry, active.manifest, options=options, warn=warnings.append)
    return warnings


@pytest.mark.parametrize(
    "reward", ["math", "boxed_math", "deepscaler", "dapo --reward-key score", "0.5*math+0.5*dapo:acc", "f1", "gpqa"]
)
def test_labels_that_all_score_against_themselves_are_right(tmp_path: Path, reward: str):
    labels = ["A", "B"] * 200 if reward == "gpqa" else ["\\frac{1}{2}", "x^2+1", *map(str, range(400))]
    assert scored(write(tmp_path, *[{"label": label} for label in labels]), f"--rm-type {reward}") == []


OTHERS = """
import time
from slime_core import Component, hookimpl

@hookimpl
def slime_register_reward_models():
    yield Component("words", target=f"{__name__}:Words")
    yield Component("several", target=f"{__name__}:Several")

class Words:
    def __init__(self, options, run): pass

    @staticmethod
    def perfect_response(label): return label

    async def score(self, samples):
        while samples[0].label == "endless": time.sleep(0.1)
        if samples[0].label == "broken": raise ValueError("no such label")
        return [float(sample.response.split() == [sample.label]) for sample in samples]

class Several(Words):
    async def score(self, samples):
        return [{"acc": one, "form": 1.0} for one in await super().score(samples)]
"""


def warned(folder: Path, reward: str, *labels: str) -> str:
    (folder / "mine.py").write_text(OTHERS)
    (warning,) = scored(write(folder, *[{"label": label} for label in labels]), f"--plugin {folder}/mine.py {reward}")
    return warning


@pytest.mark.parametrize(
    "reward", ["--rm-type words", "--rm-type several --reward-key acc", "--rm-type 0.5*f1+0.5*several:acc"]
)
def test_labels_that_do_not_score_against_themselves_are_counted_and_named(tmp_path: Path, reward: str):
    warning = warned(tmp_path, reward, "a", "two words", "b", "a", "two words", "broken")
    assert "3 of 6 labels" in warning
    assert all(part in warning for part in ("line 2: 'two words'", "line 5", "line 6: 'broken'", "no such label"))


def test_the_number_that_counts_decides(tmp_path: Path):
    (tmp_path / "mine.py").write_text(OTHERS)
    path = write(tmp_path, {"label": "two words"})
    assert scored(path, f"--plugin {tmp_path}/mine.py --rm-type several --reward-key form") == []


def test_a_label_that_hangs_its_reward_model_is_named_and_the_others_are_scored(tmp_path: Path):
    warning = warned(tmp_path, "--rm-type words", "a", "endless", "b")
    assert "1 of 3 labels" in warning
    assert "line 2: 'endless'" in warning


def test_a_file_is_not_refused_because_its_labels_take_long(tmp_path: Path):
    assert "1 of 1 labels" in warned(tmp_path, "--rm-type words", "endless")


def test_a_file_without_a_label_that_scores_against_itself_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="none of the 2 labels"):
        warned(tmp_path, "--rm-type words", "two words", "three more words")


def test_a_label_that_no_answer_can_hold_scores_nothing_against_itself(tmp_path: Path):
    with pytest.raises(DataError, match="none of the 1 labels"):
        scored(write(tmp_path, {"label": "x^{2"}), "--rm-type boxed_math")
