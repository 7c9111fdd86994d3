"""What a row needs to be rewarded: checked with file and line before anything starts, and again when rows are read."""

from __future__ import annotations

import json
import re
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
from slime_core.rollout.prompt_filter import training_request
from slime_core.rollout.row_checks import RowChecks
from slime_datasets.numbered import InMemory

WORDS = ("--plugin", "grpo", "--plugin", "rewards", "--rollout-max-response-len", "8")


def write(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"prompt": "1+1=", **row}) + "\n" for row in rows), encoding="utf-8")
    return path


def check(path: Path | None, line: str, labels: LabelSamples | None = None) -> list[str]:
    """The warnings of the check before a run, with those about ``labels``."""
    data = [] if path is None else ["--prompt-data", str(path)]
    settings, active = resolve([*WORDS, *data, *line.split()])
    options = settings.plugin_options
    warnings = check_files(settings.config, active.registry, trains=True, options=options, labels=labels)
    if labels is not None:
        check_labels(labels, settings.config, active.registry, active.manifest, options=options, warn=warnings.append)
    return warnings


def check_refused(path: Path | None, line: str, *parts: str) -> None:
    with pytest.raises(DataError) as caught:
        check(path, line)
    assert [part for part in parts if part not in str(caught.value)] == []


NULL, GOOD = {"label": None}, {"label": "4"}
INSTRUCTIONS = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
NO_NUMBER = {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{}]}
VERL = {"reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {"split": "train", "answer": "so 72"}}
TOOLS = {"label": "4", "functions": [{"type": "function", "function": {"name": "add"}}]}
SFT = "--advantage-estimator sft --rm-type zero --generate-function from_label --n-samples-per-prompt 1"
SFT += " --parity-interval 0"
COMPARING = ("math", "boxed_math", "deepscaler", "dapo --reward-key acc", "f1", "gpqa", "exact_match")
FOLLOWING = ("ifeval", "ifbench", "instructions --reward-key strict")


@pytest.mark.parametrize(
    ("row", "line", "named"),
    [
        *((NULL, f"--rm-type {reward}", "reward model") for reward in COMPARING),
        *(({"label": label}, "--rm-type math", "reward model 'math'") for label in ("", " \t\n", VERL, ["$2$", "$3$"])),
        *(({"label": label}, "--rm-type gpqa", "reward model 'gpqa'") for label in ("E=mc^2", "12", "K", 3, True)),
        *(
            ({"label": "1", "metadata": {} if metadata is None else metadata}, f"--rm-type {reward}", "reward model")
            for metadata in (None, {"instruction_id_list": []}, {"instruction_id_list": ["no:such"]}, NO_NUMBER)
            for reward in FOLLOWING
        ),
        # Each part of a sum, and the reward model that a row names.
        (NULL, "--rm-type 0.7*math+0.3*f1", "reward model 'math'"),
        (NULL, "--rm-type 0.5*ifeval+0.5*f1", "reward model 'ifeval'"),
        (NULL, "--rm-type 1*gpqa-0.1*dapo:acc", "reward model 'gpqa'"),
        ({**NULL, "metadata": {"rm_type": "0.5*math+0.5*random"}}, "--rm-type random", "reward model 'math'"),
        (NULL, SFT, "generate function 'from_label'"),
        # Fields inside a label that is no text are named.
        (VERL, "--rm-type math --label-key reward_model", "--label-key"),
        ({"answers": ["$2$", "$3$"]}, "--rm-type math --label-key answers", "--label-key"),
    ],
)
def test_a_row_that_cannot_be_rewarded_is_refused(tmp_path: Path, row: dict[str, Any], line: str, named: str) -> None:
    check_refused(write(tmp_path, row), line, "rows.jsonl, line 1: ", named)


SEARCH = f"--plugin searchr1 --advantage-estimator grpo --hf-checkpoint {ARITHMETIC / 'model'} --label-key"


@pytest.mark.parametrize(
    ("row", "line"),
    [
        *(
            ({**NULL, "metadata": INSTRUCTIONS}, f"--rm-type {reward}")
            for reward in ("random", "ifeval", "remote_rm --rm-url http://127.0.0.1:1/x")
        ),
        *(({"label": label}, "--rm-type gpqa") for label in ("A", " (c) ", "**J**")),
        *(({"label": label}, "--rm-type exact_match") for label in ("[1, 2)", "{1, 2}", 72, 0, 0.5, False, "false")),
        ({**NULL, "metadata": {"rm_type": "ifeval", **INSTRUCTIONS}}, "--rm-type math"),
        ({**NULL, "metadata": {"generate_function": "from_buffer"}}, "--plugin datasets --rm-type math"),
        (GOOD, SFT),
        (VERL, "--rm-type math --label-key reward_model.ground_truth"),
        (VERL, "--rm-type f1 --label-key extra_info.answer"),
        ({"answers": ["$2$", "$3$"]}, "--rm-type math --label-key answers.0"),
        ({"answers": ["Lemen", "Fador"]}, f"{SEARCH} answers"),
        ({"reward_model": {"ground_truth": {"target": ["x"]}}}, f"{SEARCH} reward_model"),
    ],
)
def test_a_row_that_can_be_rewarded_is_accepted(tmp_path: Path, row: dict[str, Any], line: str) -> None:
    assert check(write(tmp_path, row), line) == []


def test_a_key_that_leads_nowhere_and_an_empty_list_of_answers_are_refused(tmp_path: Path) -> None:
    key = "--rm-type math --label-key reward_model.truth"
    check_refused(write(tmp_path, VERL), key, "reward_model")
    empty = {"reward_model": {"ground_truth": {"target": []}}}
    check_refused(write(tmp_path, empty), f"{SEARCH} reward_model", "line 1: reward model 'search_r1'")


def test_rows_without_a_label_are_refused_or_left_out_unless_all_are(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, NULL, GOOD, NULL)
    check_refused(path, "--rm-type math", "line 2: reward model 'math'")
    warnings = check(path, "--rm-type math --on-bad-data skip")
    assert [warning.partition(": ")[0] for warning in warnings] == [f"{path}, line 2", f"{path}, line 4"]
    path = write(tmp_path, NULL, NULL)
    check_refused(path, "--rm-type math --on-bad-data skip", "line 1: reward model 'math'")


def test_evaluation_sets_are_checked_for_their_reward_models(tmp_path: Path) -> None:
    path, config = write(tmp_path, NULL), tmp_path / "set.toml"
    for reward in ("random", "math"):
        table = f'[[eval.eval_datasets]]\nname = "mine"\npath = "rows.jsonl"\nrm_type = "{reward}"\n'
        config.write_text(f"[eval]\neval_interval = 1\n{table}")
        if reward == "random":
            check(None, f"--config {config} --rm-type random")
    check_refused(None, f"--config {config} --rm-type random", f"{path}, line 1: reward model 'math'")


@pytest.mark.parametrize("skips", [False, True])
def test_a_row_that_is_read_later_is_refused_or_left_out(tmp_path: Path, skips: bool) -> None:
    path = write(tmp_path, *[GOOD] * 3, NULL)
    words = ["--rm-type", "math", "--prompt-data", str(path), *(["--on-bad-data", "skip"] if skips else [])]
    settings, active = resolve([*WORDS, *words])
    checks = RowChecks.of(settings.config, active.registry)
    request = training_request(settings.config, path, checks)
    if skips:
        assert len(InMemory(request)) == 3
    else:
        with pytest.raises(DataError, match="line 4: reward model 'math'"):
            InMemory(request)


# --- Columns ----------------------------------------------------------------------------------------------------------


def parquet(folder: Path, **columns: list[Any]) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = folder / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["1+1="] * len(next(iter(columns.values()))), **columns}), path)
    return path


