"""Filters as slime's users write them."""

from __future__ import annotations

import pytest

from slime_compat.filters import PathGroupFilter, PathRolloutFilter
from slime_core import RunView
from slime_core.errors import PluginError
from slime_core.types import Sample

EQUAL = [Sample(index=0, reward=1.0), Sample(index=1, reward=1.0)]
MIXED = [Sample(index=2, reward=1.0), Sample(index=3, reward=0.0)]

NONZERO = """
    from dataclasses import dataclass

    @dataclass
    class DynamicFilterOutput:
        keep: bool
        reason: str | None = None

    def nonzero_std(args, samples, **kwargs):
        rewards = {sample.get_reward_value(args) for sample in samples}
        keep = len(rewards) > 1
        return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{min(rewards)}")
"""


def test_a_group_is_dropped_for_the_reason_that_the_function_gives(write) -> None:
    keep = PathGroupFilter(write("dynamic_sampling_filter_path", NONZERO, name=":nonzero_std"), RunView())
    assert (keep(EQUAL).dropped, keep(MIXED).dropped) == ("zero_std_1.0", None)
    assert keep(MIXED).samples == MIXED


def test_a_function_may_say_yes_or_no(write) -> None:
    keep = PathGroupFilter(
        write("dynamic_sampling_filter_path", "def f(args, samples): return samples[0].index == 2"), RunView()
    )
    assert (keep(EQUAL).dropped, keep(MIXED).dropped) == ("filtered", None)


@pytest.mark.parametrize(
    "verdict",
    [
        "np.std(rewards) > 0",
        "np.array(np.std(rewards) > 0)",
        "torch.tensor(rewards).std() > 0",
        "S(keep=np.std(rewards) > 0)",
        "S(keep=torch.tensor(rewards).std() > 0)",
    ],
)
def test_a_verdict_may_be_a_bool_of_numpy_or_torch(write, verdict: str) -> None:
    text = (
        "import numpy as np\nimport torch\nfrom types import SimpleNamespace as S\n"
        f"def f(args, samples):\n    rewards = [one.reward for one in samples]\n    return {verdict}\n"
    )
    keep = PathGroupFilter(write("dynamic_sampling_filter_path", text, name=":f"), RunView())
    assert (keep(EQUAL).dropped, keep(MIXED).dropped) == ("filtered", None)


@pytest.mark.parametrize("verdict", ["np.array([True, True])", "np.float32(1.0)", "1", "S(keep=None)"])
def test_a_verdict_must_be_a_single_bool(write, verdict: str) -> None:
    text = f"import numpy as np\nfrom types import SimpleNamespace as S\ndef f(args, samples): return {verdict}"
    keep = PathGroupFilter(write("dynamic_sampling_filter_path", text, name=":f"), RunView())
    with pytest.raises(PluginError, match=r"--dynamic-sampling-filter-path mine\.py:f: it returned"):
        keep(MIXED)


@pytest.mark.parametrize(
    ("reason", "counted"), [("too easy / 1.0", "too_easy_1.0"), ("", "filtered"), ("-", "filtered")]
)
def test_a_reason_becomes_part_of_a_metrics_name(write, reason: str, counted: str) -> None:
    text = f"from types import SimpleNamespace as S\ndef f(args, samples): return S(keep=False, reason={reason!r})"
    assert PathGroupFilter(write("dynamic_sampling_filter_path", text), RunView())(EQUAL).dropped == counted


def test_a_wrong_return_value_of_a_filter_is_refused(write) -> None:
    keep = PathGroupFilter(write("dynamic_sampling_filter_path", "def f(args, samples): return samples"), RunView())
    with pytest.raises(PluginError) as refused:
        keep(MIXED)
    assert "--dynamic-sampling-filter-path mine.py" in str(refused.value)


def test_a_verdict_that_the_core_cannot_follow_is_refused(write) -> None:
    text = "from types import SimpleNamespace as S\n"
    text += "def f(args, samples): return S(keep=False, keep_when_insufficient=True)"
    with pytest.raises(PluginError, match="keep_when_insufficient"):
        PathGroupFilter(write("dynamic_sampling_filter_path", text), RunView())(EQUAL)


def test_samples_that_were_removed_before_are_not_counted(write) -> None:
    text = "def f(args, groups):\n    for sample in groups[0]: sample.remove_sample = True\n"
    group = [Sample(index=0, remove_sample=True), Sample(index=1)]
    (result,) = PathRolloutFilter(write("rollout_sample_filter_path", text), RunView())([group])
    assert result.changed == {"filtered": 1}


def test_a_function_over_all_groups_removes_samples(write) -> None:
    text = """
        def remove_short(args, groups):
            for group in groups:
                for sample in group:
                    sample.remove_sample = sample.index in (1, 2, 3)
        """
    first, second = PathRolloutFilter(write("rollout_sample_filter_path", text), RunView())([EQUAL, MIXED])
    assert (first.changed, second.changed) == ({"filtered": 1}, {"filtered": 2})
    assert [sample.remove_sample for sample in (*first.samples, *second.samples)] == [False, True, True, True]
    assert first.dropped is None
