"""Filters as slime's users write them."""

from __future__ import annotations

import pytest

from slime_compat.filters import PathGroupFilter, PathRolloutFilter
from slime_core import Sample
from slime_core.errors import PluginError

EQUAL = [Sample(index=0, reward=1.0), Sample(index=1, reward=1.0)]
MIXED = [Sample(index=2, reward=1.0), Sample(index=3, reward=0.0)]


def group_filter(write, verdict: str) -> PathGroupFilter:
    text = f"""
        import numpy as np
        import torch
        from types import SimpleNamespace as S

        def f(args, samples, **kwargs):
            rewards = [sample.get_reward_value(args) for sample in samples]
            return {verdict}
        """
    return PathGroupFilter(write("dynamic_sampling_filter_path", text, name=":f"))


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ("len(set(rewards)) > 1", "filtered"),
        ("np.std(rewards) > 0", "filtered"),
        ("np.array(np.std(rewards) > 0)", "filtered"),
        ("torch.tensor(rewards).std() > 0", "filtered"),
        ("S(keep=np.std(rewards) > 0)", "filtered"),
        ("S(keep=len(set(rewards)) > 1, reason=f'zero_std_{rewards[0]}')", "zero_std_1.0"),
        ("S(keep=len(set(rewards)) > 1, reason='too easy / 1.0')", "too_easy_1.0"),
        ("S(keep=len(set(rewards)) > 1, reason='')", "filtered"),
        ("S(keep=len(set(rewards)) > 1, reason='-')", "filtered"),
    ],
)
def test_a_group_is_kept_or_dropped_for_the_reason_that_the_function_gives(write, verdict: str, reason: str) -> None:
    keep = group_filter(write, verdict)
    assert (keep(EQUAL).dropped, keep(MIXED).dropped) == (reason, None)
    assert keep(MIXED).samples == MIXED


@pytest.mark.parametrize(
    "verdict",
    [
        "samples",
        "np.array([True, True])",
        "np.float32(1.0)",
        "1",
        "S(keep=None)",
        "S(keep=False, keep_when_insufficient=1)",
    ],
)
def test_a_verdict_must_be_a_single_bool(write, verdict: str) -> None:
    with pytest.raises(PluginError, match=r"--dynamic-sampling-filter-path mine\.py:f"):
        group_filter(write, verdict)(MIXED)


def test_a_function_over_all_groups_removes_samples_and_new_ones_are_counted(write) -> None:
    text = """
        def remove(args, groups):
            for sample in (sample for group in groups for sample in group):
                sample.remove_sample = sample.remove_sample or sample.index in (1, 2, 3)
        """
    gone = [Sample(index=4, remove_sample=True)]
    results = PathRolloutFilter(write("rollout_sample_filter_path", text))([EQUAL, MIXED, gone])
    assert [result.changed for result in results] == [{"filtered": 1}, {"filtered": 2}, {}]
    assert [sample.remove_sample for result in results for sample in result.samples] == [False, True, True, True, True]
    assert {result.dropped for result in results} == {None}