def test_nulls_and_nan_of_a_column_are_no_labels(tmp_path: Path) -> None:
    words = "--plugin datasets --rm-type math"
    check_refused(parquet(tmp_path, label=["4", None]), words, "row 2: reward model 'math'")
    check_refused(parquet(tmp_path, label=[float("nan"), 4.0]), words, "row 1: field 'label' holds nan")
    assert check(parquet(tmp_path, label=[Decimal("4.50"), Decimal("1.00")]), words) == []
    assert check(parquet(tmp_path, label=[date(2024, 1, 2)]), "--plugin datasets --rm-type f1") == []


def test_a_path_leads_into_the_structs_of_a_column(tmp_path: Path) -> None:
    path = parquet(tmp_path, reward_model=[VERL["reward_model"], None], extra_info=[{"answer": "72"}, {"answer": "5"}])
    words = "--plugin datasets --rm-type math --label-key"
    assert check(path, f"{words} extra_info.answer") == []
    check_refused(path, f"{words} reward_model.ground_truth", "row 2: reward model 'math'")
    check_refused(path, f"{words} reward_model", "row 1: reward model 'math'")


# --- Keys that no row has ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--tool-key tools", "--metadata-key about", "--tool-key functions.0.tools"])
def test_a_key_that_no_row_has_is_refused(tmp_path: Path, flag: str) -> None:
    check_refused(write(tmp_path, TOOLS, TOOLS), f"--rm-type math {flag}", flag.split()[0], "functions")


