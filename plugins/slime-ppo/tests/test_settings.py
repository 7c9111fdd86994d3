"""What the plugin says of the settings of a run."""

from __future__ import annotations

import pytest

from slime_core.cli.activation import resolve
from slime_core.errors import ConfigError


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "ppo:reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_an_estimator_that_whitens_is_not_whitened_again(name):
    with pytest.raises(ConfigError) as caught:
        resolve(["--plugin", "ppo", "--advantage-estimator", name, "--normalize-advantages"])
    assert "--normalize-advantages" in str(caught.value)


def test_groups_of_one_under_a_group_baseline_are_refused():
    line = (
        "--plugin ppo --advantage-estimator reinforce_plus_plus_baseline --rollout-batch-size 8 --n-samples-per-prompt"
    )
    with pytest.raises(ConfigError, match="n_samples_per_prompt = 1"):
        resolve([*line.split(), "1"])
    resolve([*line.split(), "2"])


@pytest.mark.parametrize("line", ["--normalize-advantages", "--advantage-estimator reinforce_plus_plus --gamma 0.9"])
def test_other_settings_are_accepted(line):
    resolve(["--plugin", "ppo", *line.split()])
