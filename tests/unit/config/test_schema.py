"""The sections: frozen, complete, and unambiguous on a command line."""

from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from slime_core.config.learning import AlgorithmConfig, LearnerConfig
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import ARITHMETIC, DEMO_DEFAULTS, RunConfig
from slime_core.config.section import EngineSection
from slime_core.config.settings import core_settings


def test_no_two_sections_share_a_name() -> None:
    sections = [section for _, section in RunConfig() if not isinstance(section, EngineSection)]
    names = [name for section in sections for name, _ in section]
    assert len(names) == len(set(names)) == len(core_settings())


def test_every_setting_has_a_default_and_says_what_it_does() -> None:
    for setting in core_settings().values():
        assert not setting.info.is_required()
        assert str(setting.info.description).endswith(".")


def test_every_setting_that_may_be_none_says_what_none_means() -> None:
    for setting in core_settings().values():
        assert not setting.optional or "None:" in str(setting.info.description), setting.name


def test_every_setting_says_in_words_what_it_accepts() -> None:
    assert [setting.name for setting in core_settings().values() if not setting.accepts] == []


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().rollout.num_rollout = 3  # type: ignore[misc]


def test_a_config_refuses_names_it_does_not_know() -> None:
    with pytest.raises(ValidationError, match="eps_clop"):
        AlgorithmConfig.model_validate({"eps_clop": 0.1})


@pytest.mark.parametrize("k", [0, -2])
def test_no_token_is_no_top_k(k: int) -> None:
    with pytest.raises(ValidationError, match="rollout_top_k"):
        RolloutConfig(rollout_top_k=k)


def test_a_ratio_cannot_be_clipped_below_zero_but_far_above_one() -> None:
    with pytest.raises(ValidationError, match="eps_clip"):
        AlgorithmConfig(eps_clip=1.5)
    assert AlgorithmConfig(eps_clip=1, eps_clip_high=4).eps_clip_high == 4


def test_equal_configs_hash_alike_and_survive_pickling() -> None:
    config = RunConfig(rollout=RolloutConfig(num_rollout=3, rollout_stop=("\n",)))
    assert hash(pickle.loads(pickle.dumps(config))) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("learner", "samples", "steps"),
    [
        (LearnerConfig(), 12, 1),
        (LearnerConfig(num_steps_per_rollout=3), 4, 3),
        (LearnerConfig(global_batch_size=6), 6, 2),
        (LearnerConfig(global_batch_size=4, num_steps_per_rollout=3), 4, 3),
    ],
)
def test_samples_and_steps_follow_from_each_other(learner: LearnerConfig, samples: int, steps: int) -> None:
    config = RunConfig(rollout=RolloutConfig(rollout_batch_size=4, n_samples_per_prompt=3), learner=learner)
    assert (config.samples_per_rollout, config.samples_per_step, config.steps_per_rollout) == (12, samples, steps)


def test_embedded_defaults_are_settings_and_their_files_exist() -> None:
    assert DEMO_DEFAULTS.keys() <= core_settings().keys()
    assert (ARITHMETIC / "model" / "config.json").is_file()
    assert (ARITHMETIC / "data" / "held_out.jsonl").is_file()
