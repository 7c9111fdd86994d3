"""Weighted sums of reward models: their syntax, and the messages for sums that cannot be read."""

from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.explain import to_toml
from slime_core.config.load import load
from slime_core.config.sampling import EvalConfig, EvalDataset, RewardTerm, RolloutConfig, reward_names, reward_terms
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError

SETS = {"runs": None, "one": "f1", "two": "0.7*math+0.3*f1", "twice": "1*math+2*math"}


@pytest.mark.parametrize(
    ("written", "terms"),
    [
        ("0.7*math+0.3*f1", [RewardTerm(0.7, "math"), RewardTerm(0.3, "f1")]),
        (" 1 * math - .5*f1-2 * d:acc ", [RewardTerm(1, "math"), RewardTerm(-0.5, "f1"), RewardTerm(-2, "d", "acc")]),
        ("-1*a-b+2*c", [RewardTerm(-1, "a-b"), RewardTerm(2, "c")]),
        ("2*x+1", [RewardTerm(2, "x+1")]),
    ],
)  # fmt: skip
def test_a_sum_is_weights_and_names_and_a_name_may_hold_signs(written, terms):
    assert reward_terms(written) == tuple(terms)


def test_a_name_alone_is_no_sum():
    assert reward_terms("exact_match") is None
    assert reward_names("exact_match") == ("exact_match",)


def test_the_models_of_a_sum_are_named_once():
    assert reward_names("1*dapo:acc+2*dapo:score+1*math") == ("dapo", "math")


@pytest.mark.parametrize("written", ["math*0.7", "0.7*", "a*b", "1*math+*f1", "0.5*math:"])
def test_a_malformed_sum_is_refused(written):
    config = RunConfig(rollout=RolloutConfig(rm_type=written))
    assert messages(config) == [
        f"rm_type = {written!r} is no sum of reward models; accepted is WEIGHT*NAME+WEIGHT*NAME, such as "
        "'0.7*math+0.3*f1', or WEIGHT*NAME:KEY for one of several numbers, such as '0.3*dapo:acc'"
    ]


def test_a_sum_of_an_evaluation_set_is_read_too():
    sets = [EvalDataset(name=name, path=Path("a.jsonl"), rm_type=rm_type) for name, rm_type in SETS.items()]
    config = RunConfig(eval=EvalConfig(eval_datasets=tuple(sets)))
    assert [one.message for one in mistakes(config) if "rm_type" in one.message] == [
        "evaluation set twice: rm_type = '1*math+2*math' names a part twice; add up its weights"
    ]


def test_a_part_that_is_named_twice_is_refused():
    config = RunConfig(rollout=RolloutConfig(rm_type="1*math+2*math"))
    assert messages(config) == ["rm_type = '1*math+2*math' names a part twice; add up its weights"]


def messages(config):
    return [one.message for one in mistakes(config) if one.message.startswith("rm_type")]


@pytest.mark.parametrize(
    ("table", "written"),
    [
        ('rm_type = { math = 0.7, "dapo:acc" = -1 }', "0.7*math-1*dapo:acc"),
        ("[rollout.rm_type]\nf1 = 1e-7\nmath = 20000000.0\nmy-rm_2 = 2", "0.0000001*f1+20000000.0*math+2*my-rm_2"),
    ],
)
def test_a_table_of_weights_is_the_same_sum_and_is_written_down_as_text(tmp_path, table, written):
    by_table = loaded(tmp_path, f"[rollout]\n{table}\n")
    by_flag = load(["--rm-type", written], check_rules=False)
    assert by_table.config == by_flag.config
    assert by_table.config.rollout.rm_type == written
    assert loaded(tmp_path, to_toml(by_table)).config == by_table.config


def test_an_evaluation_set_has_a_table_too(tmp_path):
    text = '[[eval.eval_datasets]]\nname = "a"\npath = "a.jsonl"\nrm_type = { f1 = 0.5, math = 1 }\n'
    (one,) = loaded(tmp_path, text).config.eval.eval_datasets
    assert one.rm_type == "0.5*f1+1*math"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('{ math = "0.7" }', "found math = '0.7'; accepted: a table of reward models and their weights"),
        ("{ math = nan, f1 = true }", "found math = nan, f1 = True; accepted: a table of reward models and their"),
        ("{}", "found an empty table; accepted: a table of reward models and their weights, such as math = 0.7"),
        ('{ "a*b" = 1 }', "found the parts 'a*b'; accepted: NAME or \"NAME:KEY\", such as math = 0.7, \"dapo:acc\""),
    ],
)  # fmt: skip
def test_a_table_that_is_no_sum_says_what_is_wrong(tmp_path, table, message):
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path, f"[rollout]\nrm_type = {table}\n")
    assert f"run.toml:2 [rollout] rm_type: {message}" in str(refused.value)


def loaded(folder, text):
    (folder / "run.toml").write_text(text)
    return load(["--config", str(folder / "run.toml")], check_rules=False)
