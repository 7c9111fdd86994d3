"""Settings that the plugin refuses."""

from __future__ import annotations

import pytest

from slime_core.cli.activation import resolve
from slime_core.errors import ConfigError

GROUPS = "--advantage-estimator reinforce_plus_plus_baseline --rollout-batch-size 8 --n-samples-per-prompt"


@pytest.mark.parametrize(
    ("line", "setting"),
    [
        ("--advantage-estimator reinforce_plus_plus --normalize-advantages", "normalize_advantages"),
        ("--advantage-estimator ppo:reinforce_plus_plus --normalize-advantages", "normalize_advantages"),
        ("--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages", "normalize_advantages"),
        (f"{GROUPS} 1", "n_samples_per_prompt"),
    ],
)
def test_settings_without_an_effect_are_refused(line: str, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(["--plugin", "ppo", *line.split()])
    assert setting in caught.value.keys


@pytest.mark.parametrize(
    "line", ["--normalize-advantages", "--advantage-estimator reinforce_plus_plus --gamma 0.9", f"{GROUPS} 2"]
)
def test_other_settings_are_accepted(line: str) -> None:
    resolve(["--plugin", "ppo", *line.split()])
