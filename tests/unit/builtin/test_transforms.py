"""Soft overlong punishment; the other transforms are tried where they are used."""

from __future__ import annotations

import pytest

from slime_core.builtin.transforms import PunishOverlong
from slime_core.config.schema import RolloutConfig, RunConfig
from slime_core.plugins.construction import run_view
from slime_core.types import Sample


def punished(length: int, reward=1.0, **settings):
    rollout = RolloutConfig(rollout_max_response_len=20, **settings)
    sample = Sample(reward=reward, response_length=length)
    found = PunishOverlong(None, run_view(RunConfig(rollout=rollout)))([sample])
    return sample.reward, found.changed


@pytest.mark.parametrize(("length", "worth"), [(1, 1.0), (12, 1.0), (14, 0.75), (20, 0.0), (60, 0.0)])
def test_the_last_stretch_costs_ever_more(length, worth):
    # L = 20 and C = 8: free up to 12 tokens; 14 are 2 / 8 into the stretch. Turns of tools may go beyond L.
    found, changed = punished(length, overlong_buffer_len=8)
    assert found == pytest.approx(worth)
    assert changed == ({"overlong": 1} if length > 12 else {})


def test_the_factor_scales_what_is_lost():
    assert punished(20, overlong_buffer_len=8, overlong_penalty_factor=0.5)[0] == pytest.approx(0.5)


def test_by_default_a_fifth_of_the_limit_is_the_stretch():
    assert [punished(length)[0] for length in (16, 18, 20)] == pytest.approx([1.0, 0.5, 0.0])


def test_of_named_rewards_the_one_that_trains_is_lowered():
    assert punished(20, {"score": 1.0, "acc": 1.0}, reward_key="score")[0] == {"score": 0.0, "acc": 1.0}
