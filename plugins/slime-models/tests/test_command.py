"""``slime models`` and ``--model``."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slime_core import RunPlan
from slime_core.errors import ConfigError
from slime_core.modeling.memory import GIB, Training, layouts
from slime_models.command import main, size_of
from slime_models.families import presets
from slime_models.options import ModelOptions
from slime_models.plugin import slime_check
from slime_models.recognise import recognise
from slime_models.shape import config_of


def folder_of(path: Path, name: str, **changes: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config_of(presets()[name].shape), **changes}))
    return path


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def test_list_shows_every_preset(capsys):
    lines = printed(capsys, "list").splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(presets())


def test_the_table_of_the_guide_is_what_list_prints(capsys):
    guide = Path(__file__).parents[3] / "docs/models.md"
    assert printed(capsys, "list", "--sources") in guide.read_text(encoding="utf-8")


def test_the_command_loads_nothing_heavy():
    code = "import sys; from slime_models.command import main; main(['list']); main(['show', 'kimi-k2'])\n"
    code += "assert not {'torch', 'transformers', 'megatron', 'mbridge', 'ray', 'sglang', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_show_prints_arguments_for_launch_scripts(capsys):
    text = printed(capsys, "show", "QWEN3-4b", "--format", "args")
    assert "--num-layers 36\n" in text
    assert "--qk-layernorm\n" in text
    assert "'" not in text


@pytest.mark.parametrize("name", ["qwen2.5-0.5B", "llama3.2-1B", "qwen3-30B-A3B", "glm4-9B", "glm4.5-106B-A12B"])
def test_a_run_of_that_checkpoint_accepts_the_arguments_and_one_of_another_does_not(tmp_path, capsys, name):
    from slime_core.cli.main import main as slime

    words = [word for line in printed(capsys, "show", name, "--format", "args").splitlines() for word in line.split()]
    check = ["check", "--plugin", "grpo", "--hf-checkpoint", str(folder_of(tmp_path, name)), *words]
    assert slime(check) == 2
    assert "no *.safetensors file" in capsys.readouterr().err  # which is looked at once all settings are right
    folder_of(tmp_path, name, intermediate_size=6912)
    assert slime(check) == 2
    assert "6912" in capsys.readouterr().err


def test_show_prints_a_table_of_a_run_file(capsys):
    found = tomllib.loads(printed(capsys, "show", "deepseek-v3", "--format", "toml"))
    assert found["megatron"]["moe_layer_freq"] == "[0]*3+[1]*58"


def test_show_prints_the_parameters(capsys):
    assert "671,026,404,352" in printed(capsys, "show", "deepseek-r1")


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(ConfigError, match="preset 'qwen3-5B'"):
        main(["show", "qwen3-5B"])


def test_match_names_every_preset_of_that_shape(tmp_path, capsys):
    text = printed(capsys, "match", str(folder_of(tmp_path, "deepseek-r1")))
    assert "presets: deepseek-v3, deepseek-v3.1, deepseek-r1\n" in text


def test_match_lists_how_the_nearest_preset_differs(tmp_path, capsys):
    text = printed(capsys, "match", str(folder_of(tmp_path, "qwen3-4B", rope_theta=5e6, intermediate_size=6912)))
    assert "intermediate_size = 9728" in text


def test_every_preset_is_recognised():
    for name, preset in presets().items():
        assert name in [one.name for one in recognise(config_of(preset.shape)).presets]


def test_an_unknown_architecture_names_the_closest_family(tmp_path):
    folder = folder_of(tmp_path, "qwen3-4B", architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next")
    with pytest.raises(ConfigError, match="closest is Qwen3"):
        main(["match", str(folder)])


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[]", "holds no JSON object"), ('{"architectures": 3}', "no family of slime-models")],
)
def test_a_folder_without_a_config_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        main(["match", str(tmp_path)])


def test_a_field_of_another_type_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="hidden_size = '2560'"):
        main(["match", str(folder_of(tmp_path, "qwen3-4B", hidden_size="2560"))])


# --- Layouts ----------------------------------------------------------------------------------------------------------


def test_layouts_that_fit_come_best_first():
    found = layouts(size_of(presets()["qwen3-4B"].shape), 8, 70, Training(tokens=8192))
    cut = found[0].cut
    assert (cut.layout.tensor, cut.layout.pipeline, cut.data, cut.recompute) == (1, 1, 8, "mlp")
    assert all(one.total <= 0.9 * 70 * GIB for one in found)


def test_the_bytes_of_one_layout_by_hand():
    """Qwen3-4B on one rank: 2, 4 and 12 bytes a parameter."""
    whole, *_ = layouts(size_of(presets()["qwen3-4B"].shape), 1, 200, Training(tokens=1024))
    found = tuple(whole.parts[name] for name in ("weights", "gradients", "optimizer"))
    assert found == tuple(n * 4_022_468_096 for n in (2, 4, 12))
    assert whole.parts["logits"] == 1024 * 151936 * (2 + 4)


def test_flags_of_the_best_layout_are_printed(capsys):
    text = printed(capsys, "show", "qwen3-30B-A3B", "--gpus", "8", "--gpu-memory-gib", "80")
    assert "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8"], "belong together"),
        (["--gpus", "12", "--gpu-memory-gib", "80"], "a multiple of 8"),
        (["--gpus", "8", "--gpu-memory-gib", "8"], "GPUs of 8 GiB"),
    ],
)
def test_layouts_that_cannot_be_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        main(["show", "qwen3-235B-A22B", *words])


# --- --model ----------------------------------------------------------------------------------------------------------


def mistakes(model: str, folder: Path | None) -> list[str]:
    plan = RunPlan(settings={"hf_checkpoint": None if folder is None else str(folder)})
    return list(slime_check(plan, ModelOptions(model=model)))


def test_the_checkpoint_of_the_preset_is_accepted(tmp_path):
    assert mistakes("Qwen3-4B", folder_of(tmp_path, "qwen3-4B")) == []


def test_the_setting_has_an_effect_where_the_checkpoint_uses_a_model_spec(tmp_path, capsys):
    from slime_core.cli.main import main as slime

    folder = folder_of(tmp_path, "qwen3-4B", num_attention_heads=20)
    assert slime(["check", "--plugin", "grpo", "--model", "qwen3-4B", "--hf-checkpoint", str(folder)]) == 2
    assert "--model qwen3-4B: num_attention_heads = 32" in capsys.readouterr().err


def test_every_field_that_differs_is_listed(tmp_path):
    found = mistakes("qwen3-4B", folder_of(tmp_path, "qwen3-4B", num_attention_heads=20, intermediate_size=6912))
    named = [("intermediate_size = 9728", "6912"), ("num_attention_heads = 32", "20")]
    assert [all(name in mistake for name in names) for mistake, names in zip(found, named, strict=True)] == [True] * 2


def test_a_preset_needs_a_checkpoint():
    (mistake,) = mistakes("qwen3-4B", None)
    assert "--hf-checkpoint" in mistake


def test_an_unknown_preset_is_a_mistake(tmp_path):
    assert "--model qwen9" in mistakes("qwen9", folder_of(tmp_path, "qwen3-4B"))[0]
