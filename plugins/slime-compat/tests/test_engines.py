"""``--sglang-config FILE``: slime's YAML form of groups and models."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import ConfigError
from tests.function_paths import resolve

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


def read(folder: Path, text: str | None, *line: str) -> Resolved:
    file = folder / "engines.yaml"
    if text is not None:
        file.write_text(text)
    flags = ["--advantage-estimator", "sft", "--hf-checkpoint", str(ARITHMETIC / "model"), "--sglang-config", str(file)]
    return resolve([*flags, *line])[0]


@pytest.mark.parametrize("flags", [(), ("--rollout-num-gpus", "7")])
def test_groups_and_models_replace_the_file(tmp_path: Path, flags: tuple[str, ...]) -> None:
    resolved = read(tmp_path, POLICY + JUDGE, *flags)
    config = resolved.config
    assert [(group.num_engines, group.size) for group in config.engine_groups] == [(2, 2), (1, 1)]
    assert dict(config.engine_groups[0].overrides) == {"chunked_prefill_size": 512}
    (judge,) = config.engine.engine_models
    assert (judge.name, judge.model_path) == ("judge", tmp_path / "judge")
    assert [(group.num_engines, group.size) for group in config.auxiliary_groups] == [(2, 1)]
    assert config.cluster.rollout_num_gpus == 5
    assert str(resolved.provenance["engine_groups"]) == "flag --sglang-config"


def test_a_resume_reads_the_recorded_groups_and_not_the_file(tmp_path: Path) -> None:
    first = read(tmp_path, POLICY + JUDGE)
    (tmp_path / "config.toml").write_text(to_toml(first))
    (tmp_path / "engines.yaml").unlink()
    again, active = resolve(["--config", str(tmp_path / "config.toml")])
    assert (again.config.engine, again.config.cluster) == (first.config.engine, first.config.cluster)
    assert "compat" in active.registry.loaded  # as in the manifest of the first start


def test_an_old_file_may_have_the_setting_in_the_section_of_the_core(tmp_path: Path) -> None:
    (tmp_path / "engines.yaml").write_text(POLICY)
    (tmp_path / "run.toml").write_text('[engine]\nsglang_config = "engines.yaml"\n')
    resolved, active = resolve(["--config", str(tmp_path / "run.toml")])
    assert "compat" in active.registry.loaded
    assert resolved.config.cluster.rollout_num_gpus == 5


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (POLICY + JUDGE, "= 7 GPUs, but rollout_num_gpus = 8"),
        (None, "engines.yaml"),
        ("sglang: 5", "none"),
        ("sglang: [", "cannot be read"),
        ("sglang: [{server_groups: [{num_gpus: 8}]}]", "sglang[0]: has no name"),
        ("sglang: [{name: a, groups: []}]", "sglang[0]: knows no groups; accepted: engine_groups"),
        ("sglang: [{name: a}]", "sglang[0] (a): has no server_groups"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 0}]}]", "(a), group 0: num_gpus = 0"),
        *(
            (f"sglang: [{{name: a, server_groups: [{{num_gpus: 8, worker_type: {kind}}}]}}]", f"worker_type = {kind}")
            for kind in ("placeholder", "encoder")
        ),
        ("sglang: [{name: a, update_weights: false, server_groups: [{num_gpus: 8}]}]", "update_weights: true"),
        (
            "sglang: [{name: a, model_path: b, update_weights: true, server_groups: [{num_gpus: 8}]}]",
            "update_weights with model_path = b",
        ),
    ],
)
def test_a_wrong_file_is_reported_with_the_place(tmp_path: Path, text: str | None, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text, "--rollout-num-gpus", "8")
    assert named in str(refused.value).replace("\n    ", " ")
    assert f"--sglang-config {tmp_path / 'engines.yaml'}" in str(refused.value)


def test_engines_are_declared_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--sglang-config.*prefill_num_servers"):
        read(tmp_path, POLICY, "--prefill-num-servers", "1")
