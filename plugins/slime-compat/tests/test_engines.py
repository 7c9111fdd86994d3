"""``--sglang-config FILE``: slime's YAML form of groups and models."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import ConfigError
from tests.function_paths import resolve

MODEL = ARITHMETIC / "model"
POLICY = """
sglang:
  - name: actor
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: regular, num_gpus: 4, overrides: {chunked_prefill_size: 512}}
      - {num_gpus: 1, num_gpus_per_engine: 1}
"""
JUDGE = """
  - name: judge
    model_path: judge
    engine_groups: [{num_gpus: 2}]
"""


def read(folder: Path, text: str, *line: str) -> Resolved:
    file = folder / "engines.yaml"
    file.write_text(text)
    flags = ["--advantage-estimator", "toy", "--hf-checkpoint", str(MODEL), "--sglang-config", str(file)]
    return resolve([*flags, *line])[0]


def test_groups_and_models_stand_in_for_the_file(tmp_path):
    found = read(tmp_path, POLICY + JUDGE, "--rollout-num-gpus", "7")
    config = found.config
    assert [(group.num_engines, group.size) for group in config.engine_groups] == [(2, 2), (1, 1)]
    assert dict(config.engine_groups[0].overrides) == {"chunked_prefill_size": 512}
    (judge,) = config.engine.engine_models
    assert (judge.name, judge.model_path) == ("judge", tmp_path / "judge")
    assert [(group.num_engines, group.size) for group in config.auxiliary_groups] == [(2, 1)]
    assert config.cluster.rollout_num_gpus == 5
    assert str(found.provenance["engine_groups"]) == "flag --sglang-config"


def test_the_number_of_gpus_may_be_left_out(tmp_path):
    assert read(tmp_path, POLICY).config.cluster.rollout_num_gpus == 5


WRONG = {
    POLICY + JUDGE: "= 7 GPUs, but rollout_num_gpus = 8",
    "sglang: 5": "; found none",
    "sglang: [": "cannot be read",
    "sglang: [{server_groups: [{num_gpus: 8}]}]": "sglang[0]: has no name",
    "sglang: [{name: a, groups: []}]": "sglang[0]: knows no groups; accepted: engine_groups",
    "sglang: [{name: a}]": "sglang[0] (a): has no server_groups",
    "sglang: [{name: a, server_groups: [{num_gpus: 0}]}]": ("sglang[0] (a), group 0: num_gpus = 0"),
    "sglang: [{name: a, server_groups: [{num_gpus: 8, worker_type: placeholder}]}]": (
        "sglang[0] (a), group 0: worker_type = placeholder"
    ),
    "sglang: [{name: a, server_groups: [{num_gpus: 8, worker_type: encoder}]}]": (
        "sglang[0] (a), group 0: worker_type = encoder"
    ),
    "sglang: [{name: a, update_weights: false, server_groups: [{num_gpus: 8}]}]": "update_weights: true",
    "sglang: [{name: a, model_path: b, update_weights: true, server_groups: [{num_gpus: 8}]}]": (
        "sglang[0] (a): update_weights with model_path = b"
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_a_wrong_file_is_reported_with_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, "--rollout-num-gpus", "8")
    assert message in str(caught.value).replace("\n    ", " ")
    assert f"--sglang-config {tmp_path / 'engines.yaml'}" in str(caught.value)


def test_engines_are_declared_in_one_place(tmp_path):
    with pytest.raises(ConfigError, match=r"--sglang-config.*prefill_num_servers"):
        read(tmp_path, POLICY, "--prefill-num-servers", "1")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=f"--sglang-config {tmp_path}/none.yaml"):
        resolve(["--advantage-estimator", "toy", "--sglang-config", str(tmp_path / "none.yaml")])


def test_the_flag_activates_the_plugin_and_an_old_file_may_have_it_in_its_section(tmp_path):
    (tmp_path / "engines.yaml").write_text(POLICY)
    (tmp_path / "run.toml").write_text('[engine]\nsglang_config = "engines.yaml"\n')
    found, active = resolve(["--config", str(tmp_path / "run.toml")])
    assert "compat" in found.plugin_options
    assert [need.plugin.name for need in active.by_need if "sglang_config" in need.why] == ["compat"]
    assert found.config.cluster.rollout_num_gpus == 5


def test_a_resume_reads_the_recorded_groups_and_not_the_file(tmp_path):
    first = read(tmp_path, POLICY + JUDGE)
    (tmp_path / "config.toml").write_text(to_toml(first))
    (tmp_path / "engines.yaml").unlink()
    again, _ = resolve(["--config", str(tmp_path / "config.toml")])
    assert again.config.engine == first.config.engine
    assert again.config.cluster == first.config.cluster
    assert "compat" in again.plugin_options  # as in the manifest of the first start