def test_rows_and_files_of_a_mix_may_lack_a_key_that_others_have(tmp_path: Path) -> None:
    rows = [GOOD, TOOLS, {**GOOD, "about": {}}]
    assert check(write(tmp_path, *rows), "--rm-type math --tool-key functions --metadata-key about") == []
    mix = f"{write(tmp_path, GOOD, name='others.jsonl')} 1 {write(tmp_path, TOOLS)} 1"
    words = f"--plugin datasets --rm-type math --prompt-mix {mix} --tool-key"
    check(None, f"{words} functions")
    check_refused(None, f"{words} tools", "tool_key")


# --- Labels against themselves ----------------------------------------------------------------------------------------

OTHERS = """
import time
from slime_core import hookimpl

@hookimpl
def slime_register(add):
    add.reward_model("words", Words)
    add.reward_model("several", Several)

class Words:
    @staticmethod
    def perfect_response(label): return label

    async def score(self, samples):
        while samples[0].label == "endless": time.sleep(0.1)
        if samples[0].label == "broken": raise ValueError("no such label")
        return [float(sample.response.split() == [sample.label]) for sample in samples]

class Several(Words):
    async def score(self, samples):
        return [{"acc": reward, "form": 1.0} for reward in await super().score(samples)]
"""
NUMBERS = ["\\frac{1}{2}", "x^2+1", *map(str, range(20))]


@pytest.mark.parametrize(
    ("reward", "labels", "parts"),
    [
        *((f"--rm-type {reward}", NUMBERS, ()) for reward in ("math", "0.5*math+0.5*dapo:acc", "f1")),
        *((f"--rm-type {reward}", NUMBERS, ()) for reward in ("boxed_math", "deepscaler", "dapo --reward-key score")),
        ("--rm-type gpqa", ["A", "B"] * 10, ()),
        ("--rm-type several --reward-key form", ["two words"], ()),
        *(
            (
                f"--rm-type {reward}",
                ["a", "two words", "b", "a", "two words", "broken"],
                ("3 of 6 labels", "line 2: 'two words'", "line 5", "line 6: 'broken'", "no such label"),
            )
            for reward in ("words", "several --reward-key acc", "0.5*f1+0.5*several:acc")
        ),
        ("--rm-type words", ["a", "endless", "b"], ("1 of 3 labels", "line 2: 'endless'")),
        ("--rm-type words", ["endless"], ("1 of 1 labels",)),
    ],
)
def test_labels_that_do_not_score_against_themselves_are_counted_and_named(
    tmp_path: Path, reward: str, labels: list[str], parts: tuple[str, ...]
) -> None:
    (tmp_path / "mine.py").write_text(OTHERS)
    path = write(tmp_path, *({"label": label} for label in labels))
    warnings = check(path, f"--plugin {tmp_path}/mine.py {reward}", LabelSamples())
    assert len(warnings) == bool(parts)
    assert [part for part in parts if part not in warnings[0]] == []


@pytest.mark.parametrize(("reward", "labels"), [("words", ["two words", "three more words"]), ("boxed_math", ["x^{2"])])
def test_a_file_without_a_label_that_scores_against_itself_is_refused(
    tmp_path: Path, reward: str, labels: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(OTHERS)
    path = write(tmp_path, *({"label": label} for label in labels))
    with pytest.raises(DataError, match=re.escape(f"the {len(labels)} labels")):
        check(path, f"--plugin {tmp_path}/mine.py --rm-type {reward}", LabelSamples())
